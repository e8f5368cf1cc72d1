"""The low-rank codec: an update as quantized factors, all at one step, context-coded.

Every matrix M of an update is sent as P·G: P has few orthonormal columns, G = PᵀM. A step Δ for the
elements of G, and Δ/s for the column of P whose row in G has norm s, puts the same error Δ²/12 on
every number sent, which is the least total error for the bits (reverse water-filling). P is
quantized first, G is the least-squares fit to the quantized P. The mode of each tensor and its rank
minimise error + λ·bits, with one λ = `laplace.PRICE`·Δ² for the whole update. Δ follows from the
budget.

docs/wire-format.md describes the body of the frame "ACFL", docs/decisions/0011 the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, frexp, prod

import numpy as np

from anycostfl.codec import matricization
from anycostfl.codec.arrays import Floats
from anycostfl.codec.context import RangeDecoder, RangeEncoder
from anycostfl.codec.frame import (
    OVERHEAD,
    Goal,
    PayloadBinding,
    Reader,
    Trial,
    fullest,
    seal,
    search,
    unseal_exact,
    varint,
)
from anycostfl.codec.matricization import Choice, ContextSets, Mode, matricizations
from anycostfl.codec.spectrum import from_spectrum, layout_of
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MAGIC = b"ACFL"
FINENESS = 256  # steps per octave, from which Δ is chosen
EXPONENTS = (-400, 160)  # of Δ
FILLED = 0.97
EXPECTED = 0.985  # real bits over estimated ones, typically
TRIES = 8  # twice as many while nothing fits
AWAY = 16  # steps by which to leave a wrong estimate, then four times as many
FINEST, COARSEST = -32 * FINENESS, 2 * FINENESS  # Δ from 2^-24 to 2^10, the update being below 1

Shapes = Mapping[str, Sequence[int]]


def step_of(index: int) -> float:
    """Δ on its logarithmic scale, which is exact in binary."""
    exponent, mantissa = divmod(index, FINENESS)
    return float((FINENESS + mantissa) * 2.0**exponent)


class Draft:
    """An update ready to be encoded at any step; scaled so that its largest element is below 1."""

    def __init__(self, update: Sequence[Floats], budget: int, binding: PayloadBinding) -> None:
        largest = max((float(np.abs(v).max()) for v in update if v.size), default=0.0)
        self.exponent = frexp(largest)[1]
        self.binding = binding
        # Two factors, because a single float32 cannot represent 2^148.
        half = -self.exponent // 2
        first, second = np.float32(2.0**half), np.float32(2.0 ** (-self.exponent - half))
        scaled = [v * first * second for v in update]
        self.energies = [float(np.vdot(v, v)) for v in scaled]
        self.matricizations = [matricizations(v, 8 * budget) for v in scaled]
        self._bits: dict[int, float] = {}

    def choose(self, step: float) -> list[Choice | None]:
        """For every tensor the mode of least J; None if sending nothing is best."""
        chosen = []
        for tensor, energy in zip(self.matricizations, self.energies, strict=True):
            options = [choice for m in tensor if (choice := m.estimate(step)) is not None]
            best = min(options, key=lambda option: option.loss(step), default=None)
            chosen.append(best if best is not None and best.loss(step) < energy else None)
        return chosen

    def bits(self, index: int) -> float:
        """Expected bits of all tensors."""
        if index not in self._bits:
            choices = self.choose(step_of(index))
            self._bits[index] = sum(choice.bits for choice in choices if choice is not None)
        return self._bits[index]

    def encode(self, index: int) -> bytes:
        """The payload at a step."""
        head = bytearray((index + FINENESS * self.exponent).to_bytes(3, "little", signed=True))
        contexts, encoder = ContextSets(), RangeEncoder(int(self.bits(index)) // 7)
        for choice in self.choose(step_of(index)):
            if choice is None:
                head.append(Mode.NOTHING)
                continue
            head.append(choice.matricization.mode)
            head += varint(choice.rank) if choice.rank else b""
            choice.matricization.write(choice.rank, step_of(index), encoder, contexts)
        return seal(MAGIC, bytes(head) + encoder.finish(), self.binding)


class _StepSearch:
    """Propose steps from the estimate of bits, or without it where it is wrong.

    Payloads grow as the index of the step falls, so the number searched for is −index.
    """

    def __init__(self, draft: Draft, budget: int) -> None:
        self.draft = draft
        self.target = 8 * (budget - OVERHEAD) * (1 + FILLED) / 2
        self.ratio = EXPECTED
        self.away = AWAY

    def __call__(self, trial: Trial) -> int | None:
        attempt, anything_fits = trial.attempt + 1, trial.fits >= -COARSEST
        if attempt == TRIES and anything_fits:
            return None
        # The estimate is right up to a factor that hardly depends on the step: learn it.
        if expected := self.draft.bits(-trial.number):
            self.ratio = 8 * (trial.size - OVERHEAD) / expected
        if attempt < TRIES and trial.fits < (number := self.estimated()) < trial.fails:
            return number
        # The estimate is off, or sizes jump (values of few kinds) and nothing fits yet.
        away = self.away
        self.away *= 4
        if trial.fails > -FINEST:
            return min(trial.fits + away, -FINEST)
        if not anything_fits:
            return max(trial.fails - away, -COARSEST)
        return -((-trial.fits - trial.fails) // 2)

    def estimated(self) -> int:
        """About the finest step that is expected to take no more bits than the target."""
        bits, wanted = self.draft.bits, self.target / self.ratio
        low, high = FINEST, COARSEST
        while high - low > FINENESS // 8:
            middle = (low + high) // 2
            if bits(middle) <= wanted:
                high = middle
            else:
                low = middle
        more, less = bits(low), bits(high)
        part = (more - wanted) / (more - less) if more > less else 0.0
        return -(low + ceil((high - low) * min(max(part, 0.0), 1.0)))


def compress_lowrank(update: Sequence[Floats], budget: int, binding: PayloadBinding) -> bytes:
    """The fullest payload within the budget; tensors sorted by name."""
    draft, empty = Draft(update, budget, binding), seal(MAGIC, b"", binding)
    if not any(draft.matricizations):
        return empty
    steps = _StepSearch(draft, budget)
    numbers, goal = range(-COARSEST, -FINEST + 1), Goal(budget, FILLED, 2 * TRIES)
    found = search(lambda n: draft.encode(-n), steps, numbers, steps.estimated(), goal)
    return fullest(found) or empty


def decompress_lowrank(payload: bytes, shapes: Shapes, binding: PayloadBinding) -> Floats:
    """All elements, tensors sorted by name."""
    body = unseal_exact(payload, MAGIC, binding)
    flat = np.zeros(sum(map(prod, shapes.values())), np.float32)
    if not body:
        return flat
    reader = Reader(body, "payload")
    step = _read_step(reader)
    modes = [_read_mode(reader, tuple(shapes[name])) for name in sorted(shapes)]
    decoder, contexts, start = RangeDecoder(reader.rest()), ContextSets(), 0
    for name, (mode, rank) in zip(sorted(shapes), modes, strict=True):
        end = start + prod(shapes[name])
        if mode is not Mode.NOTHING:
            values = flat[start:end].reshape(layout_of(shapes[name]))
            if mode is Mode.DIRECT:
                matricization.read_elements(values, decoder, contexts)
            else:
                matricization.read_factors(values, mode, rank, decoder, contexts)
            from_spectrum(flat[start:end], shapes[name])
        start = end
    decoder.finish()
    _scale(flat, step)
    return flat


def _read_step(reader: Reader) -> float:
    index = int.from_bytes(reader.take(3), "little", signed=True)
    if not EXPONENTS[0] * FINENESS <= index < EXPONENTS[1] * FINENESS:
        raise PayloadError(f"step index {index} is out of range")
    return step_of(index)


def _read_mode(reader: Reader, shape: tuple[int, ...]) -> tuple[Mode, int]:
    code, layout = reader.byte(), layout_of(shape)
    sendable = (Mode.DIRECT, *matricization.factored_modes(layout)) if prod(shape) else ()
    if code not in (Mode.NOTHING, *sendable):
        raise PayloadError(f"a tensor of shape {list(shape)} cannot have mode {code}")
    mode = Mode(code)
    if mode in {Mode.NOTHING, Mode.DIRECT}:
        return mode, 0
    return mode, reader.varint(1, matricization.max_rank(layout, mode))


@compiled
def _scale(flat: Floats, step: float) -> None:
    largest = np.float64(np.finfo(np.float32).max)
    for i in range(flat.size):
        flat[i] = np.float32(min(max(np.float64(flat[i]) * step, -largest), largest))
