"""Context-adaptive binary range coding of integer matrices.

A bit with probability p of being 1 narrows an interval [low, high] of 56-bit integers to its lower
p or upper 1 − p; bytes on which both ends agree are shifted out. Every context has its own p, 22
bits wide, which adapts with rate 1/(n + 1.6), n being how often it was seen, at most `MEMORY`.

An integer q is coded as the bit length of |q| in unary, the bits below the leading one, and its
sign. The context is the *activity*: a weighted mean of magnitudes already coded, left of q, above
it, in its row and in its column so far. The first two bits below the leading one have contexts too;
deeper ones and signs are as good as random and cost one bit each.

Integer arithmetic only, and the same code for both directions: every machine reads what another one
wrote. A decoder never reads beyond its bytes, and its work is bounded by the integers asked for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anycostfl.codec.arrays import Bytes, Integers, Ints, Whole
from anycostfl.compiled import compiled, inlined
from anycostfl.errors import PayloadError

MAX_BITS = 30  # of a magnitude
MEMORY = 126  # bits after which a probability adapts no slower
LEVELS = 28  # of activity, two per octave
WINDOW = 7  # bytes of the interval
CONTEXTS = LEVELS * (MAX_BITS + 1) + 3 * LEVELS * (MAX_BITS + 1)

U64 = np.uint64
State = tuple[U64, U64, U64, U64]  # low, high, bytes read as a number, how many were shifted out
StateArray = NDArray[np.uint64]  # the same between two matrices
Contexts = NDArray[np.uint32]  # p in the upper 22 bits, n in the lower 10

_RATES: Ints = np.array([int(65536 / (n + 1.6)) for n in range(MEMORY + 1)], np.int64)
_FULL = np.uint64((1 << 56) - 1)
_TOP = np.uint64(48)
_NARROW = np.uint64(1 << 32)
_NONE, _ONE, _BYTE, _SIXTEEN = (np.uint64(n) for n in (0, 1, 8, 16))
_AHEAD, _LAST = np.uint64(WINDOW), np.uint64(255)
_CERTAIN = (1 << 22) - 1


def new_contexts() -> Contexts:
    """Contexts in which both bits are equally likely and nothing was seen."""
    return np.full(CONTEXTS, np.uint32(1 << 31), np.uint32)


class RangeEncoder:
    """Collects bits; `finish` returns their bytes."""

    def __init__(self, capacity: int) -> None:
        self.data: Bytes = np.empty(capacity + 64, np.uint8)
        self.state: StateArray = np.array([0, _FULL, 0, 0], np.uint64)

    def integers(self, matrix: Integers, contexts: Contexts) -> None:
        """Append a matrix."""
        used, needed = int(self.state[3]), 5 * matrix.size + 64
        if self.data.size - used < needed:
            grown = np.empty(2 * self.data.size + needed, np.uint8)
            grown[:used] = self.data[:used]
            self.data = grown
        _code_integers(np.ascontiguousarray(matrix), contexts, self.state, self.data, True)

    def finish(self) -> bytes:
        """All bytes; after the last shift only as many as identify the interval."""
        low, high, used = int(self.state[0]), int(self.state[1]), int(self.state[3])
        tail = b""
        for count in range(WINDOW + 1):
            rest = (1 << (8 * (WINDOW - count))) - 1
            if high & ~rest >= low:
                tail = (high & ~rest).to_bytes(WINDOW, "big")[:count]
                break
        return self.data[:used].tobytes() + tail


class RangeDecoder:
    """Reads what a `RangeEncoder` wrote; bytes beyond the end are zeros."""

    def __init__(self, data: bytes) -> None:
        self.data: Bytes = np.frombuffer(data, np.uint8).copy()
        head = int.from_bytes(data[:WINDOW].ljust(WINDOW, b"\0"), "big")
        self.state: StateArray = np.array([0, _FULL, head, 0], np.uint64)

    def integers(self, rows: int, columns: int, contexts: Contexts) -> Integers:
        """Return the next matrix."""
        matrix = np.zeros((rows, columns), np.int32)
        _code_integers(matrix, contexts, self.state, self.data, False)
        if int(self.state[3]) > self.data.size:  # before anything is computed from it
            raise PayloadError(f"coded integers continue beyond their {self.data.size} bytes")
        return matrix

    def finish(self) -> None:
        """Check that every byte was needed and none is missing."""
        used = int(self.state[3])
        if not used <= self.data.size <= used + WINDOW:
            raise PayloadError(
                f"coded integers take {used} to {used + WINDOW} bytes, not {self.data.size}"
            )


@inlined
def _normalize(state: State, data: Bytes, writing: bool) -> State:
    """Shift out bytes on which both ends agree; keep the interval wide enough to divide."""
    low, high, code, at = state
    while (low ^ high) >> _TOP == _NONE or high - low < _NARROW:
        if (low ^ high) >> _TOP != _NONE:
            # The interval straddles a byte boundary: encoder and decoder give up its smaller side.
            boundary = (high >> _TOP) << _TOP
            if boundary - low > high - boundary:
                high = boundary - _ONE
            else:
                low = boundary
        if writing:
            data[at] = np.uint8(high >> _TOP)
        else:
            following = at + _AHEAD
            code = (code << _BYTE) & _FULL
            if following < np.uint64(data.size):
                code |= np.uint64(data[following])
        at += _ONE
        low = (low << _BYTE) & _FULL
        high = ((high << _BYTE) & _FULL) | _LAST
    return low, high, code, at


@inlined
def _code_bit(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    state: State, data: Bytes, contexts: Contexts, context: Whole, bit: Whole, writing: bool
) -> tuple[Whole, State]:
    """Code one bit and adapt its context."""
    low, high, code, at = state
    seen = np.int64(contexts[context])
    times, likely = seen & 1023, seen >> 10
    middle = low + ((high - low) >> _SIXTEEN) * np.uint64((likely >> 6) | 1)
    if not writing:
        bit = 1 if code <= middle else 0
    if bit:
        high = middle
        likely += ((_CERTAIN - likely) * _RATES[times]) >> 16
    else:
        low = middle + _ONE
        likely -= (likely * _RATES[times]) >> 16
    contexts[context] = np.uint32((likely << 10) | min(times + 1, MEMORY))
    return bit, _normalize((low, high, code, at), data, writing)


@inlined
def _code_plain(
    state: State, data: Bytes, bits: Whole, number: Whole, writing: bool
) -> tuple[Whole, State]:
    """Code `bits` bits at once, every number equally likely."""
    low, high, code, at = state
    share = (high - low) >> np.uint64(bits)
    last = (_ONE << np.uint64(bits)) - _ONE
    part = np.uint64(number)
    if not writing:
        part = min((code - low) // share, last)
    if part < last:  # the last one also takes the remainder of the division
        high = low + (part + _ONE) * share - _ONE
    low += part * share
    return np.int64(part), _normalize((low, high, code, at), data, writing)


@inlined
def _level(activity: Whole) -> Whole:
    """Activity on a scale of two steps per octave."""
    halvings = 0
    while activity >= 4:
        activity >>= 1
        halvings += 1
    return min(2 + 2 * halvings + (activity & 1), LEVELS - 1) if halvings else activity


@inlined
def _code_number(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    state: State, data: Bytes, contexts: Contexts, level: Whole, number: Whole, writing: bool
) -> tuple[Whole, Whole, State]:
    """Code one integer; returns magnitude, whether it is negative, and the state."""
    magnitude: Whole = -number if number < 0 else number
    negative: Whole = 1 if number < 0 else 0
    length = 0
    if writing:
        while magnitude >> length:
            length += 1
    first = level * (MAX_BITS + 1)
    # The search for the length starts at the likeliest one and goes up or down.
    bits: Whole = max((level >> 1) - 2, 0)
    wanted: Whole = 1 if length > bits else 0
    more, state = _code_bit(state, data, contexts, first + bits, wanted, writing)
    if more:
        bits += 1
        while bits < MAX_BITS and more:
            wanted = 1 if length > bits else 0
            more, state = _code_bit(state, data, contexts, first + bits, wanted, writing)
            bits += more
    else:
        while bits > 0 and not more:
            wanted = 1 if length >= bits else 0
            more, state = _code_bit(state, data, contexts, first + bits - 1, wanted, writing)
            bits -= 1 - more
    value: Whole = min(bits, 1)
    left = bits - 1
    # Below the leading one: two bits in context of the length, the others plain, then the sign.
    place = LEVELS * (MAX_BITS + 1) + 3 * (first + bits)
    for _ in range(min(left, 2)):
        left -= 1
        wanted = (magnitude >> left) & 1
        bit, state = _code_bit(state, data, contexts, place, wanted, writing)
        value = 2 * value + bit
        place += 1 + bit
    left = max(left, 0)
    if bits:
        wanted = ((magnitude & ((1 << left) - 1)) << 1) | negative
        rest, state = _code_plain(state, data, left + 1, wanted, writing)
        negative = rest & 1
        value = (value << left) | (rest >> 1)
    return value, negative, state


@compiled
def _code_integers(
    matrix: Integers, contexts: Contexts, held: StateArray, data: Bytes, writing: bool
) -> None:
    """Code all integers, row by row; activities are in sixteenths."""
    rows, columns = matrix.shape
    down = np.zeros(columns, np.int64)
    along: Whole = 0
    state = (held[0], held[1], held[2], held[3])
    for i in range(rows):
        before: Whole = 0
        earlier: Whole = 0
        for j in range(columns):
            level = _level((32 * before + 16 * earlier + 2 * along + 4 * down[j]) >> 4)
            number = np.int64(matrix[i, j])
            magnitude, negative, state = _code_number(state, data, contexts, level, number, writing)
            if not writing:
                matrix[i, j] = -magnitude if negative else magnitude
            earlier, before = before, magnitude
            along += ((magnitude << 4) - along) >> 4
            down[j] += ((magnitude << 4) - down[j]) >> 2
    held[0], held[1], held[2], held[3] = state
