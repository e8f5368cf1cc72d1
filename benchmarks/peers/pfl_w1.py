"""Workload W1 on pfl-research's simulator; runs in pfl's own environment (see README.md).

    python pfl_w1.py [--rounds 4] [--kernels ours]
    torchrun --nproc-per-node 2 pfl_w1.py            # two processes, one thread each

Prints `round K SECONDS`. pfl evaluates every device of round 1 before and after its training, and
offers no way to turn that off; rounds from 2 on train only. Unlike the other contestants it takes a
device's batches in a fixed order.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

DEVICES, COHORT, SAMPLES, BATCH, RATE = 60, 15, 1000, 32, 0.01


class Cnn(nn.Module):
    """The CNN of McMahan et al.; `pool_first` swaps ReLU and pooling, which changes no value."""

    def __init__(self, *, pool_first: bool) -> None:
        super().__init__()
        self.pool_first = pool_first
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 28, 28) to logits (batch, 10)."""
        for conv in (self.conv1, self.conv2):
            if self.pool_first:
                x = F.relu(F.max_pool2d(conv(x), 2))
            else:
                x = F.max_pool2d(F.relu(conv(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """What pfl minimises."""
        return F.cross_entropy(self(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """What pfl reports in round 1."""
        return {"loss": Weighted(self.loss(images, labels).item() * len(labels), len(labels))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Print the seconds of each round from the first worker."""

    def on_train_begin(self, *, model: Any) -> Any:
        """Start the clock."""
        del model
        self.last = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """Print and go on."""
        del aggregate_metrics, model
        now = time.perf_counter()
        if os.environ.get("RANK", "0") == "0":
            print(f"round {central_iteration + 1} {now - self.last:.4f}", flush=True)
        self.last = now
        return False, Metrics()


def fashion_mnist() -> tuple[Tensor, Tensor]:
    """Training images, normalised, and labels."""
    folder = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
    pixels, labels = (
        np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=offset)
        for name, offset in (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8))
    )
    images = torch.from_numpy(pixels.astype(np.float32)).view(-1, 1, 28, 28) / 255
    return (images - images.mean()) / images.std(), torch.from_numpy(labels.astype(np.int64))


def fleet() -> FederatedDataset:
    """The devices, each a slice of the one tensor, drawn in turn so that a cohort never repeats."""
    images, labels = fashion_mnist()

    @functools.cache
    def device(number: int) -> PyTorchTensorDataset:
        own = slice(number * SAMPLES, (number + 1) * SAMPLES)
        return PyTorchTensorDataset((images[own], labels[own]))

    return FederatedDataset(device, get_user_sampler("minimize_reuse", list(range(DEVICES))))


def simulate(rounds: int, kernels: str) -> None:
    """Run FedAvg."""
    module = Cnn(pool_first=kernels == "ours")
    if kernels == "ours":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    devices = fleet()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=devices, val_data=devices),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=SAMPLES),
        callbacks=[Clock()],
    )


def main() -> None:
    """Run the rounds asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kernels", choices=("plain", "ours"), default="plain")
    arguments = parser.parse_args()
    torch.manual_seed(0)  # the same first weights in every worker
    np.random.seed(0)  # noqa: NPY002 - pfl draws its cohorts from numpy's global generator
    simulate(arguments.rounds, arguments.kernels)


if __name__ == "__main__":
    main()
