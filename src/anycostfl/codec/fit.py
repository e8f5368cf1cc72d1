"""β → (ρ, L): the paper's piecewise-linear function, fitted offline (end of Sec. III-C).

The server compresses the update of a model trained on about 16 public samples at a grid of β and
records which (ρ, L) served best; between grid points both are interpolated.

Deviation: straight lines in log₂ β, for ρ and for log₂ L, because both β and L span decades.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from torch import Tensor

from anycostfl.codec import kernels
from anycostfl.codec.flat import flatten
from anycostfl.codec.frame import bond
from anycostfl.codec.refine import Draft, Guess, choose

BETAS = tuple(2.0**-e for e in range(2, 11))


@dataclass(frozen=True, slots=True)
class Fit:
    """Knots of the piecewise-linear function, β increasing."""

    beta: tuple[float, ...]
    sparsity: tuple[float, ...]
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        knots = np.array([self.beta, self.sparsity, self.levels], np.float64)
        if not (np.diff(knots[0]) > 0).all() or not knots.shape[1]:
            raise ValueError("the β of a fit must increase")
        if not ((knots[1] >= 0) & (knots[1] <= 1) & (knots[2] >= 1)).all():
            raise ValueError("a fit needs ρ in [0, 1] and L of at least 1")

    def predict(self, beta: float) -> Guess:
        """Interpolate; beyond the outer knots, hold their value."""
        at, knots = np.log2(beta), np.log2(self.beta)
        levels = 2 ** np.interp(at, knots, np.log2(self.levels))
        return Guess(float(np.interp(at, knots, self.sparsity)), round(float(levels)))

    def to_json(self) -> str:
        """The file format of `codec/fit.json`."""
        knots = {"beta": self.beta, "sparsity": self.sparsity, "levels": self.levels}
        return json.dumps({name: list(values) for name, values in knots.items()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """Read what `to_json` wrote."""
        knots = json.loads(text)
        return cls(*(tuple(knots[name]) for name in ("beta", "sparsity", "levels")))


def fit_update(update: Mapping[str, Tensor], blocks: Mapping[str, int]) -> Fit:
    """Fit the function to one public update: the best (ρ, L) at every β of the grid."""
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    parts = kernels.lay_out(shapes, blocks)
    draft = Draft.of(flatten(update), parts, 0, bond(b"", shapes))
    guess, knots = Guess(sparsity=0.0, levels=256), []
    for beta in BETAS:
        levels, kept = choose(draft, int(beta * 4 * draft.flat.size), guess)
        guess = Guess(1 - kept / draft.spans.start.size, levels)
        knots.append((beta, round(guess.sparsity, 5), float(levels)))
    return Fit(*zip(*sorted(knots), strict=True))


@cache
def shipped_fit() -> Fit:
    """The fit of the CNN on Fashion-MNIST: a first guess for any update."""
    return Fit.from_json((files("anycostfl.codec") / "fit.json").read_text())
