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


class BetaError(AnycostError, ValueError):
    """A compression rate outside (0, 1], or too low for even an empty payload."""


class UpdateError(AnycostError, ValueError):
    """An update that cannot be sent: not floating point, or not finite."""


class PayloadError(AnycostError, ValueError):
    """Bytes that are not a payload of the expected plan."""


class UnknownName(AnycostError, LookupError):  # noqa: N818 - reads as what happened
    """A model, preset, method or profile that does not exist."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture of `anycostfl.models`: how to build it and what it eats."""

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    summary: str


@dataclass(frozen=True, slots=True)
class Update:
    """A decoded update ũ and its mask m: both by parameter name, values 0 outside the mask."""

    values: dict[str, Tensor]
    masks: dict[str, Tensor]
