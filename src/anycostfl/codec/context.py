"""Adaptive binary range coding in context: integers of a matrix cost what their surroundings say.

A bit with probability p of being 1 narrows an interval [low, high] of 56-bit integers to its lower
p or upper 1 − p; bytes on which both ends agree leave it. Every context has its own p, 22 bits wide
and learnt on the way with rate 1/(n + 1.6), n being how often it was seen, at most `MEMORY`.

An integer q is the bit length of |q| in unary, then the bits below the leading one, then its sign.
The context is the *activity*: a weighted mean of magnitudes already coded, left of q, above it, in
its row and in its column so far. The first bits below the leading one are in context too; deeper
ones and signs are as good as random and cost one bit each.

Integer arithmetic only, the same code for both directions: what one machine writes, every other
reads. A reader never looks beyond its bytes, and its work is bounded by the integers asked for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anycostfl.codec.compiled import compiled, inlined
from anycostfl.codec.kernels import Bytes, Ints
from anycostfl.errors import PayloadError

MAX_BITS = 30  # of a magnitude
MEMORY = 126  # how many bits back a probability remembers, roughly
LEVELS = 28  # of activity, two to the octave
WINDOW = 7  # bytes of the interval
LIKELIHOODS = LEVELS * (MAX_BITS + 1) + 3 * LEVELS * (MAX_BITS + 1)

State = NDArray[np.uint64]  # low, high, bytes read as a number, how many bytes were shifted
Likelihoods = NDArray[np.uint32]
Integers = NDArray[np.int32]

_RATES: Ints = np.array([int(65536 / (n + 1.6)) for n in range(MEMORY + 1)], np.int64)
_FULL = np.uint64((1 << 56) - 1)
_TOP = np.uint64(48)
_NARROW = np.uint64(1 << 32)
_ONE, _BYTE, _SIXTEEN = np.uint64(1), np.uint64(8), np.uint64(16)
_CERTAIN = (1 << 22) - 1


def likelihoods(count: int = LIKELIHOODS) -> Likelihoods:
    """Fresh contexts: both bits equally likely, nothing seen."""
    return np.full(count, np.uint32(1 << 31), np.uint32)


class Writer:
    """Collects bits; `finish` gives their bytes."""

    def __init__(self, capacity: int) -> None:
        self.data: Bytes = np.empty(capacity + 64, np.uint8)
        self.state: State = np.array([0, _FULL, 0, 0], np.uint64)

    def integers(self, matrix: Integers, contexts: Likelihoods, *, signed: bool = True) -> None:
        """Append a matrix; unsigned integers save the signs."""
        self._room(5 * matrix.size + 64)
        matrix = np.ascontiguousarray(matrix)
        _code_integers(matrix, contexts, self.state, self.data, signed, True)

    def _room(self, more: int) -> None:
        used = int(self.state[3])
        if self.data.size - used < more:
            grown = np.empty(2 * self.data.size + more, np.uint8)
            grown[:used] = self.data[:used]
            self.data = grown

    def finish(self) -> bytes:
        """All bytes: as few after the last shift as tell the interval from its neighbours."""
        low, high, used = int(self.state[0]), int(self.state[1]), int(self.state[3])
        tail = b""
        for count in range(WINDOW + 1):
            rest = (1 << (8 * (WINDOW - count))) - 1
            if high & ~rest >= low:
                tail = (high & ~rest).to_bytes(WINDOW, "big")[:count]
                break
        return self.data[:used].tobytes() + tail


class Source:
    """Reads back what a `Writer` wrote; beyond the end there are zeros, a few."""

    def __init__(self, data: bytes) -> None:
        self.data: Bytes = np.frombuffer(data, np.uint8).copy()
        head = int.from_bytes(data[:WINDOW].ljust(WINDOW, b"\0"), "big")
        self.state: State = np.array([0, _FULL, head, 0], np.uint64)

    def integers(
        self, rows: int, columns: int, contexts: Likelihoods, *, signed: bool = True
    ) -> Integers:
        """The next matrix."""
        matrix = np.zeros((rows, columns), np.int32)
        _code_integers(matrix, contexts, self.state, self.data, signed, False)
        return matrix

    def finish(self) -> None:
        """Every byte must have been needed, and none be missing."""
        shifted = int(self.state[3])
        if not shifted <= self.data.size <= shifted + WINDOW:
            raise PayloadError(
                f"the coded integers end after {shifted} to {shifted + WINDOW} bytes, "
                f"there are {self.data.size}"
            )


@compiled
def _settle(state: State, data: Bytes, low: np.uint64, high: np.uint64, writing: bool) -> None:
    """Shift out the bytes on which both ends agree; keep the interval wide enough to divide."""
    while True:
        if (low ^ high) >> _TOP != 0:
            if high - low >= _NARROW:
                break
            # Both ends hug a boundary: give up the smaller side, writer and reader alike.
            boundary = (high >> _TOP) << _TOP
            if boundary - low > high - boundary:
                high = boundary - _ONE
            else:
                low = boundary
        at = np.int64(state[3])
        if writing:
            data[at] = np.uint8(high >> _TOP)
        else:
            following = np.uint64(data[at + WINDOW]) if at + WINDOW < data.size else np.uint64(0)
            state[2] = ((state[2] << _BYTE) & _FULL) | following
        state[3] += _ONE
        low = (low << _BYTE) & _FULL
        high = ((high << _BYTE) & _FULL) | np.uint64(255)
    state[0], state[1] = low, high


@inlined
def _code_bit(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    state: State, data: Bytes, contexts: Likelihoods, context: int, bit: int, writing: bool
) -> int:
    """One bit in its context; returns it, and the context has learnt from it."""
    seen = np.int64(contexts[context])
    times, likely = seen & 1023, seen >> 10
    low, high = state[0], state[1]
    middle = low + ((high - low) >> _SIXTEEN) * np.uint64((likely >> 6) | 1)
    if not writing:
        bit = 1 if state[2] <= middle else 0
    if bit:
        high = middle
        likely += ((_CERTAIN - likely) * _RATES[times]) >> 16
    else:
        low = middle + _ONE
        likely -= (likely * _RATES[times]) >> 16
    contexts[context] = np.uint32((likely << 10) | min(times + 1, MEMORY))
    if (low ^ high) >> _TOP == 0 or high - low < _NARROW:
        _settle(state, data, low, high, writing)
    else:
        state[0], state[1] = low, high
    return bit


@inlined
def _code_plain(state: State, data: Bytes, bits: int, number: int, writing: bool) -> int:
    """So many bits at once, every number equally likely."""
    low, high = state[0], state[1]
    share = (high - low) >> np.uint64(bits)
    last = (_ONE << np.uint64(bits)) - _ONE
    part = np.uint64(number)
    if not writing:
        part = min((state[2] - low) // share, last)
    if part < last:  # the last one also takes what the division left over
        high = low + (part + _ONE) * share - _ONE
    low += part * share
    _settle(state, data, low, high, writing)
    return int(part)


@inlined
def _level(activity: int) -> int:
    """Activity on a scale of two steps to the octave."""
    if activity < 4:
        return activity
    halvings = 0
    while activity >= 4:
        activity >>= 1
        halvings += 1
    return min(2 + 2 * halvings + (activity & 1), LEVELS - 1)


@inlined
def _code_magnitude(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    state: State, data: Bytes, contexts: Likelihoods, level: int, magnitude: int, writing: bool
) -> int:
    length = 0
    if writing:
        while magnitude >> length:
            length += 1
    first, bits = level * (MAX_BITS + 1), 0
    while bits < MAX_BITS and _code_bit(
        state, data, contexts, first + bits, 1 if length > bits else 0, writing
    ):
        bits += 1
    if bits < 2:
        return bits
    # Below the leading one: two bits in context of the length, the others plain.
    within = LEVELS * (MAX_BITS + 1) + 3 * first
    left, value = bits - 2, 1
    bit = _code_bit(state, data, contexts, within + 3 * bits, (magnitude >> left) & 1, writing)
    value = 2 + bit
    if left:
        left -= 1
        place = within + 3 * bits + value - 1
        bit = _code_bit(state, data, contexts, place, (magnitude >> left) & 1, writing)
        value = 2 * value + bit
    if left:
        rest = _code_plain(state, data, left, magnitude & ((1 << left) - 1), writing)
        value = (value << left) | rest
    return value


@compiled
def _code_integers(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    matrix: Integers,
    contexts: Likelihoods,
    state: State,
    data: Bytes,
    signed: bool,
    writing: bool,
) -> None:
    """All integers, row by row; activities are in sixteenths."""
    rows, columns = matrix.shape
    down = np.zeros(columns, np.int64)
    along = 0
    for i in range(rows):
        before, earlier = 0, 0
        for j in range(columns):
            activity = (32 * before + 16 * earlier + 2 * along + 4 * down[j]) >> 4
            number = np.int64(matrix[i, j])
            magnitude = _code_magnitude(
                state, data, contexts, _level(activity), abs(number), writing
            )
            negative = 0
            if magnitude and signed:
                negative = _code_plain(state, data, 1, 1 if number < 0 else 0, writing)
            if not writing:
                matrix[i, j] = -magnitude if negative else magnitude
            earlier, before = before, magnitude
            along += ((magnitude << 4) - along) >> 4
            down[j] += ((magnitude << 4) - down[j]) >> 2
