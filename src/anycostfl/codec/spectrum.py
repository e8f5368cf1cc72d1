"""Convolutions by frequency: neighbouring weights of a kernel see nearly the same inputs.

Their updates are therefore alike, and the cosine transform of every k×k kernel concentrates what
they have in common in its low frequencies. It is orthonormal: errors keep their size. The layout of
a convolution (out, in, height, width) is (frequency, out, in). Any other tensor is a matrix of its
rows, a vector one row; so are four dimensions whose "kernels" are large, such as a position table,
because the transform takes the square of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch

from anycostfl.codec.arrays import Doubles, Floats
from anycostfl.compiled import compiled

LARGEST_KERNEL = 256  # height times width


def layout_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a tensor is coded."""
    if len(shape) == 4 and 1 < shape[2] * shape[3] <= LARGEST_KERNEL and min(shape) > 0:
        return shape[2] * shape[3], shape[0], shape[1]
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def to_spectrum(values: Floats) -> Floats:
    """Bring a tensor into its layout."""
    layout = layout_of(values.shape)
    if len(layout) == 2:
        return values.reshape(layout)
    kernels = torch.from_numpy(values.reshape(-1, layout[0]))
    waves = torch.from_numpy(_waves(*values.shape[2:]))
    spectrum: Floats = (waves @ kernels.T).reshape(layout).numpy()
    return spectrum


def from_spectrum(flat: Floats, shape: Sequence[int]) -> None:
    """Transform the elements of a layout back to those of the tensor, in place."""
    layout = layout_of(shape)
    if len(layout) == 3:
        height, width = shape[2:]
        _invert(flat.reshape(layout[0], -1).copy(), _waves(height, width), flat)


@compiled
def _invert(spectrum: Floats, waves: Floats, flat: Floats) -> None:
    """Add up in the order of the frequencies: the same bits on every machine."""
    count = waves.shape[0]
    for kernel in range(spectrum.shape[1]):
        for place in range(count):
            total = np.float32(0)
            for frequency in range(count):
                total += waves[frequency, place] * spectrum[frequency, kernel]
            flat[kernel * count + place] = total


@lru_cache(maxsize=32)
def _waves(height: int, width: int) -> Floats:
    """(frequency, place) in multiples of 2⁻²⁴: exact in float32, and 0 is 0 on every machine."""
    exact = np.kron(_cosines(height), _cosines(width))
    waves: Floats = (np.rint(exact * 2.0**24) * 2.0**-24).astype(np.float32)
    return waves


def _cosines(size: int) -> Doubles:
    index = np.arange(size)
    waves: Doubles = np.cos(np.pi * np.outer(index, index + 0.5) / size) * np.sqrt(2 / size)
    waves[0] = np.sqrt(1 / size)
    return waves
