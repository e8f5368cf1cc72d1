"""β → (ρ, L): the paper's piecewise-linear function, fitted offline (end of Sec. III-C).

The server compresses the update of a model trained on about 16 public samples at a grid of β and
records which (ρ, L) served best; between grid points both are interpolated.

Deviation: straight lines in log₂ β, for ρ and for log₂ L, because both β and L span decades.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from anycostfl.types import UnknownName

BETAS = tuple(2.0**-e for e in range(2, 11))


@dataclass(frozen=True, slots=True)
class Guess:
    """A sparsity ρ (share of kernels dropped) and a number of levels L."""

    sparsity: float
    levels: int


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
        """The file format of `codec/fits`."""
        knots = {"beta": self.beta, "sparsity": self.sparsity, "levels": self.levels}
        return json.dumps({name: list(values) for name, values in knots.items()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """Read what `to_json` wrote."""
        knots = json.loads(text)
        return cls(*(tuple(knots[name]) for name in ("beta", "sparsity", "levels")))


def average(fits: Sequence[Fit]) -> Fit:
    """One function from the fits of several updates over the same β."""
    return Fit(
        fits[0].beta,
        tuple(np.mean([f.sparsity for f in fits], axis=0).tolist()),
        tuple((2 ** np.mean(np.log2([f.levels for f in fits]), axis=0)).tolist()),
    )


def fit_names() -> list[str]:
    """Every fit that is shipped."""
    folder = files("anycostfl.codec") / "fits"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name[0] != "_")


@cache
def load_fit(name: str) -> Fit:
    """The shipped fit of that name: one per preset."""
    if name not in fit_names():
        raise UnknownName(f"no fit {name!r}; there are {', '.join(fit_names())}")
    return Fit.from_json((files("anycostfl.codec") / "fits" / f"{name}.json").read_text())
