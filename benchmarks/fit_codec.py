"""Fit β → (ρ, L) from 16 public samples and write the files that are shipped.

python benchmarks/fit_codec.py [--cifar10 train.parquet]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import _updates
from anycostfl import codec, models
from anycostfl.codec.fit import fit_update

SAMPLES, WARM_UP, STEPS = 16, 160, 32
FITS = Path(codec.__file__).parent / "fits"


def public_update(model: str, data: _updates.Data, lr: float) -> dict[str, Tensor]:
    """What a model, past its first steps, learns in as many steps as a local epoch has."""
    torch.manual_seed(0)
    net = models.load(model).build()
    _updates.train(net, data, [torch.arange(SAMPLES)] * WARM_UP, lr)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    _updates.train(net, data, [torch.arange(SAMPLES)] * STEPS, lr)
    return {name: value - before[name] for name, value in net.state_dict().items()}


def main() -> None:
    """Write one file per preset whose data are at hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar10", type=Path, help="parquet file of CIFAR-10 training images")
    args = parser.parse_args()
    images, labels = _updates.fashion_mnist()
    jobs = [("fmnist", "cnn", (images[:SAMPLES], labels[:SAMPLES]), 0.01)]
    if args.cifar10:
        jobs.append(("cifar10", "vgg9", _updates.cifar10(args.cifar10, SAMPLES), 0.08))
    for preset, model, data, lr in jobs:
        fit = fit_update(public_update(model, data, lr), _updates.BLOCKS[model])
        (FITS / f"{preset}.json").write_text(fit.to_json())
        print(preset, fit.to_json())


if __name__ == "__main__":
    main()
