"""The cost of quantizing a Laplacian variable: bits and squared error by its mean magnitude.

In units of the step Δ, with x̄ = E|x|: a magnitude is rounded up to the next integer where that
lowers J = error + λ·bits, λ = `PRICE`·Δ². The tables below hold, for a grid of x̄, the threshold
between 0 and 1, the offset of every further threshold, the entropy including the sign, and the mean
squared error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anycostfl.codec.arrays import Doubles, Floats, Integers
from anycostfl.codec.context import MAX_BITS
from anycostfl.compiled import compiled

PRICE = 0.13  # of a bit, in squared steps; at fine steps it would be ln 4 / 12
SEGMENT = 64  # neighbours that share one mean magnitude
OCTAVES, PER_OCTAVE = (-8, 20), 4
_MEANS: Doubles = 2.0 ** (np.arange(OCTAVES[0] * PER_OCTAVE, OCTAVES[1] * PER_OCTAVE) / PER_OCTAVE)
_LARGEST = np.nextafter(np.float32(1 << MAX_BITS), np.float32(0))  # the next one has a bit more


def _thresholds(mean: float) -> tuple[float, float]:
    """Where 1 beats 0, and the part of a step beyond n where n + 1 beats n."""
    slope = np.log2(np.e) / mean  # bits that one more step of magnitude costs
    later = min(0.5 + PRICE / 2 * slope, 0.999)
    first = later
    for _ in range(20):  # the price of a 1 depends on its rarity, which depends on the threshold
        none, some = -np.expm1(-first / mean), np.exp(-first / mean)
        one = some * -np.expm1(-1 / mean)
        dearer = 1 + np.log2(max(none, 1e-12)) - np.log2(max(one, 1e-300))
        first = 0.5 * first + 0.5 * (0.5 + PRICE / 2 * max(dearer, 0.0))
    return first, later


def _row(mean: float) -> tuple[float, float, float, float]:
    first, later = _thresholds(mean)
    none, decay = -np.expm1(-first / mean), np.exp(-1 / mean)
    some = 1 - none
    bits = -none * np.log2(none)
    if some > 0:  # sign, then a geometric number of further steps
        bits += some * (1 - np.log2(some))
        bits -= some * (np.log2(-np.expm1(-1 / mean)) + decay / (1 - decay) * np.log2(decay))
    # Densities integrated exactly: E[(x − n)²] over one cell of an exponential.
    error = _second_moment(0.0, first, 0.0, mean)
    rest = _second_moment(first, first + 1, 1.0, mean)
    error += rest / -np.expm1(-1 / mean)  # further cells repeat it, each by e^(−1/x̄) rarer
    return first, later, float(bits), float(error)


def _second_moment(start: float, end: float, point: float, mean: float) -> float:
    """∫ (x − point)² e^(−x/x̄)/x̄ dx from `start` to `end`."""

    def primitive(x: float) -> float:
        gap = x - point
        return float(-np.exp(-x / mean) * (gap**2 + 2 * mean * gap + 2 * mean**2))

    if end - start < 0.02 * mean:  # the exact difference would cancel; the density is flat here
        cube = ((end - point) ** 3 - (start - point) ** 3) / 3
        return float(cube * np.exp(-(start + end) / 2 / mean) / mean)
    return primitive(end) - primitive(start)


_TABLE: Doubles = np.array([_row(mean) for mean in _MEANS])
_TABLE[0, 2:] = 0.0  # so small that nothing is coded, and nothing is lost by that
_FIRST, _LATER, _BITS, _ERROR = (np.ascontiguousarray(column) for column in _TABLE.T)
_COSTS = _BITS, _ERROR


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """Of every run of `SEGMENT` columns of every row: log₂ of the mean, number of columns."""

    octaves: Doubles
    lengths: Doubles

    @classmethod
    def of(cls, matrix: Floats) -> Magnitudes:
        """Summarize a matrix; the last run of a row may be shorter."""
        columns = matrix.shape[1]
        starts = np.arange(0, columns, SEGMENT)
        lengths = np.minimum(SEGMENT, columns - starts).astype(np.float64)
        sums = np.add.reduceat(np.abs(matrix), starts, axis=1).astype(np.float64)
        return cls(np.log2(np.maximum(sums / lengths, 1e-60)), lengths)

    def cost(self, step: float) -> tuple[Doubles, Doubles]:
        """Bits and squared error of every row."""
        bits, error = np.zeros(len(self.octaves)), np.zeros(len(self.octaves))
        _add_up(self.octaves, self.lengths, OCTAVES[0] + np.log2(step), _COSTS, (bits, error))
        return bits, error * step**2


@compiled
def _add_up(
    octaves: Doubles,
    lengths: Doubles,
    first: float,
    costs: tuple[Doubles, Doubles],
    totals: tuple[Doubles, Doubles],
) -> None:
    (bits_at, error_at), (bits, error) = costs, totals
    for i in range(octaves.shape[0]):
        for j in range(octaves.shape[1]):
            at = min(max(PER_OCTAVE * (octaves[i, j] - first), 0.0), bits_at.size - 1.001)
            low = int(at)
            part, count = at - low, lengths[j]
            bits[i] += count * (bits_at[low] + part * (bits_at[low + 1] - bits_at[low]))
            error[i] += count * (error_at[low] + part * (error_at[low + 1] - error_at[low]))


def quantize(matrix: Floats, steps: float | Doubles) -> Integers:
    """Integers for the rows of `matrix`, at one step for all or one for each."""
    each = np.broadcast_to(np.asarray(steps, np.float32), len(matrix))
    scales = (1 / each).astype(np.float32)
    integers = np.empty(matrix.shape, np.int32)
    _quantize(np.ascontiguousarray(matrix), scales, _FIRST, _LATER, integers)
    return integers


@compiled
def _quantize(
    matrix: Floats, scales: Floats, first: Doubles, later: Doubles, integers: Integers
) -> None:
    rows, columns = matrix.shape
    for i in range(rows):
        for start in range(0, columns, SEGMENT):
            end = min(start + SEGMENT, columns)
            total = np.float32(0)
            for j in range(start, end):
                total += abs(matrix[i, j])
            mean = np.float64(total * scales[i]) / (end - start)
            at = 0
            if mean > 0:
                at = int(np.floor(PER_OCTAVE * (np.log2(mean) - OCTAVES[0]) + 0.5))
            at = min(max(at, 0), first.size - 1)
            begin, offset = np.float32(first[at]), np.float32(1 - later[at])
            for j in range(start, end):
                size = abs(matrix[i, j]) * scales[i]
                number = 0
                if size >= begin:
                    number = max(1, int(min(size + offset, _LARGEST)))
                integers[i, j] = -number if matrix[i, j] < 0 else number
