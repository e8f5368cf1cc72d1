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
from math import ceil, frexp, prod

import numpy as np

from anycostfl.codec.arrays import Floats, Integers
from anycostfl.codec.context import Source, Writer
from anycostfl.codec.factor import Way, most_rank, sides, ways_of, write_rows
from anycostfl.codec.frame import OVERHEAD, Bond, seal, unseal_exact
from anycostfl.codec.readings import MAX_STRENGTH, Choice, Contexts, basis_of, readings_of
from anycostfl.codec.spectrum import layout_of, restore
from anycostfl.codec.varint import Reader, varint
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MAGIC = b"ACFL"
FINENESS = 256  # steps to the octave, from which Δ is chosen
EXPONENTS = (-400, 160)  # of Δ
FILLED = 0.97
EXPECTED = 0.985  # real bits over estimated ones, mostly
TRIES = 8
AWAY = 16  # steps to leave a wrong estimate by, then four times as many
BLOCK, BLOCK_ELEMENTS = 64, 2**20  # rows decoded at a time, and elements; one row at least
TILE = 4096  # columns, a few rows of which stay near the processor
FINEST, COARSEST = -32 * FINENESS, 2 * FINENESS  # Δ from 2^-24 to 2^10, the update being below 1

Shapes = Mapping[str, Sequence[int]]


def step_of(index: int) -> float:
    """Δ on its logarithmic scale, which is exact in binary."""
    exponent, mantissa = divmod(index, FINENESS)
    return float((FINENESS + mantissa) * 2.0**exponent)


