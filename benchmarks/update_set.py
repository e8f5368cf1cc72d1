"""Real updates to judge codecs on, trained once and kept in a folder.

python benchmarks/update_set.py FOLDER [--cifar10 FOLDER] [--only NAME …]

Each is one local epoch after some steps of SGD, on normalised images as in the simulator: the CNN
early, in the middle and late in training, VGG-9 and ResNet-18 on CIFAR-10, each on a random part of
the data and on a part that has two classes only. `tune` in a name: free to look at while a codec is
made; the others are for the verdict.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from anycostfl import models, tasks
from anycostfl.data.samples import Dataset
from anycostfl.device import Training, measure, train
from anycostfl.experiment import prepared


@dataclass(frozen=True, slots=True)
class Stage:
    """A model after some warm-up steps, and how large its local epochs are."""

    name: str
    dataset: str
    model: str
    steps: int
    samples: int
    training: Training
    seed: int = 0


GENTLE, BRISK = Training(0.01, 32), Training(0.05, 32)
DEEP = Training(0.05, 64)
STAGES = (
    Stage("tune-cnn", "fashion-mnist", "cnn", 200, 1000, GENTLE, seed=11),
    Stage("tune-cnn-brisk", "fashion-mnist", "cnn", 800, 1000, BRISK, seed=12),
    Stage("cnn-early", "fashion-mnist", "cnn", 30, 1000, GENTLE),
    Stage("cnn-middle", "fashion-mnist", "cnn", 500, 1000, GENTLE),
    Stage("cnn-late", "fashion-mnist", "cnn", 3000, 1000, BRISK, seed=1),
    Stage("resnet18", "cifar10", "resnet18", 30, 512, BRISK),
    Stage("resnet18-late", "cifar10", "resnet18", 600, 833, BRISK),
    Stage("tune-resnet18", "cifar10", "resnet18", 20, 512, BRISK, seed=11),
    Stage("tune-vgg9", "cifar10", "vgg9", 200, 512, DEEP, seed=11),
    Stage("vgg9-early", "cifar10", "vgg9", 100, 833, DEEP),
    Stage("vgg9", "cifar10", "vgg9", 800, 833, DEEP),
)


@cache
def images_of(name: str, path: str) -> Dataset:
    """Loaded once for all stages."""
    return prepared(tasks.load(name), path)


def begin(net: nn.Module) -> nn.Module:
    """He's initialisation, with which ResNet-18 learns from the first step on."""
    for weight in net.parameters():
        if weight.dim() > 1:
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
    return net


def local_updates(stage: Stage, path: str) -> dict[str, dict[str, Tensor]]:
    """Warm up, then one epoch on a random part and one on a part of two classes."""
    images = images_of(stage.dataset, path if stage.dataset == "cifar10" else "")
    draw = torch.Generator().manual_seed(stage.seed)
    torch.manual_seed(stage.seed)
    net: nn.Module = models.load(stage.model).build()
    net = begin(net) if stage.model == "resnet18" else net
    task, training, labels = tasks.load(stage.dataset), stage.training, images.train.targets
    shuffled = torch.randperm(len(labels), generator=draw)

    def learn(module: nn.Module, part: Tensor) -> dict[str, Tensor]:
        seed = int(torch.randint(2**31, (), generator=draw))
        return train(module, images.train.take(part), task, training, seed)

    warm = torch.randint(len(shuffled), (stage.steps * training.batch,), generator=draw)
    for part in torch.split(warm, 50 * training.batch):
        learn(net, part)
    kind = labels[shuffled]
    two = shuffled[(kind == 2 + stage.seed % 3) | (kind == 7)]
    parts = {"iid": shuffled[: stage.samples], "noniid": two[: stage.samples]}
    metric, tests = task.metrics[0], images.test.take(slice(0, 500))
    right = metric.value(measure(copy.deepcopy(net), tests, [metric], training)[0].sum(0))
    print(f"{stage.name}: {right:.0%} correct when the local epochs begin", flush=True)
    return {name: learn(copy.deepcopy(net), own) for name, own in parts.items()}


def main() -> None:
    """Write what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cifar10", default="", help="folder of CIFAR-10's parquet files")
    parser.add_argument("--only", nargs="*", help="names of stages")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for stage in STAGES:
        wanted = not args.only or stage.name in args.only
        paths = {
            kind: args.folder / f"{stage.name}-{kind}.safetensors" for kind in ("iid", "noniid")
        }
        if not wanted or all(path.exists() for path in paths.values()):
            continue
        for kind, update in local_updates(stage, args.cifar10).items():
            save_file(update, paths[kind])


if __name__ == "__main__":
    main()
