"""The paper's codec: which kernels are kept, at how many levels, within a byte budget (Sec. III-C).

Sparsification keeps the kernels of largest L2 norm (eq. 2): û[k] = u[k] if ‖u[k]‖₂ ≥ Π, else 0.
Quantization maps |u| onto the points Q_l = u_min + l (u_max − u_min) / L and draws the upper
neighbour with probability (|u| − Q_l) / (Q_{l+1} − Q_l), so that E[ũ] = û (eqs. 3 and 4).
From the budget to (ρ, L): a piecewise-linear function of β, fitted offline, is the first guess. For
levels L around it, one sweep over the kernels by decreasing norm finds how many the budget pays for
and the error that leaves: Σ ‖u[k]‖² over the dropped ones plus, over the kept ones, the variance of
the draw, Σ (|u| − Q_l)(Q_{l+1} − |u|). The best L is encoded, and the number of kernels corrected
until the payload fits.

Deviations (docs/decisions/0010): l runs from 0 to L, so that every |u| has an interval; where
min |u| lies below one step, Q_0 is 0 instead of u_min, and points that are 0 need no sign; kernels
that are exactly zero are never kept. The fit is in log₂ β, for ρ and for log₂ L, because β and L
span decades; the paper stops there, but the errors of the fit would break the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from math import isqrt, log2

import numpy as np

from anycostfl.codec.arrays import Bools, Bytes, Doubles, Floats, Ints, Symbols, Whole
from anycostfl.codec.frame import OVERHEAD, Candidate, Goal, PayloadBinding, Trial, seal, search
from anycostfl.codec.sections import MAGIC, MAX_LEVELS, Grid, Part, Quantized, pack, unpack
from anycostfl.compiled import compiled

SWEPT_ELEMENTS = 100_000  # enough for 1 % in size; a larger update is sampled with a stride
FILLED = 0.992
EXACT = 1e-12  # a relative error that is only rounding: more bytes would not lower it
AIM = 0.997  # of the budget: the sweep's size is an estimate
TOP_EXPONENT = 31  # L ≤ 46,341 in the sweep: by then every kernel is kept
TENSOR_BYTES, OTHER_BYTES = 8, 28  # of sections, besides masks, tables, levels and signs
Bounds = tuple[float, float, float]  # u_min, u_max, step


@dataclass(frozen=True, slots=True)
class Guess:
    """A sparsity ρ (share of kernels dropped) and a number of levels L."""

    sparsity: float
    levels: int


# Fitted to the CNN on Fashion-MNIST (benchmarks/fit_codec.py): a first guess for any update.
FIT = {
    2.0**-10: Guess(0.98738, 23),
    2.0**-9: Guess(0.97251, 23),
    2.0**-8: Guess(0.94881, 32),
    2.0**-7: Guess(0.90333, 45),
    2.0**-6: Guess(0.81586, 64),
    2.0**-5: Guess(0.69893, 128),
    2.0**-4: Guess(0.46503, 256),
    2.0**-3: Guess(0.3771, 2048),
    2.0**-2: Guess(0.29068, 46341),
}


def first_guess(beta: float, fit: dict[float, Guess] = FIT) -> Guess:
    """Interpolate the fit; beyond its outer knots, hold their value."""
    at, knots = np.log2(beta), np.log2(list(fit))
    levels = 2 ** np.interp(at, knots, np.log2([guess.levels for guess in fit.values()]))
    sparsity = np.interp(at, knots, [guess.sparsity for guess in fit.values()])
    return Guess(float(sparsity), round(float(levels)))


@dataclass(frozen=True, slots=True)
class Spans:
    """Kernels as spans of the flat update: start and length of each."""

    start: Ints
    length: Ints

    def take(self, chosen: Ints) -> Spans:
        """Only the chosen kernels, in the order given."""
        return Spans(self.start[chosen], self.length[chosen])


@dataclass(frozen=True, slots=True)
class Norms:
    """Per kernel: squared L2 norm, largest magnitude, smallest non-zero magnitude."""

    energy: Doubles
    largest: Floats
    smallest: Floats


@dataclass(frozen=True, slots=True)
class Draft:
    """An update ready to be encoded with any number of kernels and levels."""

    flat: Floats
    parts: Sequence[Part]
    spans: Spans
    norms: Norms
    order: Ints
    seed: int
    binding: PayloadBinding

    @classmethod
    def of(cls, flat: Floats, parts: Sequence[Part], seed: int, binding: PayloadBinding) -> Draft:
        """Cut into kernels, measure and rank them."""
        spans = spans_of(parts)
        norms = measure(flat, spans)
        return cls(flat, parts, spans, norms, rank(norms), seed, binding)

    def encode(self, kept: int, levels: int) -> bytes:
        """The payload with the `kept` largest kernels, quantized to `levels` intervals."""
        mask = np.zeros(self.spans.start.size, np.bool_)
        mask[self.order[:kept]] = True
        chosen = np.flatnonzero(mask)
        grid = grid_for(self.norms, chosen, levels)
        quantized = quantize(self.flat, self.spans.take(chosen), grid, self.seed)
        return pack(mask, quantized, self.parts, self.binding)

    def is_exact(self, levels: int) -> bool:
        """Whether every element lies on a point when all kernels are kept."""
        grid = grid_for(self.norms, self.order, levels)
        sizes = np.abs(self.flat[self.flat != 0]).astype(np.float64)
        places = (sizes - grid.u_min) / (grid.step or 1.0)
        lost = float(np.square(places - np.rint(places)).sum()) * grid.step**2
        return lost <= EXACT * float(self.norms.energy.sum())


def compress_kernel(draft: Draft, budget: int, guess: Guess) -> bytes:
    """The payload of least error that fits `budget` bytes and leaves little of it unused."""
    empty = seal(MAGIC, b"", draft.binding)
    if not draft.order.size:
        return empty
    levels, start = choose_levels(draft, budget, guess)
    best = most_kernels(draft, levels, start, budget)
    if best is None:  # not even one kernel at this L: the coarsest points are the last resort
        levels = 1
        best = most_kernels(draft, levels, 1, budget)
    if best is None:
        return empty
    kept, payload = best.number, best.payload
    if kept == draft.order.size and draft.is_exact(levels):
        return payload
    if len(payload) < FILLED * budget:
        # Whole kernels are too coarse to use the rest, or none is left: finer points can.
        finer = _most_levels(draft, kept, levels, budget)
        if finer is not None:
            levels, payload = finer.number, finer.payload
    if len(payload) < FILLED * budget:
        # One level more is too much for all of these kernels, but not for most of them.
        other = most_kernels(draft, min(levels + 1, MAX_LEVELS), kept, budget)
        payload = max(payload, other.payload if other else b"", key=len)
    return payload


def decompress_kernel(
    payload: bytes, parts: Sequence[Part], binding: PayloadBinding
) -> tuple[Floats, Bools]:
    """All elements, and which of them belong to kept kernels."""
    decoded = unpack(payload, parts, binding)
    if decoded is None:
        size = sum(part.size for part in parts)
        return np.zeros(size, np.float32), np.zeros(size, np.bool_)
    mask, quantized = decoded
    return dequantize(quantized, mask), mask


def most_kernels(draft: Draft, levels: int, start: int, budget: int) -> Candidate | None:
    """As many kernels as fit at L = `levels`."""

    def propose(kept: int, size: int) -> int:
        return round(kept * AIM * budget / size)

    numbers, goal = range(1, draft.order.size + 1), Goal(budget, FILLED, tries=48)
    return _largest(lambda kept: draft.encode(kept, levels), propose, numbers, start, goal)


def _most_levels(draft: Draft, kept: int, above: int, budget: int) -> Candidate | None:
    bits = 8 / int(draft.spans.length[draft.order[:kept]].sum())

    def propose(levels: int, size: int) -> int:
        return round(levels * 2 ** min(4.0, bits * (AIM * budget - size)))

    numbers, start = range(above + 1, MAX_LEVELS + 1), above + max(1, above // 16)
    # Fewer tries: an update that is exact already has the same size at any L.
    goal = Goal(budget, FILLED, tries=24)
    return _largest(lambda levels: draft.encode(kept, levels), propose, numbers, start, goal)


def _largest(
    encode: Callable[[int], bytes],
    propose: Callable[[int, int], int],
    numbers: range,
    start: int,
    goal: Goal,
) -> Candidate | None:
    def propose_or_bisect(trial: Trial) -> int:
        # Proposals converge in two or three steps; bisection guarantees an end.
        if trial.attempt % 4 == 3:
            return isqrt(trial.fits * trial.fails)
        return propose(trial.number, trial.size)

    fitting = list(search(encode, propose_or_bisect, numbers, start, goal))
    return fitting[-1] if fitting else None


# --- sparsification (III-C.1) ---------------------------------------------------------------------


def spans_of(parts: Sequence[Part]) -> Spans:
    """Cut every row of every tensor into kernels of `block` elements."""
    starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in parts:
        if part.size:
            column = np.arange(0, part.width, part.block)
            row = np.arange(part.offset, part.offset + part.size, part.width)
            starts.append((row[:, None] + column).ravel())
            lengths.append(np.tile(np.minimum(part.block, part.width - column), row.size))
    return Spans(np.concatenate(starts), np.concatenate(lengths))


def measure(flat: Floats, spans: Spans) -> Norms:
    """Norm and magnitudes of every kernel."""
    energy, largest, smallest = _measure(flat, spans.start, spans.length)
    return Norms(energy, largest, smallest)


@compiled
def _measure(flat: Floats, start: Ints, length: Ints) -> tuple[Doubles, Floats, Floats]:
    energy = np.zeros(start.size, np.float64)
    largest = np.zeros(start.size, np.float32)
    smallest = np.full(start.size, np.inf, np.float32)
    for k in range(start.size):
        total, high, low = 0.0, np.float32(0), np.float32(np.inf)
        for j in range(start[k], start[k] + length[k]):
            magnitude = abs(flat[j])
            total += np.float64(magnitude) * np.float64(magnitude)
            high = max(high, magnitude)
            if magnitude > 0:
                low = min(low, magnitude)
        energy[k], largest[k], smallest[k] = total, high, low
    return energy, largest, smallest


def rank(norms: Norms) -> Ints:
    """Non-zero kernels, largest norm first; ties in layout order."""
    norm = np.minimum(np.sqrt(norms.energy), np.finfo(np.float32).max).astype(np.float32)
    # Non-negative floats sort like their bits; with the index below them every key is unique, so
    # that any sorting algorithm gives the same order.
    key = (np.uint64(0xFFFFFFFF) - norm.view(np.uint32)) << np.uint64(32)
    order = np.sort(key | np.arange(norm.size, dtype=np.uint64)) & np.uint64(0xFFFFFFFF)
    return order[: np.count_nonzero(norm)].astype(np.int64)


def kept_for(sparsity: float, kernels: int) -> int:
    """Number of `kernels` kept at sparsity ρ: K − ⌈ρK⌉, at least one (eq. 2)."""
    return max(1, kernels - int(np.ceil(sparsity * kernels)))


# --- probabilistic quantization (III-C.2) ---------------------------------------------------------


def grid_for(norms: Norms, kept: Ints, levels: int) -> Grid:
    """Points from smallest to largest kept magnitude; from 0 if the smallest is below one step."""
    u_max, u_min = float(norms.largest[kept].max()), float(norms.smallest[kept].min())
    return Grid(0.0 if u_min < u_max / levels else u_min, u_max, levels)


def quantize(flat: Floats, spans: Spans, grid: Grid, seed: int) -> Quantized:
    """Draw a symbol for every element of the kernels.

    The draw depends on the seed and the element's position in the update, on nothing else.
    """
    symbols = np.empty(int(spans.length.sum()), np.uint32)
    negative = np.empty(symbols.size, np.uint8)
    # Hashed, so that neighbouring seeds share nothing.
    digest = blake2s(str(int(seed)).encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "little"))
    span = spans.start, spans.length
    _quantize(flat, span, grid.bounds, grid.symbols - 1, key, symbols, negative)
    return Quantized(grid, symbols, _pack_signs(symbols, negative))


@compiled
def _uniform(key: np.uint64, index: int) -> float:
    # Counter-based: SplitMix64's mixing of key and index; its top 53 bits as a double in [0, 1).
    z = key + (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(np.int64(z >> np.uint64(11))) * (1.0 / 9007199254740992.0)


@compiled
def point(symbol: Whole, u_min: float, u_max: float, step: float) -> np.float32:
    """The magnitude of a symbol."""
    # One multiplication and one addition in float64, each exactly rounded: the same on every CPU.
    if u_min > 0:
        if symbol == 0:
            return np.float32(0)
        symbol -= 1
    return np.float32(min(symbol * step + u_min, u_max))


@compiled
def _quantize(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    flat: Floats, spans: tuple[Ints, Ints], bounds: Bounds, last: int, key: np.uint64,
    symbols: Symbols, negative: Bytes,
) -> None:  # fmt: skip
    (start, length), (u_min, u_max, step) = spans, bounds
    first, scale = (1 if u_min > 0 else 0), (1.0 / step if step > 0 else 0.0)
    at = 0
    for k in range(start.size):
        for j in range(start[k], start[k] + length[k]):
            magnitude = abs(flat[j])
            negative[at] = flat[j] < 0
            symbol: Whole = 0
            if magnitude > 0:
                symbol = min(last, first + int((magnitude - u_min) * scale))
                below = point(symbol, u_min, u_max, step)
                # Points are rounded to float32: the arithmetic guess may be one too high.
                if below > magnitude:
                    symbol -= 1
                    below = point(symbol, u_min, u_max, step)
                if below < magnitude and symbol < last:
                    above = np.float64(point(symbol + 1, u_min, u_max, step))
                    symbol += _uniform(key, j) * (above - below) < np.float64(magnitude) - below
            symbols[at] = symbol
            at += 1


@compiled
def _pack_signs(symbols: Symbols, negative: Bytes) -> Bytes:
    # In a pass of its own: inside `_quantize` it would make encoding slower by a quarter.
    signs = np.zeros(symbols.size // 8 + 1, np.uint8)
    at = 0
    for i in range(symbols.size):
        if symbols[i] > 0:
            signs[at >> 3] |= np.uint8(negative[i] << (at & 7))
            at += 1
    return signs[: (at + 7) // 8]


def dequantize(quantized: Quantized, mask: Bools) -> Floats:
    """±Q where the mask is set, 0 elsewhere."""
    flat = np.zeros(mask.size, np.float32)
    _dequantize(quantized.symbols, quantized.signs, quantized.grid.bounds, mask, flat)
    return flat


@compiled
def _dequantize(symbols: Symbols, signs: Bytes, bounds: Bounds, mask: Bools, flat: Floats) -> None:
    u_min, u_max, step = bounds
    at, bit = 0, 0
    for j in range(mask.size):
        if not mask[j]:
            continue
        symbol = np.int64(symbols[at])
        at += 1
        if symbol > 0:
            size = point(symbol, u_min, u_max, step)
            flat[j] = -size if (signs[bit >> 3] >> (bit & 7)) & 1 else size
            bit += 1


# --- β → (ρ, L) for one update --------------------------------------------------------------------


def choose_levels(draft: Draft, budget: int, guess: Guess) -> tuple[int, int]:
    """The levels of least expected error, and how many kernels they allow."""
    sweep = _Sweep.of(draft, budget, guess.sparsity)
    seen: dict[int, tuple[float, int]] = {}

    def error(exponent: int) -> float:
        if exponent not in seen:
            seen[exponent] = sweep.run(round(2 ** (exponent / 2)))
        return seen[exponent][0]

    # With more points than elements every point costs a table entry, whatever their number: a
    # plateau to stay away from. Below it the error has one minimum.
    sensible = min(guess.levels, max(1, draft.flat.size // 64))
    best = min(round(2 * log2(sensible)), TOP_EXPONENT)
    while best > 0 and error(best - 1) <= error(best):
        best -= 1
    while best < TOP_EXPONENT and error(best + 1) < error(best):
        best += 1
    kept = max(1, seen[best][1])
    # The sweep's step refers to the largest of all elements; the kept ones may not reach it.
    reach = draft.norms.largest[draft.order[:kept]].max() / draft.norms.largest.max()
    return max(1, round(2 ** (best / 2) * float(reach))), kept


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Every `stride`-th kernel by decreasing norm, as a sample of all of them."""

    flat: Floats
    spans: Spans
    stride: int
    dropped: Doubles  # energy lost when the first k kernels are kept
    largest: float
    bits: float

    @classmethod
    def of(cls, draft: Draft, budget: int, sparsity: float) -> _Sweep:
        """Sample so that about `SWEPT_ELEMENTS` are swept if the guess of ρ is right."""
        count = draft.spans.start.size
        guessed = draft.flat.size * kept_for(sparsity, count) // count
        non_zero = int(draft.spans.length[draft.order].sum())  # elements of kernels that are not 0
        stride = max(1, min(guessed, non_zero) // SWEPT_ELEMENTS)
        energy = draft.norms.energy[draft.order]
        fixed = OVERHEAD + TENSOR_BYTES * min(len(draft.parts), 8) + OTHER_BYTES
        return cls(
            flat=draft.flat,
            spans=draft.spans.take(draft.order[stride // 2 :: stride]),
            stride=stride,
            dropped=np.append(energy[::-1].cumsum()[::-1], 0.0),
            largest=float(draft.norms.largest.max()),
            bits=8.0 * (AIM * budget - fixed),
        )

    def run(self, levels: int) -> tuple[float, int]:
        """Expected squared error, and the number of kernels the budget pays for."""
        step = self.largest / levels
        spans = self.spans.start, self.spans.length
        total = self.dropped.size - 1
        counts = np.zeros(levels + 2)
        kept, noise = _sweep(self.flat, spans, 1 / step, counts, self.stride, total, self.bits)
        return self.dropped[kept] + noise * step**2 if kept else np.inf, kept


@compiled
def _sweep(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    flat: Floats, spans: tuple[Ints, Ints], scale: float, counts: Doubles, stride: int, total: int,
    budget: float,
) -> tuple[int, float]:  # fmt: skip
    start, length = spans
    noise, elements, before, bits = 0.0, 0, 0.0, 0.0
    noise_before, check, checked = 0.0, 1, 0
    for k in range(start.size):
        for j in range(start[k], start[k] + length[k]):
            place = abs(np.float64(flat[j])) * scale
            level = int(place)
            share = place - level
            counts[level] += 1.0 - share
            counts[level + 1] += share
            noise += share * (1.0 - share)
        elements += length[k]
        if k + 1 < check and k + 1 < start.size:
            continue
        kept = min(total, (k + 1) * stride)
        bits = stride * _level_bits(counts, elements) + _table_bits(counts, stride)
        bits += _mask_bits(kept, total)
        if bits > budget:
            # Between two checks the size grows evenly.
            part = (budget - before) / (bits - before) if budget > before else 0.0
            reached = int(checked + part * (kept - checked))
            return reached, stride * (noise_before + part * (noise - noise_before))
        before, checked, noise_before = bits, kept, noise
        check = k + 2 + k // 32
    return total, stride * noise


@compiled
def _level_bits(counts: Doubles, elements: int) -> float:
    # Entropy of the levels plus one sign for every level above 0.
    bits: float = elements * np.log2(np.float64(elements)) + elements - counts[0]
    for count in counts:
        if count > 0:
            bits -= count * np.log2(count)
    return bits


@compiled
def _table_bits(counts: Doubles, stride: int) -> float:
    occurring, runs, inside = 0, 0, False  # runs of levels that do not occur, each with a length
    for count in counts:
        occurs = count * stride > 0.5
        occurring += occurs
        runs += inside and not occurs
        inside = occurs
    return 10.0 * occurring + 16.0 * runs


@compiled
def _mask_bits(kept: int, total: int) -> float:
    share = kept / total
    if share in {0.0, 1.0}:
        return 0.0
    per_kernel: float = share * np.log2(share) + (1 - share) * np.log2(1 - share)
    return -total * per_kernel
