"""From a byte budget to (ρ, L) for one update, so that the budget is kept and used (Sec. III-C).

The fitted function (`fit`) is the first guess. Then, for levels L around it, one sweep through the
kernels from the largest norm down finds how many the budget pays for, and the error that leaves:
Σ ‖u[k]‖² over the dropped ones plus, over the kept ones, Σ (|u| − Q_l)(Q_{l+1} − |u|), which is the
variance of the draw. The best L is encoded for real, the number of kernels corrected till it fits.

Deviation: the paper stops at the fitted function; its misses would break the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, log2

import numpy as np

from anycostfl.codec import kernels
from anycostfl.codec.arrays import Doubles, Floats, Ints
from anycostfl.codec.frame import OVERHEAD, Bond, seal
from anycostfl.codec.kernel import PACKING
from anycostfl.codec.kernels import Kept, Packing, Part
from anycostfl.compiled import compiled

SWEPT_ELEMENTS = 100_000  # enough for 1 % in size; a larger update is swept in strides
FILLED = 0.992
EXACT = 1e-12  # relative error that is rounding: more bytes would say nothing more
AIM = 0.997  # of the budget: the sweep's size is an estimate
TOP_EXPONENT = 31  # L = 46,341 at most in the sweep: by then every kernel is kept
TENSOR_BYTES, OTHER_BYTES = 8, 28  # what sections take besides masks, tables, levels, signs


@dataclass(frozen=True, slots=True)
class Guess:
    """A sparsity ρ (share of kernels dropped) and a number of levels L."""

    sparsity: float
    levels: int


@dataclass(frozen=True, slots=True)
class Draft:
    """An update ready to be encoded with any number of kernels and levels."""

    flat: Floats
    parts: Sequence[Part]
    spans: kernels.Spans
    norms: kernels.Norms
    order: Ints
    seed: int
    tie: Bond
    packing: Packing

    @classmethod
    def of(
        cls,
        flat: Floats,
        parts: Sequence[Part],
        seed: int,
        tie: Bond,
        *,
        packing: Packing = PACKING,
    ) -> Draft:
        """Cut into kernels, measure and rank them."""
        spans = kernels.join([kernels.spans_of(part) for part in parts])
        norms = kernels.measure(flat, spans)
        return cls(flat, parts, spans, norms, kernels.rank(norms), seed, tie, packing)

    def encode(self, kept: int, levels: int) -> bytes:
        """The payload with the `kept` largest kernels, quantized to `levels` intervals."""
        mask = np.zeros(self.spans.start.size, np.bool_)
        mask[self.order[:kept]] = True
        chosen = np.flatnonzero(mask)
        grid = kernels.grid_for(self.norms, chosen, levels)
        symbols, negative = kernels.quantize(self.flat, self.spans.take(chosen), grid, self.seed)
        return self.packing.pack(Kept(mask, grid, symbols, negative), self.parts, self.tie)

    def is_exact(self, levels: int) -> bool:
        """Whether every element lies on a point when all kernels are kept."""
        grid = kernels.grid_for(self.norms, self.order, levels)
        sizes = np.abs(self.flat[self.flat != 0]).astype(np.float64)
        places = (sizes - grid.u_min) / (grid.step or 1.0)
        lost = float(np.square(places - np.rint(places)).sum()) * grid.step**2
        return lost <= EXACT * float(self.norms.energy.sum())

    def nothing(self) -> bytes:
        """The payload that says that nothing is kept."""
        return seal(self.packing.magic, b"", self.tie)


def fill(draft: Draft, budget: int, guess: Guess) -> bytes:
    """The payload of least error that fits `budget` bytes and leaves little of it unused."""
    if not draft.order.size:
        return draft.nothing()
    levels, start = choose(draft, budget, guess)
    kept, payload = _most_kernels(draft, levels, start, budget)
    if payload is None:  # not one kernel at this L: the coarsest points are the last resort
        levels = 1
        kept, payload = _most_kernels(draft, levels, 1, budget)
    if payload is None:
        return draft.nothing()
    if kept == draft.order.size and draft.is_exact(levels):
        return payload
    if len(payload) < FILLED * budget:
        # Whole kernels are too coarse to use the rest, or none is left: finer points can.
        finer, better = _most_levels(draft, kept, levels, budget)
        levels, payload = (finer, better) if better is not None else (levels, payload)
    if len(payload) < FILLED * budget:
        # One level more is too much for all of these kernels, but not for most of them.
        _, other = _most_kernels(draft, min(levels + 1, kernels.MAX_LEVELS), kept, budget)
        payload = max(payload, other or b"", key=len)
    return payload


def _most_kernels(draft: Draft, levels: int, start: int, budget: int) -> tuple[int, bytes | None]:
    return _largest(
        lambda kept: draft.encode(kept, levels),
        lambda kept, size: round(kept * AIM * budget / size),
        range(1, draft.order.size + 1),
        start,
        budget,
    )


def _most_levels(draft: Draft, kept: int, above: int, budget: int) -> tuple[int, bytes | None]:
    bits = 8 / int(draft.spans.length[draft.order[:kept]].sum())
    # What is exact already stays as large as it is at any L, so this search must end soon.
    return _largest(
        lambda levels: draft.encode(kept, levels),
        lambda levels, size: round(levels * 2 ** min(4.0, bits * (AIM * budget - size))),
        range(above + 1, kernels.MAX_LEVELS + 1),
        above + max(1, above // 16),
        budget,
        tries=24,
    )


def _largest(  # noqa: PLR0917 - a search has bounds, a start and an end
    encode: Callable[[int], bytes],
    propose: Callable[[int, int], int],
    numbers: range,
    start: int,
    budget: int,
    tries: int = 48,
) -> tuple[int, bytes | None]:
    """Search the largest number whose encoding fits; stop once the budget is nearly used."""
    at, fits, fails, best = start, numbers.start - 1, numbers.stop, None
    for attempt in range(tries if numbers else 0):
        at = min(max(at, fits + 1), fails - 1)
        payload = encode(at)
        if len(payload) <= budget:
            fits, best = at, payload
        else:
            fails = at
        if fails - fits <= 1 or (best is not None and len(best) >= FILLED * budget):
            break
        # Proposals converge in two or three steps; halving now and then makes sure of an end.
        at = propose(at, len(payload)) if attempt % 4 < 3 else isqrt(fits * fails)
    return fits, best


def choose(draft: Draft, budget: int, guess: Guess) -> tuple[int, int]:
    """The levels of least expected error, and how many kernels they allow."""
    sweep = _Sweep.of(draft, budget, guess.sparsity)
    seen: dict[int, tuple[float, int]] = {}

    def error(exponent: int) -> float:
        if exponent not in seen:
            seen[exponent] = sweep.run(round(2 ** (exponent / 2)))
        return seen[exponent][0]

    # With more points than elements every point costs an entry of the table, whatever their number:
    # a plateau to stay away from. Below it the error has one minimum.
    sensible = min(guess.levels, max(1, draft.flat.size // 64))
    best = min(round(2 * log2(sensible)), TOP_EXPONENT)
    while best > 0 and error(best - 1) <= error(best):
        best -= 1
    while best < TOP_EXPONENT and error(best + 1) < error(best):
        best += 1
    kept = max(1, seen[best][1])
    # The sweep's step belongs to the largest of all elements; the kept ones may reach less far.
    reach = draft.norms.largest[draft.order[:kept]].max() / draft.norms.largest.max()
    return max(1, round(2 ** (best / 2) * float(reach))), kept


@dataclass(frozen=True, slots=True)
class _Sweep:
    """A stride through the ranked kernels that stands for all of them."""

    flat: Floats
    spans: kernels.Spans
    stride: int
    dropped: Doubles
    largest: float
    bits: float

    @classmethod
    def of(cls, draft: Draft, budget: int, sparsity: float) -> _Sweep:
        """Sample so that about `SWEPT_ELEMENTS` are swept if the guess of ρ is right."""
        count = draft.spans.start.size
        guessed = draft.flat.size * kernels.kept_for(sparsity, count) // count
        there = int(draft.spans.length[draft.order].sum())  # in kernels that are not all zeros
        stride = max(1, min(guessed, there) // SWEPT_ELEMENTS)
        energy = draft.norms.energy[draft.order]
        dropped = np.append(energy[::-1].cumsum()[::-1], 0.0)
        fixed = OVERHEAD + TENSOR_BYTES * min(len(draft.parts), 8) + OTHER_BYTES
        return cls(
            draft.flat,
            draft.spans.take(draft.order[stride // 2 :: stride]),
            stride,
            dropped,
            float(draft.norms.largest.max()),
            8.0 * (AIM * budget - fixed),
        )

    def run(self, levels: int) -> tuple[float, int]:
        """Expected squared error, and the number of kernels the budget pays for."""
        step = self.largest / levels
        start, length, stride = self.spans.start, self.spans.length, self.stride
        counts = np.zeros(levels + 2)
        kept, noise = _sweep(
            self.flat, start, length, 1 / step, counts, stride, self.dropped.size - 1, self.bits
        )
        return self.dropped[kept] + noise * step**2 if kept else np.inf, kept


@compiled
def _sweep(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    flat: Floats,
    start: Ints,
    length: Ints,
    scale: float,
    counts: Doubles,
    stride: int,
    kernels_sent: int,
    budget: float,
) -> tuple[int, float]:
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
        kept = min(kernels_sent, (k + 1) * stride)
        bits = stride * _level_bits(counts, elements) + _table_bits(counts, stride)
        bits += _mask_bits(kept, kernels_sent)
        if bits > budget:
            # Between two checks the size grows evenly.
            part = (budget - before) / (bits - before) if budget > before else 0.0
            reached = int(checked + part * (kept - checked))
            return reached, stride * (noise_before + part * (noise - noise_before))
        before, checked, noise_before = bits, kept, noise
        check = k + 2 + k // 32
    return kernels_sent, stride * noise


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
def _mask_bits(kept: int, kernels_sent: int) -> float:
    share = kept / kernels_sent
    if share in {0.0, 1.0}:
        return 0.0
    per_kernel: float = share * np.log2(share) + (1 - share) * np.log2(1 - share)
    return -kernels_sent * per_kernel
