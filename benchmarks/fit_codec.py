"""Fit β → (ρ, L) from 16 public samples and write the file that is shipped.

python benchmarks/fit_codec.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import _updates
from anycostfl import codec, models
from anycostfl.codec.fit import fit_update

MODEL, RATE = "cnn", 0.01
SAMPLES, WARM_UP, STEPS = 16, 160, 32
SHIPPED = Path(codec.__file__).parent / "fit.json"


def public_update() -> dict[str, Tensor]:
    """What a model, past its first steps, learns in as many steps as a local epoch has."""
    images, labels = _updates.fashion_mnist()
    data = images[:SAMPLES], labels[:SAMPLES]
    torch.manual_seed(0)
    net = models.load(MODEL).build()
    _updates.train(net, data, [torch.arange(SAMPLES)] * WARM_UP, RATE)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    _updates.train(net, data, [torch.arange(SAMPLES)] * STEPS, RATE)
    return {name: value - before[name] for name, value in net.state_dict().items()}


def main() -> None:
    """Fit, write, show."""
    fit = fit_update(public_update(), _updates.BLOCKS[MODEL])
    SHIPPED.write_text(fit.to_json())
    print(fit.to_json())


if __name__ == "__main__":
    main()
