"""Fit β → (ρ, L) from 16 public samples and print `FIT` of anycostfl.codec.kernel.

python benchmarks/fit_codec.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import _updates
from anycostfl import models
from anycostfl.codec import flatten
from anycostfl.codec.frame import payload_binding
from anycostfl.codec.kernel import FIT, Draft, Guess, choose_levels
from anycostfl.codec.sections import lay_out

MODEL, RATE = "cnn", 0.01
SAMPLES, WARM_UP, STEPS = 16, 160, 32


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


def fit_update(update: Mapping[str, Tensor], blocks: Mapping[str, int]) -> dict[float, Guess]:
    """Fit the function to one public update: the best (ρ, L) at every β of the grid."""
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    draft = Draft.of(flatten(update), lay_out(shapes, blocks), 0, payload_binding(b"", shapes))
    guess, fit = Guess(sparsity=0.0, levels=256), {}
    for beta in sorted(FIT, reverse=True):
        levels, kept = choose_levels(draft, int(beta * 4 * draft.flat.size), guess)
        guess = Guess(1 - kept / draft.spans.start.size, levels)
        fit[beta] = Guess(round(guess.sparsity, 5), levels)
    return dict(sorted(fit.items()))


def main() -> None:
    """Fit and print."""
    for beta, guess in fit_update(public_update(), _updates.BLOCKS[MODEL]).items():
        print(f"    {beta}: {guess},")


if __name__ == "__main__":
    main()
