"""Numba behind a typed door: `compiled` turns a loop over arrays into machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compile on first call and keep the machine code on disk.

    No fast-math: IEEE results, so every CPU decodes the same bytes to the same values. Numba does
    not check indices, so a loop that reads a payload checks them itself.
    """
    return _compile(loop)


def inlined(loop: Loop) -> Loop:
    """The same for a small function inside hot loops: its body replaces every call."""
    return _compile(loop, inline="always")


def _compile(loop: Loop, inline: Literal["never", "always"] = "never") -> Loop:
    try:
        return cast(Loop, numba.njit(cache=True, nogil=True, inline=inline)(loop))
    except RuntimeError:  # no folder to keep it in, as in a container that cannot be written to
        return cast(Loop, numba.njit(nogil=True, inline=inline)(loop))
