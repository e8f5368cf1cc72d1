"""Architectures, one file each: `models/NAME.py` ends with a constant `MODEL`."""

from __future__ import annotations

import importlib
import pkgutil

from anycostfl.errors import UnknownName
from anycostfl.types import ModelSpec


def names() -> list[str]:
    """Every architecture that can be loaded by name."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def load(name: str) -> ModelSpec:
    """The architecture of that name."""
    if name not in names():
        raise UnknownName(f"no model {name!r}; there are {', '.join(names())}")
    spec: ModelSpec = importlib.import_module(f"{__name__}.{name}").MODEL
    return spec
