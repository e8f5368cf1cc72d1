"""Matrices of an update and their dominant directions: M ≈ P·G with few columns in P.

A convolution, as `spectrum` lays it out, can be read as a matrix from its outputs or from its
inputs; which one is nearer to low rank differs from layer to layer. Every reading has its shorter
side first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec.arrays import Doubles, Floats

OVERSAMPLED, ITERATIONS = 8, 2
WEAKEST_BITS = 0.6
ROUNDING = 1e-8  # of the largest energy: below it single precision cannot tell directions


class Way(IntEnum):
    """How a tensor is sent: not at all, as it is, or as two factors of one of its readings."""

    NOTHING = 0
    DIRECT = 1
    OUT = 2  # out | all others
    IN = 3  # in | frequency, out


def ways_of(layout: Sequence[int]) -> tuple[Way, ...]:
    """The readings of low rank that a layout has, beside being sent as it is."""
    ways = (Way.OUT, Way.IN) if len(layout) == 3 else (Way.OUT,)
    return tuple(way for way in ways if prod(layout) and most_rank(sides(layout, way)))


def sides(layout: Sequence[int], way: Way) -> tuple[int, int]:
    """The shorter and the longer side of a reading."""
    rows = layout[-1] if way is Way.IN else layout[-2]
    columns = prod(layout) // rows
    return min(rows, columns), max(rows, columns)


def most_rank(matrix_sides: tuple[int, int]) -> int:
    """Beyond it the factors have more elements than the matrix."""
    short, long = matrix_sides
    return short * long // (short + long)


def read_as(values: Floats, way: Way) -> Floats:
    """The reading of a tensor in its layout as a matrix."""
    axis = values.ndim - (1 if way is Way.IN else 2)
    matrix = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    return matrix if len(matrix) <= matrix.shape[1] else matrix.T


def write_rows(values: Floats, way: Way, first: int, rows: Floats) -> None:
    """Put rows of a reading, from `first` on, back into the tensor."""
    axis = values.ndim - (1 if way is Way.IN else 2)
    turned = np.moveaxis(values, axis, 0)
    height, others = len(turned), turned.shape[1:]
    last = first + len(rows)
    if height <= values.size // height:
        turned[first:last] = rows.reshape(-1, *others)
    else:  # rows of the reading are what is left of the tensor without that axis
        where: tuple[Any, ...] = np.unravel_index(np.arange(first, last), others)
        turned[(slice(None), *where)] = rows.T


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Orthonormal columns P, how strong each is, and the rows PᵀM; strongest first."""

    basis: Tensor  # (short, rank)
    strength: Doubles
    rows: Tensor  # (rank, long)


def factorise(matrix: Tensor, rank: int, budget_bits: float = inf) -> Factors:
    """The strongest directions, `rank` at most and as many as the bits could possibly pay for.

    From MMᵀ where many are wanted, else by subspace iteration. Single precision cannot tell the
    weakest from rounding; where the bits reach down to them, once more in double.
    """
    bits, unscaled = budget_bits / sum(matrix.shape), matrix
    matrix = matrix / matrix.abs().max()  # squares of small numbers must not vanish
    energies, basis = _directions(matrix, rank)
    rank = min(rank, _affordable(energies, bits))
    if energies[rank - 1] < ROUNDING * energies[0]:
        energies, basis = _directions(matrix.double(), rank)
        rank = min(rank, _affordable(energies, bits))
    basis = basis[:, :rank].float().contiguous()
    rows = basis.T @ unscaled
    strength = torch.linalg.vector_norm(rows, dim=1).double().numpy()
    return Factors(basis, strength, rows)


def _directions(matrix: Tensor, rank: int) -> tuple[Doubles, Tensor]:
    """Energies of the strongest directions, largest first, and the directions."""
    if 4 * (rank + OVERSAMPLED) >= len(matrix):
        values, basis = _eigh(matrix @ matrix.T)
    else:
        sketch = _range_of(matrix, rank + OVERSAMPLED)
        inner = sketch.T @ matrix
        values, basis = _eigh(inner @ inner.T)
        basis = sketch @ basis
    return values.double().numpy(), basis


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
    for precision in (gram.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(gram.to(precision))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if vectors.isfinite().all():
            return values.flip(0), vectors.flip(1).to(gram.dtype)
    return torch.ones(len(gram)), torch.eye(len(gram), dtype=gram.dtype)


def _range_of(matrix: Tensor, columns: int) -> Tensor:
    """An orthonormal basis that holds nearly all of the strongest directions."""
    draw = torch.Generator().manual_seed(0)
    sketch = matrix @ torch.randn(matrix.shape[1], columns, generator=draw, dtype=matrix.dtype)
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
    return torch.cholesky_solve(wide.T, torch.linalg.cholesky(gram)).float()
