"""Tensors as matrices: what each would cost at a step, and its integers both ways.

A tensor in the layout of `spectrum` is coded element by element, or as two factors of its
matricization along the output or the input axis; which one is nearer to low rank differs from layer
to layer. `estimate` predicts bits and error from mean magnitudes (`laplace`) without quantizing
anything; `write` quantizes and codes. A column of P of strength s has step Δ/s, in half octaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec import laplace
from anycostfl.codec.arrays import Doubles, Floats, Integers
from anycostfl.codec.context import RangeDecoder, RangeEncoder, new_contexts
from anycostfl.codec.factor import Factors, factorize, pseudo_inverse
from anycostfl.codec.laplace import Magnitudes
from anycostfl.codec.spectrum import to_spectrum
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MAX_STRENGTH = 80  # in half octaves above Δ
COLUMN_BITS, TENSOR_BITS = 4.0, 12.0  # side information of a column, of a tensor
BLOCK, BLOCK_ELEMENTS = 64, 2**20  # rows decoded at a time, and elements; at least one row
TILE = 4096  # columns, so that a few rows stay in the processor's cache
LEAST_BITS = 1.5  # per number sent: no budget pays for more columns than that


class Mode(IntEnum):
    """How a tensor is sent: not at all, element by element, or as factors of a matricization."""

    NOTHING = 0
    DIRECT = 1
    OUT = 2  # out | all others
    IN = 3  # in | frequency, out


def factored_modes(layout: Sequence[int]) -> tuple[Mode, ...]:
    """The matricizations of a layout that can have low rank."""
    modes = (Mode.OUT, Mode.IN) if len(layout) == 3 else (Mode.OUT,)
    return tuple(mode for mode in modes if prod(layout) and max_rank(layout, mode))


def sides(layout: Sequence[int], mode: Mode) -> tuple[int, int]:
    """The shorter and the longer side of a matricization."""
    rows = layout[-1] if mode is Mode.IN else layout[-2]
    columns = prod(layout) // rows
    return min(rows, columns), max(rows, columns)


def max_rank(layout: Sequence[int], mode: Mode) -> int:
    """Beyond this rank the factors have more elements than the matrix."""
    short, long = sides(layout, mode)
    return short * long // (short + long)


def unfold(values: Floats, mode: Mode) -> Floats:
    """Matricize a tensor in its layout, the shorter side first."""
    axis = values.ndim - (1 if mode is Mode.IN else 2)
    matrix = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    return matrix if len(matrix) <= matrix.shape[1] else matrix.T


def fold_rows(values: Floats, mode: Mode, first: int, rows: Floats) -> None:
    """Write rows of a matricization, from `first` on, back into the tensor."""
    axis = values.ndim - (1 if mode is Mode.IN else 2)
    turned = np.moveaxis(values, axis, 0)
    height, others = len(turned), turned.shape[1:]
    last = first + len(rows)
    if height <= values.size // height:
        turned[first:last] = rows.reshape(-1, *others)
    else:  # the matricization is transposed: its rows run over all axes but this one
        where: tuple[Any, ...] = np.unravel_index(np.arange(first, last), others)
        turned[(slice(None), *where)] = rows.T


class ContextSets:
    """Separate contexts for elements, columns and rows, adapted while coding."""

    def __init__(self) -> None:
        self.direct = new_contexts()
        self.columns = new_contexts()
        self.rows = new_contexts()


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A matricization at a rank, with its expected bits and squared error."""

    matricization: Matricization
    rank: int
    bits: float
    error: float

    def loss(self, step: float) -> float:
        """J = error + λ·bits."""
        return self.error + laplace.PRICE * step**2 * self.bits


