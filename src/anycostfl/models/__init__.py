"""Architectures, one file each: `models/NAME.py` ends with a constant `MODEL`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from anycostfl.errors import UnknownNameError
from anycostfl.registry import load_file, modules_in, own_folders, unknown

__path__ = [*__path__, *own_folders("models")]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture: how to build it, and an example of its input for a batch size."""

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    summary: str


def names() -> list[str]:
    """Every architecture that can be loaded by name."""
    return modules_in("models", __path__)


def load(name: str) -> ModelSpec:
    """The architecture of that name."""
    if name not in names():
        raise unknown("model", name, names())
    module = load_file(__name__, name, "MODEL")
    if not isinstance(module.MODEL, ModelSpec):
        raise UnknownNameError(f"{module.__file__}: MODEL must be a ModelSpec")
    return module.MODEL


def file_of(name: str) -> str:
    """The file of an architecture, in the package or in a custom folder."""
    return f"models/{name}.py"