class Draft:
    """An update ready to be encoded at any step; scaled so that its largest element is below 1."""

    def __init__(self, update: Sequence[Floats], budget: int, tie: Bond) -> None:
        largest = max((float(np.abs(v).max()) for v in update if v.size), default=0.0)
        self.exponent = frexp(largest)[1]
        self.tie = tie
        # In two steps: a single float32 factor cannot say 2^148.
        half = -self.exponent // 2
        first, second = np.float32(2.0**half), np.float32(2.0 ** (-self.exponent - half))
        scaled = [v * first * second for v in update]
        self.energies = [float(np.vdot(v, v)) for v in scaled]
        self.readings = [readings_of(v, 8 * budget) for v in scaled]
        self._seen: dict[int, float] = {}

    def choose(self, step: float) -> list[Choice | None]:
        """For every tensor the way of least J; None where nothing is the best to send."""
        chosen = []
        for readings, energy in zip(self.readings, self.energies, strict=True):
            options = [choice for r in readings if (choice := r.weigh(step)) is not None]
            best = min(options, key=lambda option: option.loss(step), default=None)
            chosen.append(best if best is not None and best.loss(step) < energy else None)
        return chosen

    def bits(self, index: int) -> float:
        """Expected bits of all tensors."""
        if index not in self._seen:
            choices = self.choose(step_of(index))
            self._seen[index] = sum(choice.bits for choice in choices if choice is not None)
        return self._seen[index]

    def encode(self, index: int) -> bytes:
        """The payload at a step."""
        head = bytearray((index + FINENESS * self.exponent).to_bytes(3, "little", signed=True))
        contexts, writer = Contexts(), Writer(int(self.bits(index)) // 7)
        for choice in self.choose(step_of(index)):
            if choice is None:
                head.append(Way.NOTHING)
                continue
            head.append(choice.reading.way)
            head += varint(choice.rank) if choice.rank else b""
            choice.reading.write(choice.rank, step_of(index), writer, contexts)
        return seal(MAGIC, bytes(head) + writer.finish(), self.tie)


def compress_lowrank(update: Sequence[Floats], budget: int, tie: Bond) -> bytes:
    """The fullest payload within the budget; tensors in the order of their names."""
    draft = Draft(update, budget, tie)
    best, ratio, away = seal(MAGIC, b"", tie), EXPECTED, AWAY
    fails, fits = FINEST - 1, COARSEST + 1  # the nearest steps tried; at first outside the scale
    for attempt in range(2 * TRIES if any(draft.readings) else 0):
        if attempt == TRIES and fits <= COARSEST:
            break
        index = _coarsen(draft, 8 * (budget - OVERHEAD) * (1 + FILLED) / 2 / ratio)
        # Where the estimate errs, or sizes jump (values of few kinds) and nothing fits: without it.
        if attempt >= TRIES or not fails < index < fits:
            index = _between(fails, fits, away)
            away *= 4
        payload = draft.encode(index)
        if len(payload) > budget:
            fails = index
        else:
            best, fits = max(best, payload, key=len), index
        if fits - fails == 1 or len(best) >= FILLED * budget:
            break
        # The estimate is right up to a factor that hardly depends on the step: learn it.
        if draft.bits(index):
            ratio = 8 * (len(payload) - OVERHEAD) / draft.bits(index)
    return best


def _between(fails: int, fits: int, away: int) -> int:
    """So far from the one end that was tried, or half-way between two."""
    if fails < FINEST:
        return max(fits - away, FINEST)
    if fits > COARSEST:
        return min(fails + away, COARSEST)
    return (fails + fits) // 2


def _coarsen(draft: Draft, bits: float) -> int:
    """About the finest step that is expected to take no more than so many bits."""
    low, high = FINEST, COARSEST
    while high - low > FINENESS // 8:
        middle = (low + high) // 2
        if draft.bits(middle) <= bits:
            high = middle
        else:
            low = middle
    more, less = draft.bits(low), draft.bits(high)
    part = (more - bits) / (more - less) if more > less else 0.0
    return low + ceil((high - low) * min(max(part, 0.0), 1.0))


def decompress_lowrank(payload: bytes, shapes: Shapes, tie: Bond) -> Floats:
    """All elements, tensors in the order of their names."""
    body = unseal_exact(payload, MAGIC, tie)
    flat = np.zeros(sum(map(prod, shapes.values())), np.float32)
    if not body:
        return flat
    reader = Reader(body, "payload")
    step = _read_step(reader)
    plan = [_read_way(reader, tuple(shapes[name])) for name in sorted(shapes)]
    source, contexts, start = Source(reader.rest()), Contexts(), 0
    for name, (way, rank) in zip(sorted(shapes), plan, strict=True):
        end = start + prod(shapes[name])
        values = flat[start:end].reshape(layout_of(shapes[name]))
        if way is Way.DIRECT:
            _read_elements(values, source, contexts)
        elif way is not Way.NOTHING:
            _read_factors(values, way, rank, source, contexts)
        if way is not Way.NOTHING:
            restore(flat[start:end], shapes[name])
        start = end
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
    layout = layout_of(shape)
    allowed = (Way.NOTHING, Way.DIRECT, *ways_of(layout)) if prod(shape) else (Way.NOTHING,)
    if code not in allowed:
        raise PayloadError(f"a tensor of shape {list(shape)} cannot be sent in way {code}")
    way = Way(code)
    if way in {Way.NOTHING, Way.DIRECT}:
        return way, 0
    return way, reader.varint(1, most_rank(sides(layout, way)))


def _read_elements(values: Floats, source: Source, contexts: Contexts) -> None:
    columns = values.shape[-1]
    numbers = source.integers(values.size // columns, columns, contexts.direct)
    values[...] = numbers.reshape(values.shape)


def _read_basis(source: Source, rows: int, columns: int, contexts: Contexts) -> Floats:
    halves = np.cumsum(source.integers(1, columns, contexts.direct)[0], dtype=np.int64)
    if halves.min() < 0 or halves.max() > MAX_STRENGTH:
        raise PayloadError(f"the strength of a column is outside 0 to {MAX_STRENGTH}")
    return basis_of(source.integers(columns, rows, contexts.columns), halves.astype(np.int32))


def _read_factors(values: Floats, way: Way, rank: int, source: Source, contexts: Contexts) -> None:
    short, long = sides(values.shape, way)
    basis = _read_basis(source, short, rank, contexts)
    rows = source.integers(rank, long, contexts.rows)
    count = max(1, min(BLOCK, BLOCK_ELEMENTS // long))
    for first in range(0, short, count):
        write_rows(values, way, first, _product(basis[first : first + count], rows))


@compiled
def _tile(basis: Floats, rows: Integers, start: int) -> Floats:
    """The next columns of P·G from `start` on."""
    rank, end = rows.shape[0], min(start + TILE, rows.shape[1])
    out = np.zeros((basis.shape[0], end - start), np.float32)
    for k in range(0, rank - rank % 4, 4):  # four at a time spare most loads and stores
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
    """P·G in float32, every sum in the order of the columns: the same bits on every machine."""
    out = np.empty((basis.shape[0], rows.shape[1]), np.float32)
    for start in range(0, rows.shape[1], TILE):
        out[:, start : start + TILE] = _tile(basis, rows, start)
    return out


@compiled
def _scale(flat: Floats, step: float) -> None:
    largest = np.float64(np.finfo(np.float32).max)
    for i in range(flat.size):
        flat[i] = np.float32(min(max(np.float64(flat[i]) * step, -largest), largest))
