"""The words every module shares: the errors, then the records that travel between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


class AnycostError(Exception):
    """Base of every error this package raises on purpose."""


class AlphaError(AnycostError, ValueError):
    """A shrinking factor outside (0, 1]."""


class TraceError(AnycostError):
    """The model could not be run on its example input."""


class NotShrinkable(AnycostError):  # noqa: N818 - reads as what happened
    """A narrower sub-model was asked of a model that has no free channel."""


class ShapeMismatch(AnycostError, ValueError):  # noqa: N818 - reads as what happened
    """A state whose keys or shapes are not those of the model."""


class UnknownName(AnycostError, LookupError):  # noqa: N818 - reads as what happened
    """A model, preset, method or profile that does not exist."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture of `anycostfl.models`: how to build it and what it eats."""

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    summary: str


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Values per tensor, and a mask of the same shape that says which of them were sent."""

    values: dict[str, Tensor]
    masks: dict[str, Tensor]
