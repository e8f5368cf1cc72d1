"""The low-rank codec: an update as quantized factors, all at one step, coded in context.

Every matrix M of an update is sent as P·G: P holds few orthonormal columns, G = PᵀM. A step Δ for
the elements of G, and Δ/s for the column of P whose row in G has norm s, puts the same error
Δ²/12 on every number sent, which is the least error in total for the bits (reverse water-filling).
P is quantized first, G is the least-squares fit to what became of P. Which reading of a tensor, how
many columns, or whether the tensor goes as it is or not at all: whatever makes error + λ·bits
least, with one λ = `laplace.PRICE`·Δ² for the whole update. Δ follows from the budget.

The body of the frame "ACFL" is in docs/wire-format.md; docs/decisions/0011 says why it is so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import frexp, log2, prod

import numpy as np
import torch

from anycostfl.codec import laplace
from anycostfl.codec.compiled import compiled
from anycostfl.codec.context import Integers, Likelihoods, Source, Writer, likelihoods
from anycostfl.codec.factor import (
    Factors,
    Way,
    factorise,
    most_rank,
    read_as,
    refit,
    sides,
    ways_of,
    write_rows,
)
from anycostfl.codec.frame import OVERHEAD, Bond, seal, unseal
from anycostfl.codec.kernels import Doubles, Floats
from anycostfl.codec.varint import Reader, varint
from anycostfl.errors import PayloadError

MAGIC = b"ACFL"
FINENESS = 256  # steps to the octave, from which Δ is chosen
EXPONENTS = (-400, 160)  # of Δ
MAX_STRENGTH = 80  # in half octaves above Δ
FILLED = 0.985
TRIES = 8
COLUMN_BITS, TENSOR_BITS = 4.0, 12.0  # what the header says about a column, a tensor
LEAST_BITS = 1.5  # per number sent: no budget pays for more columns than that
BLOCK = 64  # rows decoded at a time

Shapes = Mapping[str, Sequence[int]]


def step_of(index: int) -> float:
    """Δ on its logarithmic scale, which is exact in binary."""
    exponent, mantissa = divmod(index, FINENESS)
    return float((FINENESS + mantissa) * 2.0**exponent)


def index_of(step: float) -> int:
    """The largest index whose step is not above the one given."""
    mantissa, exponent = frexp(step)  # step = mantissa · 2^exponent, mantissa in [1/2, 1)
    place = int(mantissa * 2 * FINENESS) - FINENESS
    return (exponent - 1 - int(log2(FINENESS))) * FINENESS + place


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One way to send a tensor: the numbers it would take, summed up in segments."""

    way: Way
    matrix: torch.Tensor
    factors: Factors | None
    octaves: tuple[Doubles, ...]  # per factor: (columns of P or rows of the tensor, segments)
    lengths: tuple[Doubles, ...]

    @classmethod
    def direct(cls, values: Floats) -> Reading:
        """The tensor as it is."""
        matrix = read_as(values, Way.DIRECT)
        lengths = laplace.segment_lengths(matrix.shape[1])
        octaves = laplace.segment_octaves(matrix)
        return cls(Way.DIRECT, torch.from_numpy(matrix), None, (octaves,), (lengths,))

    @classmethod
    def factored(cls, values: Floats, way: Way, rank: int) -> Reading:
        """Two factors of at most `rank` columns."""
        matrix = torch.from_numpy(np.ascontiguousarray(read_as(values, way)))
        factors = factorise(matrix, rank)
        columns = factors.basis.T.numpy() * factors.strength[:, None].astype(np.float32)
        pair = (columns, factors.rows.numpy())
        return cls(
            way,
            matrix,
            factors,
            tuple(laplace.segment_octaves(part) for part in pair),
            tuple(laplace.segment_lengths(part.shape[1]) for part in pair),
        )

    def weigh(self, step: float, energy: float) -> Choice:
        """The rank of least J at this step, and what it costs."""
        bits, error = self._costs(step)
        price = laplace.PRICE * step**2
        if self.factors is None:
            total = TENSOR_BITS + float(bits.sum())
            return Choice(self, 0, total, float(error.sum()))
        gain = self.factors.strength**2 - error - price * (bits + COLUMN_BITS)
        reached = np.concatenate(([0.0], np.cumsum(gain)))
        rank = int(reached.argmax())
        left = energy - float((self.factors.strength[:rank] ** 2).sum())
        return Choice(
            self,
            rank,
            TENSOR_BITS + float(bits[:rank].sum()) + COLUMN_BITS * rank,
            max(left, 0.0) + float(error[:rank].sum()),
        )

    def _costs(self, step: float) -> tuple[Doubles, Doubles]:
        """Bits and squared error of every column and its row together."""
        bits, error = 0.0, 0.0
        for octaves, lengths in zip(self.octaves, self.lengths, strict=True):
            each = laplace.cost(octaves, step)
            bits, error = bits + each[0] @ lengths, error + each[1] @ lengths
        return np.asarray(bits), np.asarray(error)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A reading at a rank, with the bits and the squared error that it is expected to take."""

    reading: Reading | None
    rank: int
    bits: float
    error: float

    @property
    def way(self) -> Way:
        """As the payload names it."""
        return Way.NOTHING if self.reading is None else self.reading.way


class Draft:
    """An update ready to be encoded at any step; scaled so that its largest element is below 1."""

    def __init__(self, update: Sequence[Floats], budget: int, tie: Bond) -> None:
        largest = max((float(np.abs(v).max()) for v in update if v.size), default=0.0)
        self.exponent = frexp(largest)[1]
        self.budget, self.tie = budget, tie
        # In two steps: 2^±149 is beyond what a single float32 factor could say.
        half = -self.exponent // 2
        scaled = [np.ldexp(np.ldexp(v, half), -self.exponent - half) for v in update]
        self.energies = [float(np.vdot(v, v)) for v in scaled]
        self.readings = [self._readings(v) for v in scaled]
        self._seen: dict[int, float] = {}

    def _readings(self, values: Floats) -> list[Reading]:
        if not values.any():
            return []
        readings = [Reading.direct(values)]
        for way in ways_of(values.shape):
            both = sides(values.shape, way)
            paid = int(8 * self.budget / (LEAST_BITS * sum(both)))
            rank = min(most_rank(both), paid + 1)
            readings.append(Reading.factored(values, way, rank))
        return readings

    def choose(self, step: float) -> list[Choice]:
        """For every tensor the way of least J."""
        price = laplace.PRICE * step**2
        chosen = []
        for readings, energy in zip(self.readings, self.energies, strict=True):
            options = [Choice(None, 0, 0.0, energy)]
            options += [reading.weigh(step, energy) for reading in readings]
            best = min(options, key=lambda option: option.error + price * option.bits)
            sent = best.reading is not None and (best.rank or best.reading.factors is None)
            chosen.append(best if sent else options[0])
        return chosen

    def bits(self, index: int) -> float:
        """Expected bits of all tensors."""
        if index not in self._seen:
            self._seen[index] = sum(choice.bits for choice in self.choose(step_of(index)))
        return self._seen[index]

    def encode(self, index: int) -> bytes:
        """The payload at a step."""
        step = step_of(index)
        choices = self.choose(step)
        head = bytearray((index + FINENESS * self.exponent).to_bytes(3, "little", signed=True))
        contexts = [likelihoods() for _ in range(3)]
        writer = Writer(int(sum(choice.bits for choice in choices)) // 7)
        for choice in choices:
            head.append(choice.way)
            if choice.reading is None:
                continue
            if choice.reading.factors is None:
                matrix = choice.reading.matrix.numpy()
                steps = np.full(len(matrix), step, np.float32)
                writer.integers(laplace.quantize(matrix, steps), contexts[0])
                continue
            head += varint(choice.rank)
            self._write_factors(choice, step, writer, contexts)
        return seal(MAGIC, bytes(head) + writer.finish(), self.tie)

    @staticmethod
    def _write_factors(
        choice: Choice, step: float, writer: Writer, contexts: list[Likelihoods]
    ) -> None:
        assert choice.reading is not None and choice.reading.factors is not None
        factors, matrix, rank = choice.reading.factors, choice.reading.matrix, choice.rank
        octaves = 2 * np.log2(np.maximum(factors.strength[:rank] / step, 1.0))
        halves = np.clip(np.rint(octaves), 0, MAX_STRENGTH).astype(np.int32)
        steps = 2.0 ** (-halves / 2)
        columns = factors.basis[:, :rank].T.contiguous().numpy()
        coarse = laplace.quantize(columns, steps.astype(np.float32))
        basis = torch.from_numpy(basis_of(coarse, halves))
        rows = refit(basis, matrix).numpy()
        fine = laplace.quantize(rows, np.full(rank, step, np.float32))
        writer.integers(np.diff(halves, prepend=0)[None, :].astype(np.int32), contexts[0])
        writer.integers(coarse, contexts[1])
        writer.integers(fine, contexts[2])


def basis_of(columns: Integers, halves: Integers) -> Floats:
    """P (short, rank) from its integers: each product is exact or rounded once."""
    scale = np.where(halves % 2, np.sqrt(0.5), 1.0) * 2.0 ** -(halves // 2).astype(np.float64)
    return np.ascontiguousarray((columns * scale[:, None]).astype(np.float32).T)


def compress_lowrank(update: Sequence[Floats], budget: int, tie: Bond) -> bytes:
    """The payload of the least step whose bytes fit; tensors in the order of their names."""
    draft = Draft(update, budget, tie)
    best = seal(MAGIC, b"", tie)
    if not any(draft.readings):
        return best
    # The estimate is right up to a factor that hardly depends on the step: learn it on the way.
    finest, coarsest = -32 * FINENESS, 2 * FINENESS
    ratio, low, high = 1.0, finest, coarsest
    for _ in range(TRIES):
        aim = 8 * (budget - OVERHEAD) * (1 + FILLED) / 2 / ratio
        index = min(max(_coarsen(draft, aim), low), high)
        payload = draft.encode(index)
        if len(payload) <= budget:
            best = max(best, payload, key=len)
            high = index - 1
            if len(payload) >= FILLED * budget or index == finest:
                break
        else:
            low = index + 1
        if low > high:
            break
        expected = draft.bits(index)
        ratio = max(8.0 * (len(payload) - OVERHEAD), 1.0) / expected if expected else ratio
    return best


def _coarsen(draft: Draft, bits: float) -> int:
    """The finest step that is expected to take no more than so many bits."""
    low, high = -32 * FINENESS, 2 * FINENESS
    while low < high:
        middle = (low + high) // 2
        if draft.bits(middle) <= bits:
            high = middle
        else:
            low = middle + 1
    return low


def decompress_lowrank(payload: bytes, shapes: Shapes, tie: Bond) -> Floats:
    """All elements, tensors in the order of their names."""
    minor, body = unseal(payload, MAGIC, tie)
    if minor:
        raise PayloadError(f"low-rank payload of format 1.{minor}; this program reads 1.0")
    flat = np.zeros(sum(map(prod, shapes.values())), np.float32)
    if not body:
        return flat
    reader = Reader(body, "payload")
    step = _read_step(reader)
    plan = [_read_way(reader, tuple(shapes[name])) for name in sorted(shapes)]
    source, contexts = Source(reader.rest()), [likelihoods() for _ in range(3)]
    start = 0
    for name, (way, rank) in zip(sorted(shapes), plan, strict=True):
        shape = tuple(shapes[name])
        end = start + prod(shape)
        values, start = flat[start:end].reshape(shape), end
        if way is Way.DIRECT:
            numbers = source.integers(*sides(shape, way), contexts[0])
            values[...] = numbers.reshape(shape)
        elif way is not Way.NOTHING:
            _read_factors(values, way, rank, source, contexts)
    source.finish()
    _scale(flat, step)
    return flat


def _read_step(reader: Reader) -> float:
    index = int.from_bytes(reader.take(3), "little", signed=True)
    if not EXPONENTS[0] * FINENESS <= index < EXPONENTS[1] * FINENESS:
        raise PayloadError(f"step {index} is outside the scale")
    return step_of(index)


def _read_way(reader: Reader, shape: tuple[int, ...]) -> tuple[Way, int]:
    code = reader.byte()
    allowed = (Way.NOTHING, Way.DIRECT, *ways_of(shape)) if prod(shape) else (Way.NOTHING,)
    if code not in allowed:
        raise PayloadError(f"a tensor of shape {list(shape)} cannot be sent in way {code}")
    way = Way(code)
    if way in {Way.NOTHING, Way.DIRECT}:
        return way, 0
    return way, reader.varint(1, most_rank(sides(shape, way)))


def _read_factors(
    values: Floats, way: Way, rank: int, source: Source, contexts: list[Likelihoods]
) -> None:
    short, long = sides(values.shape, way)
    halves = np.cumsum(source.integers(1, rank, contexts[0])[0], dtype=np.int64)
    if halves.min() < 0 or halves.max() > MAX_STRENGTH:
        raise PayloadError(f"the strength of a column is outside 0 to {MAX_STRENGTH}")
    basis = basis_of(source.integers(rank, short, contexts[1]), halves.astype(np.int32))
    rows = source.integers(rank, long, contexts[2])
    for first in range(0, short, BLOCK):
        write_rows(values, way, first, _product(basis[first : first + BLOCK], rows))


@compiled
def _product(basis: Floats, rows: Integers) -> Floats:
    """P·G in float32, every sum in the order of the columns: the same bits on every machine."""
    out = np.zeros((basis.shape[0], rows.shape[1]), np.float32)
    for i in range(basis.shape[0]):
        for k in range(rows.shape[0]):
            weight = basis[i, k]
            if weight == 0:
                continue
            for j in range(rows.shape[1]):
                out[i, j] += weight * np.float32(rows[k, j])
    return out


@compiled
def _scale(flat: Floats, step: float) -> None:
    largest = np.finfo(np.float32).max
    for i in range(flat.size):
        flat[i] = np.float32(min(max(np.float64(flat[i]) * step, -largest), largest))
