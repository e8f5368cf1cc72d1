"""A task's model trained on all samples in one place: what federated training is compared with.

    python benchmarks/central.py har --path FOLDER --model har_cnn --rate 1e-3 --optimizer adamw

The learning rate decays by a cosine over all epochs. A tenth of the training samples (of each
owner) is left out to choose settings on; `--test` trains on all and measures on the test samples.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import torch

from anycostfl import tasks
from anycostfl.data.prepare import prepare_dataset
from anycostfl.data.samples import Dataset
from anycostfl.device import Training, measure, train
from anycostfl.experiment import initial_module
from anycostfl.metrics import score
from anycostfl.tasks import hold_out_tenth


def main() -> None:
    """Train and print the metrics after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--path", default="")
    parser.add_argument("--model", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", action="store_true")
    given = parser.parse_args()
    task = tasks.load(given.task)
    raw = task.dataset(given.path)
    if not given.test:
        kept = hold_out_tenth(Dataset(raw.train, raw.train, raw.owner_names))
        raw = replace(raw, train=kept.train, test=kept.test)
    dataset = prepare_dataset(task.preparation, raw)
    module = initial_module(given.model, given.seed)
    training = Training(
        given.rate,
        given.batch,
        optimizer=given.optimizer,
        momentum=given.momentum,
        precision="fp32",
    )
    owners = max(len(dataset.owner_names), 1)
    for epoch in range(given.epochs):
        rate = given.rate * (1 + math.cos(math.pi * epoch / given.epochs)) / 2
        train(module, dataset.train, task, training, 1000 * given.seed + epoch, rate=rate)
        sums = measure(module, dataset.test, task.metrics, training, owners)
        found = score(task.metrics, [sums], dataset.train.owners)
        assert found is not None  # noqa: S101
        others = ", ".join(f"{name} {value:.4f}" for name, value in found.others.items())
        print(f"epoch {epoch + 1}: {task.metrics[0].name} {found.value:.4f}, {others}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