@dataclass(frozen=True, slots=True, eq=False)
class Direct:
    """A tensor sent element by element."""

    matrix: Floats
    magnitudes: Magnitudes
    mode: Mode = Mode.DIRECT

    @classmethod
    def of(cls, values: Floats) -> Direct:
        """Row by row."""
        matrix = values.reshape(-1, values.shape[-1])
        return cls(matrix, Magnitudes.of(matrix))

    def estimate(self, step: float) -> Choice:
        """The cost of all elements."""
        bits, error = self.magnitudes.cost(step)
        return Choice(self, 0, TENSOR_BITS + float(bits.sum()), float(error.sum()))

    def write(self, _: int, step: float, to: RangeEncoder, contexts: ContextSets) -> None:
        """Quantize and code the elements."""
        to.integers(laplace.quantize(self.matrix, step), contexts.direct)


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """A matrix sent as P·G, columns of P first."""

    mode: Mode
    matrix: Tensor
    factors: Factors
    columns: Magnitudes
    rows: Magnitudes
    energy: float

    @classmethod
    def of(cls, values: Floats, mode: Mode, rank: int, budget_bits: int) -> Factored:
        """At most `rank` columns, and no more than the budget could pay for."""
        matrix = torch.from_numpy(np.ascontiguousarray(unfold(values, mode)))
        factors = factorize(matrix, rank, budget_bits)
        scaled = factors.basis.T.numpy() * factors.strength[:, None].astype(np.float32)
        rows = Magnitudes.of(factors.rows.numpy())
        energy = float(torch.linalg.vector_norm(matrix)) ** 2
        return cls(mode, matrix, factors, Magnitudes.of(scaled), rows, energy)

    def estimate(self, step: float) -> Choice | None:
        """The rank of least error + λ·bits; None if not even one column is worth its bits."""
        column_bits, column_error = self.columns.cost(step)
        row_bits, row_error = self.rows.cost(step)
        bits, error = column_bits + row_bits + COLUMN_BITS, column_error + row_error
        strength = self.factors.strength**2
        gain = strength - error - laplace.PRICE * step**2 * bits
        rank = int(np.concatenate(([0.0], np.cumsum(gain))).argmax())
        if not rank:
            return None
        lost = max(self.energy - float(strength[:rank].sum()), 0.0) + float(error[:rank].sum())
        return Choice(self, rank, TENSOR_BITS + float(bits[:rank].sum()), lost)

    def write(self, rank: int, step: float, to: RangeEncoder, contexts: ContextSets) -> None:
        """Quantize and code strengths, columns, and the rows that fit the quantized columns."""
        strength = np.maximum(self.factors.strength[:rank] / step, 1.0)
        halves = np.clip(np.rint(2 * np.log2(strength)), 0, MAX_STRENGTH).astype(np.int32)
        basis = self.factors.basis[:, :rank].T.contiguous().numpy()
        columns = laplace.quantize(basis, 2.0 ** (-halves / 2))
        to.integers(np.diff(halves, prepend=0)[None, :].astype(np.int32), contexts.direct)
        to.integers(columns, contexts.columns)
        sent = torch.from_numpy(basis_of(columns, halves))
        rows = (pseudo_inverse(sent) @ self.matrix).numpy()
        to.integers(laplace.quantize(rows, step), contexts.rows)


Matricization = Direct | Factored


def matricizations(values: Floats, budget_bits: int) -> list[Matricization]:
    """Every way to send a tensor; none if it is zero."""
    if not values.any():
        return []
    values = to_spectrum(values)
    found: list[Matricization] = [Direct.of(values)]
    for mode in factored_modes(values.shape):
        affordable = 1 + int(budget_bits / (LEAST_BITS * sum(sides(values.shape, mode))))
        rank = min(max_rank(values.shape, mode), affordable)
        found.append(Factored.of(values, mode, rank, budget_bits))
    return found


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


def read_elements(values: Floats, decoder: RangeDecoder, contexts: ContextSets) -> None:
    """Decode what `Direct` wrote."""
    columns = values.shape[-1]
    numbers = decoder.integers(values.size // columns, columns, contexts.direct)
    values[...] = numbers.reshape(values.shape)


def read_factors(
    values: Floats, mode: Mode, rank: int, decoder: RangeDecoder, contexts: ContextSets
) -> None:
    """Decode what `Factored` wrote and multiply it out, a block of rows at a time."""
    short, long = sides(values.shape, mode)
    halves = np.cumsum(decoder.integers(1, rank, contexts.direct)[0], dtype=np.int64)
    if halves.min() < 0 or halves.max() > MAX_STRENGTH:
        raise PayloadError(f"the strength of a column is outside 0 to {MAX_STRENGTH}")
    columns = decoder.integers(rank, short, contexts.columns)
    basis = basis_of(columns, halves.astype(np.int32))
    del columns  # as large as the basis, and memory is bounded
    rows = decoder.integers(rank, long, contexts.rows)
    count = max(1, min(BLOCK, BLOCK_ELEMENTS // long))
    for first in range(0, short, count):
        fold_rows(values, mode, first, _product(basis[first : first + count], rows))


@compiled
def _tile(basis: Floats, rows: Integers, start: int) -> Floats:
    """Columns of P·G from `start` on."""
    rank, end = rows.shape[0], min(start + TILE, rows.shape[1])
    out = np.zeros((basis.shape[0], end - start), np.float32)
    for k in range(0, rank - rank % 4, 4):  # four at a time save most loads and stores
        one, two, three, four = (
            rows[k, start:end].astype(np.float32),
            rows[k + 1, start:end].astype(np.float32),
            rows[k + 2, start:end].astype(np.float32),
            rows[k + 3, start:end].astype(np.float32),
        )
        for i in range(basis.shape[0]):
            a, b, c, d = basis[i, k], basis[i, k + 1], basis[i, k + 2], basis[i, k + 3]
            for j in range(end - start):
                total = out[i, j] + a * one[j]
                total += b * two[j]
                total += c * three[j]
                out[i, j] = total + d * four[j]
    for k in range(rank - rank % 4, rank):
        one = rows[k, start:end].astype(np.float32)
        for i in range(basis.shape[0]):
            for j in range(end - start):
                out[i, j] += basis[i, k] * one[j]
    return out


@compiled
def _product(basis: Floats, rows: Integers) -> Floats:
    """P·G in float32, added up in the order of the columns: the same bits on every machine."""
    out = np.empty((basis.shape[0], rows.shape[1]), np.float32)
    for start in range(0, rows.shape[1], TILE):
        out[:, start : start + TILE] = _tile(basis, rows, start)
    return out
