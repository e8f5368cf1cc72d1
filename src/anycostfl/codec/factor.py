"""The dominant directions of a matrix: M ≈ P·G with few columns in P."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec.arrays import Doubles

OVERSAMPLED, ITERATIONS = 8, 2
WEAKEST_BITS = 0.6
ROUNDING = 1e-8  # of the largest energy: below it single precision cannot resolve directions


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Orthonormal columns P, the strength of each, and the rows PᵀM; strongest first."""

    basis: Tensor  # (short, rank)
    strength: Doubles
    rows: Tensor  # (rank, long)


def factorize(matrix: Tensor, rank: int, budget_bits: float = inf) -> Factors:
    """The strongest directions, at most `rank` and no more than the bits could pay for.

    From MMᵀ if many are wanted, else by subspace iteration; once more in double precision if the
    bits reach down to directions that single precision cannot tell from rounding.
    """
    bits, unscaled = budget_bits / sum(matrix.shape), matrix
    matrix = matrix / matrix.abs().max()  # squares of small numbers must not underflow
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
    """Number of directions that `bits` bits per number of one direction could pay for.

    The weakest direction worth sending takes about a bit per number; four times its energy takes
    one bit more.
    """
    octaves = np.log2(np.maximum(energies, 1e-30))
    needed = (np.cumsum(octaves) - octaves * np.arange(1, octaves.size + 1)) / 2
    needed += WEAKEST_BITS * np.arange(1, octaves.size + 1)
    return 1 + int(np.count_nonzero(needed <= bits))


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and eigenvectors."""
    # Eigenvalues may span more than single precision resolves; LAPACK then fails or returns NaN.
    for precision in (gram.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(gram.to(precision))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if vectors.isfinite().all():
            return values.flip(0), vectors.flip(1).to(gram.dtype)
    return torch.ones(len(gram)), torch.eye(len(gram), dtype=gram.dtype)


def _range_of(matrix: Tensor, columns: int) -> Tensor:
    """An orthonormal basis that contains nearly all of the strongest directions."""
    draw = torch.Generator().manual_seed(0)
    sketch = matrix @ torch.randn(matrix.shape[1], columns, generator=draw, dtype=matrix.dtype)
    for _ in range(ITERATIONS):
        sketch = matrix @ (matrix.T @ torch.linalg.qr(sketch).Q)
    basis: Tensor = torch.linalg.qr(sketch).Q
    return basis


def pseudo_inverse(basis: Tensor) -> Tensor:
    """P⁺: P⁺M is the G of least ‖M − P·G‖ for a P that is no longer orthonormal."""
    wide = basis.double()
    gram = wide.T @ wide
    # A column that was rounded to zero must not make the system singular.
    gram.diagonal().add_(1e-6)
    return torch.cholesky_solve(wide.T, torch.linalg.cholesky(gram)).float()
