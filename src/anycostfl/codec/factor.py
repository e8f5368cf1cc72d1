"""Matrices of an update and their dominant directions: M ≈ P·G with few columns in P.

A convolution (out, in, height, width) can be read as a matrix in three ways; which one is nearest
to low rank differs from layer to layer. Every reading has its shorter side first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf, prod

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec.kernels import Doubles, Floats

OVERSAMPLED, ITERATIONS = 8, 2
WEAKEST_BITS = 0.6


class Way(IntEnum):
    """How a tensor is sent: not at all, as it is, or as two factors of one of its readings."""

    NOTHING = 0
    DIRECT = 1
    OUT = 2  # out | in, height, width
    IN = 3  # in | out, height, width
    ROWS = 4  # out, height | in, width


_ORDERS: dict[Way, tuple[int, ...]] = {Way.IN: (1, 0, 2, 3), Way.ROWS: (0, 2, 1, 3)}
_ROW_AXES: dict[Way, int] = {Way.OUT: 1, Way.IN: 1, Way.ROWS: 2}


def ways_of(shape: Sequence[int]) -> tuple[Way, ...]:
    """The readings as a matrix that a shape has, beside being sent as it is."""
    if len(shape) < 2 or min(shape) < 1:
        return ()
    spatial = len(shape) == 4 and shape[2] * shape[3] > 1
    ways = (Way.OUT, Way.IN, Way.ROWS) if spatial else (Way.OUT,)
    return tuple(way for way in ways if most_rank(sides(shape, way)))


def sides(shape: Sequence[int], way: Way) -> tuple[int, int]:
    """The shorter and the longer side of a reading."""
    if way is Way.DIRECT:
        return (shape[0] if len(shape) > 1 else 1), prod(shape[1:] if len(shape) > 1 else shape)
    order = _ORDERS.get(way, tuple(range(len(shape))))
    rows = prod(shape[axis] for axis in order[: _ROW_AXES[way]])
    columns = prod(shape) // rows
    return min(rows, columns), max(rows, columns)


def most_rank(matrix_sides: tuple[int, int]) -> int:
    """Beyond it the factors have more elements than the matrix."""
    short, long = matrix_sides
    return short * long // (short + long)


def read_as(values: Floats, way: Way) -> Floats:
    """A tensor's reading as a matrix: a view wherever one is possible."""
    if way is Way.DIRECT:
        return values.reshape(sides(values.shape, way))
    order = _ORDERS.get(way, tuple(range(values.ndim)))
    rows = prod(values.shape[axis] for axis in order[: _ROW_AXES[way]])
    matrix = values.transpose(order).reshape(rows, -1)
    return matrix if rows <= matrix.shape[1] else matrix.T


def write_rows(values: Floats, way: Way, first: int, rows: Floats) -> None:
    """Put rows of a reading, from `first` on, back into the tensor."""
    order = _ORDERS.get(way, tuple(range(values.ndim)))
    turned = values.transpose(order)
    split = _ROW_AXES[way]
    height = prod(turned.shape[:split])
    flip = height > turned.size // height
    # Rows of the reading are indices of the axes before the split, or after it if it was flipped.
    axes = turned.shape[split:] if flip else turned.shape[:split]
    where = np.unravel_index(np.arange(first, first + len(rows)), axes)
    others = turned.shape[:split] if flip else turned.shape[split:]
    if flip:
        turned[(slice(None),) * split + where] = np.moveaxis(rows.reshape(-1, *others), 0, -1)
    else:
        turned[where] = rows.reshape(-1, *others)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Orthonormal columns P, how strong each is, and the rows PᵀM; strongest first."""

    basis: Tensor  # (short, rank)
    strength: Doubles
    rows: Tensor  # (rank, long)


def factorise(matrix: Tensor, rank: int, budget_bits: float = inf) -> Factors:
    """The strongest directions, `rank` at most and as many as the bits could possibly pay for.

    From MMᵀ where many are wanted, else by subspace iteration.
    """
    short, unscaled = len(matrix), matrix
    matrix = matrix / matrix.abs().max()  # squares of small numbers must not vanish
    if 4 * (rank + OVERSAMPLED) >= short:
        values, basis = _eigh(matrix @ matrix.T)
    else:
        sketch = _range_of(matrix, rank + OVERSAMPLED)
        inner = sketch.T @ matrix
        values, basis = _eigh(inner @ inner.T)
        basis = sketch @ basis
    rank = min(rank, _affordable(values.double().numpy(), budget_bits / sum(matrix.shape)))
    basis = basis[:, :rank].contiguous()
    rows = basis.T @ unscaled
    strength = torch.linalg.vector_norm(rows, dim=1).double().numpy()
    return Factors(basis, strength, rows)


def _affordable(energies: Doubles, bits: float) -> int:
    """How many directions so many bits per number of one could pay for.

    The weakest that is worth sending takes about a bit per number; one that has four times its
    energy takes one bit more.
    """
    octaves = np.log2(np.maximum(energies, 1e-30))
    needed = (np.cumsum(octaves) - octaves * np.arange(1, octaves.size + 1)) / 2
    needed += WEAKEST_BITS * np.arange(1, octaves.size + 1)
    return 1 + int(np.count_nonzero(needed <= bits))


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and eigenvectors."""
    # Eigenvalues may span more than single precision can tell; LAPACK then fails or returns NaN.
    for precision in (torch.float32, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(gram.to(precision))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if vectors.isfinite().all():
            return values.flip(0), vectors.flip(1).float()
    return torch.ones(len(gram)), torch.eye(len(gram))


def _range_of(matrix: Tensor, columns: int) -> Tensor:
    """An orthonormal basis that holds nearly all of the strongest directions."""
    draw = torch.Generator().manual_seed(0)
    sketch = matrix @ torch.randn(matrix.shape[1], columns, generator=draw)
    for _ in range(ITERATIONS):
        sketch = matrix @ (matrix.T @ torch.linalg.qr(sketch).Q)
    basis: Tensor = torch.linalg.qr(sketch).Q
    return basis


def inverse(basis: Tensor) -> Tensor:
    """P⁺, with which P⁺M is the G of least ‖M − P·G‖ though P is no longer orthonormal."""
    wide = basis.double()
    gram = wide.T @ wide
    # A column that was rounded to nothing must not make the system singular.
    gram.diagonal().add_(1e-6)
    pseudo: Tensor = torch.linalg.solve(gram, wide.T).float()
    return pseudo
