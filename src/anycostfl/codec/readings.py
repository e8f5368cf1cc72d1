"""The ways to send a tensor, seen by the encoder: what each would cost at a step, and its numbers.

`weigh` estimates bits and error from mean magnitudes (`laplace`) without quantizing anything;
`write` quantizes and codes. A factor's column of strength s has step Δ/s, rounded to half octaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec import laplace
from anycostfl.codec.arrays import Doubles, Floats, Integers
from anycostfl.codec.context import Likelihoods, Writer, likelihoods
from anycostfl.codec.factor import (
    Factors,
    Way,
    factorise,
    inverse,
    most_rank,
    read_as,
    sides,
    ways_of,
)
from anycostfl.codec.spectrum import lay_out
from anycostfl.compiled import compiled

MAX_STRENGTH = 80  # in half octaves above Δ
COLUMN_BITS, TENSOR_BITS = 4.0, 12.0  # what is said about a column, about a tensor
LEAST_BITS = 1.5  # per number sent: no budget pays for more columns than that


class Contexts:
    """What is learnt while coding, apart for tensors as they are, columns and rows."""

    def __init__(self) -> None:
        self.direct: Likelihoods = likelihoods()
        self.columns: Likelihoods = likelihoods()
        self.rows: Likelihoods = likelihoods()


class Reading(Protocol):
    """One way to send a tensor."""

    @property
    def way(self) -> Way:
        """Its name."""

    def weigh(self, step: float) -> Choice | None:
        """The rank of least error + λ·bits; None if even one column is not worth its bits."""

    def write(self, rank: int, step: float, to: Writer, contexts: Contexts) -> None:
        """Quantize and code."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A reading at a rank, with the bits and squared error that it is expected to take."""

    reading: Reading
    rank: int
    bits: float
    error: float

    def loss(self, step: float) -> float:
        """J = error + λ·bits."""
        return self.error + laplace.PRICE * step**2 * self.bits


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """How large the elements of a matrix are: log₂ of the mean of every segment of every row."""

    octaves: Doubles
    lengths: Doubles

    @classmethod
    def of(cls, matrix: Floats) -> Numbers:
        """Sum up a matrix."""
        return cls(laplace.segment_octaves(matrix), laplace.segment_lengths(matrix.shape[1]))

    def cost(self, step: float) -> tuple[Doubles, Doubles]:
        """Bits and squared error of every row."""
        return laplace.cost(self.octaves, self.lengths, step)


@dataclass(frozen=True, slots=True, eq=False)
class Direct:
    """The tensor as it is."""

    matrix: Floats
    numbers: Numbers
    way: Way = Way.DIRECT

    @classmethod
    def of(cls, values: Floats) -> Direct:
        """Row by row."""
        matrix = values.reshape(-1, values.shape[-1])
        return cls(matrix, Numbers.of(matrix))

    def weigh(self, step: float) -> Choice:
        """Every element at the step."""
        bits, error = self.numbers.cost(step)
        return Choice(self, 0, TENSOR_BITS + float(bits.sum()), float(error.sum()))

    def write(self, rank: int, step: float, to: Writer, contexts: Contexts) -> None:
        """One matrix."""
        del rank
        to.integers(laplace.quantize(self.matrix, _even(len(self.matrix), step)), contexts.direct)


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """A matrix as P·G, columns of P first."""

    way: Way
    matrix: Tensor
    factors: Factors
    columns: Numbers
    rows: Numbers
    energy: float

    @classmethod
    def of(cls, values: Floats, way: Way, rank: int, budget_bits: int) -> Factored:
        """At most `rank` columns, and no more than the budget could pay for."""
        matrix = torch.from_numpy(np.ascontiguousarray(read_as(values, way)))
        factors = factorise(matrix, rank, budget_bits)
        scaled = factors.basis.T.numpy() * factors.strength[:, None].astype(np.float32)
        rows = Numbers.of(factors.rows.numpy())
        energy = float(torch.linalg.vector_norm(matrix)) ** 2
        return cls(way, matrix, factors, Numbers.of(scaled), rows, energy)

    def weigh(self, step: float) -> Choice | None:
        """As many columns as pay for themselves."""
        pairs = zip(self.columns.cost(step), self.rows.cost(step), strict=True)
        bits, error = (one + other for one, other in pairs)
        bits = bits + COLUMN_BITS
        strength = self.factors.strength**2
        gain = strength - error - laplace.PRICE * step**2 * bits
        rank = int(np.concatenate(([0.0], np.cumsum(gain))).argmax())
        if not rank:
            return None
        lost = max(self.energy - float(strength[:rank].sum()), 0.0) + float(error[:rank].sum())
        return Choice(self, rank, TENSOR_BITS + float(bits[:rank].sum()), lost)

    def write(self, rank: int, step: float, to: Writer, contexts: Contexts) -> None:
        """Strengths, columns, and the rows that fit those columns best."""
        basis = self.factors.basis[:, :rank]
        sent = write_basis(basis, self.factors.strength[:rank] / step, to, contexts)
        rows = (inverse(sent) @ self.matrix).numpy()
        to.integers(laplace.quantize(rows, _even(rank, step)), contexts.rows)


def _even(rows: int, step: float) -> Floats:
    return np.full(rows, step, np.float32)


def write_basis(basis: Tensor, strength: Doubles, to: Writer, contexts: Contexts) -> Tensor:
    """Code how strong the columns are, in steps, then the columns; returns what a reader gets."""
    halves = np.clip(np.rint(2 * np.log2(np.maximum(strength, 1.0))), 0, MAX_STRENGTH)
    steps = (2.0 ** (-halves / 2)).astype(np.float32)
    numbers = laplace.quantize(basis.T.contiguous().numpy(), steps)
    whole = halves.astype(np.int32)
    to.integers(np.diff(whole, prepend=0)[None, :].astype(np.int32), contexts.direct)
    to.integers(numbers, contexts.columns)
    return torch.from_numpy(basis_of(numbers, whole))


def basis_of(numbers: Integers, halves: Integers) -> Floats:
    """P (short, rank) from its integers, in float64, then rounded to float32."""
    basis = np.empty(numbers.shape[::-1], np.float32)
    _scale(numbers, np.ldexp(np.where(halves % 2, np.sqrt(0.5), 1.0), -(halves // 2)), basis)
    return basis


@compiled
def _scale(numbers: Integers, scales: Doubles, basis: Floats) -> None:
    for k in range(numbers.shape[0]):
        for i in range(numbers.shape[1]):
            basis[i, k] = np.float32(numbers[k, i] * scales[k])


def readings_of(values: Floats, budget_bits: int) -> list[Reading]:
    """Every way in which a tensor can be sent; none if it is zero."""
    if not values.any():
        return []
    values = lay_out(values)
    readings: list[Reading] = [Direct.of(values)]
    for way in ways_of(values.shape):
        both = sides(values.shape, way)
        rank = min(most_rank(both), 1 + int(budget_bits / (LEAST_BITS * sum(both))))
        readings.append(Factored.of(values, way, rank, budget_bits))
    return readings
