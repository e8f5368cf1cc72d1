"""Lossless coding of masks and levels (Sec. III-C.3), in integer arithmetic only.

Masks: Golomb code of the gaps between kept (or dropped) kernels, with parameter M: the quotient
gap // M in unary, the remainder in truncated binary; or the bitmap, whichever is smaller.
Levels: the range variant of asymmetric numeral systems (rANS). With frequencies f that sum to 2^P
and cumulative frequencies c, a symbol moves the state x ∈ [2^31, 2^63) to
(x // f) 2^P + x mod f + c; 32-bit words are shifted out before the state would leave its range.
The table of frequencies is sent at the precision P that makes table and levels smallest together.
Symbols ≥ 4096, which only the finest grids have, share a token with their neighbours: the token is
their leading nine bits, the others are sent verbatim as spare bits.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from anycostfl.codec.arrays import Bools, Bytes, Ints, Symbols, Whole
from anycostfl.codec.frame import Reader, varint
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MIN_PRECISION, MAX_PRECISION = 6, 16
STATE_BYTES = 8
DIRECT = 12  # symbols below 2^12 are their own token
MANTISSA = 8  # larger ones: a token is the exponent and this many bits after the leading one
Words = NDArray[np.uint32]
Wide = NDArray[np.uint64]
Tokens = NDArray[np.uint16]


class MaskCoding(IntEnum):
    """How the mask of one tensor is coded."""

    ALL = 0
    BITMAP = 1
    GOLOMB_KEPT = 2
    GOLOMB_DROPPED = 3


def encode_mask(kept: Bools) -> bytes:
    """Encode a mask over kernels in the smallest coding, which is its first byte."""
    if kept.all():
        return bytes([MaskCoding.ALL])
    # Gaps between the rarer kind are longer, which suits Golomb's code.
    rare_kept = 2 * np.count_nonzero(kept) <= kept.size
    gaps = gaps_between(kept if rare_kept else ~kept)
    parameter = best_parameter(gaps)
    if golomb_bits(gaps, parameter) + 8 * len(varint(parameter)) < kept.size:
        coding = MaskCoding.GOLOMB_KEPT if rare_kept else MaskCoding.GOLOMB_DROPPED
        return bytes([coding]) + golomb(gaps, parameter)
    return bytes([MaskCoding.BITMAP]) + np.packbits(kept, bitorder="little").tobytes()


def decode_mask(data: bytes, kernels: int, kept: int) -> Bools:
    """Decode the mask of `kernels` kernels of which `kept` are set."""
    reader = Reader(data, "mask")
    coding = reader.byte()
    if coding == MaskCoding.ALL:
        reader.finish()
        if kept != kernels:
            raise PayloadError(f"mask keeps all {kernels} kernels, the tensor section {kept}")
        return np.ones(kernels, np.bool_)
    if coding == MaskCoding.BITMAP:
        return _from_bitmap(reader.rest(), kernels, kept)
    if coding == MaskCoding.GOLOMB_KEPT:
        return _from_gaps(reader, kernels, kept)
    if coding == MaskCoding.GOLOMB_DROPPED:
        return ~_from_gaps(reader, kernels, kernels - kept)
    raise PayloadError(f"mask coding is {coding}; it must be in [0, 3]")


def _from_bitmap(data: bytes, kernels: int, kept: int) -> Bools:
    if len(data) != -(-kernels // 8):
        raise PayloadError(f"bitmap of {kernels} kernels has {len(data)} bytes")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[kernels:].any() or np.count_nonzero(bits) != kept:
        raise PayloadError(f"bitmap does not have {kept} of {kernels} bits set")
    return bits[:kernels].astype(np.bool_)


def gaps_between(chosen: Bools) -> Ints:
    """Number of kernels skipped before each chosen one."""
    return np.diff(np.flatnonzero(chosen), prepend=-1) - 1


def golomb_bits(gaps: Ints, parameter: int) -> int:
    """Exact length of the Golomb code of `gaps`."""
    quotient, remainder = np.divmod(gaps, parameter)
    width, cutoff = _remainder_code(parameter)
    return int(quotient.sum() + gaps.size * (1 + width) - np.count_nonzero(remainder < cutoff))


def best_parameter(gaps: Ints) -> int:
    """A Golomb parameter close to the best one."""
    # Geometric gaps of mean g have theirs near g ln 2; bursts prefer a larger one.
    guess = 0.693 * float(gaps.mean())
    candidates = {max(1, round(guess * factor)) for factor in (0.75, 1, 1.35, 1.8)}
    return min(candidates, key=lambda parameter: golomb_bits(gaps, parameter))


def golomb(gaps: Ints, parameter: int) -> bytes:
    """Encode `gaps`: the parameter as a varint, then the bits, first bit lowest."""
    out = np.zeros(-(-golomb_bits(gaps, parameter) // 8), np.uint8)
    width, cutoff = _remainder_code(parameter)
    _golomb_write(gaps, parameter, width, cutoff, out)
    return varint(parameter) + out.tobytes()


def _remainder_code(parameter: int) -> tuple[int, int]:
    # Truncated binary: remainders below `cutoff` take width − 1 bits, the others `width`.
    width = (parameter - 1).bit_length()
    return width, (1 << width) - parameter


@compiled
def _bit(data: Bytes, at: int) -> np.int64:
    return (np.int64(data[at >> 3]) >> (at & 7)) & 1


@compiled
def _golomb_write(gaps: Ints, parameter: int, width: int, cutoff: int, out: Bytes) -> None:
    at = 0
    for gap in gaps:
        at += gap // parameter  # the buffer is zero, so only the closing 1 of a unary number is set
        out[at >> 3] |= np.uint8(1 << (at & 7))
        at += 1
        rest, bits = gap % parameter, width - 1
        if rest >= cutoff:
            rest, bits = rest + cutoff, width
        for b in range(bits - 1, -1, -1):
            if (rest >> b) & 1:
                out[at >> 3] |= np.uint8(1 << (at & 7))
            at += 1


def _from_gaps(reader: Reader, kernels: int, chosen: int) -> Bools:
    parameter = reader.varint(1, max(1, 2 * kernels))
    mask = np.zeros(kernels, np.bool_)
    width, cutoff = _remainder_code(parameter)
    data = np.frombuffer(reader.rest(), np.uint8)
    if _golomb_read(data, parameter, width, cutoff, chosen, mask) < 0:
        raise PayloadError(f"Golomb code is not one of {chosen} of {kernels} kernels")
    return mask


@compiled
def _golomb_read(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    data: Bytes, parameter: int, width: int, cutoff: int, chosen: int, mask: Bools
) -> int:
    at, end = 0, data.size * 8
    place: Whole = -1
    for _ in range(chosen):
        quotient = 0
        while at < end and not _bit(data, at):
            quotient += 1
            at += 1
        at += 1
        bits = max(0, width - 1)
        rest: Whole = 0
        if at + bits > end:
            return -1
        for _ in range(bits):
            rest = 2 * rest + _bit(data, at)
            at += 1
        if width > 0 and rest >= cutoff:
            if at >= end:
                return -1
            rest = 2 * rest + _bit(data, at) - cutoff
            at += 1
        place += quotient * parameter + rest + 1
        if place >= mask.size:
            return -1
        mask[place] = True
    if end - at >= 8:
        return -1
    while at < end:  # the last byte is padded with zeros
        if _bit(data, at):
            return -1
        at += 1
    return 1


def frequencies(counts: Ints, precision: int) -> Ints:
    """Scale counts to sum to 2^precision, at least 1 wherever a symbol occurs."""
    total = 1 << precision
    scaled = np.rint(counts * (total / counts.sum())).astype(np.int64)
    freq = np.where(counts > 0, np.maximum(scaled, 1), 0)
    while (excess := int(freq.sum()) - total) > 0:
        top = int(freq.argmax())
        freq[top] -= min(excess, max(1, int(freq[top]) // 4))
    freq[freq.argmax()] -= excess
    return freq


def best_table(counts: Ints) -> tuple[int, Ints]:
    """Precision and frequencies that minimise table and levels together."""
    occurring = np.flatnonzero(counts)
    least = max(MIN_PRECISION, (occurring.size - 1).bit_length())
    tables = [(p, frequencies(counts, p)) for p in range(least, MAX_PRECISION + 1)]
    used = counts[occurring]

    def bits(table: tuple[int, Ints]) -> float:
        precision, freq = table
        levels = float((used * (precision - np.log2(freq[occurring]))).sum())
        return levels + 8 * _varint_lengths(freq[occurring])

    return min(tables, key=bits)


def _varint_lengths(numbers: Ints) -> int:
    return int(numbers.size + (numbers >= 1 << 7).sum() + (numbers >= 1 << 14).sum())


def encode_table(precision: int, freq: Ints) -> bytes:
    """Precision, then frequencies as varints; a 0 is followed by the number of further 0s."""
    out = bytearray([precision])
    values = freq.tolist()
    at = 0
    while at < len(values):
        out += varint(values[at])
        if values[at] == 0:
            end = at
            while end + 1 < len(values) and values[end + 1] == 0:
                end += 1
            out += varint(end - at)
            at = end
        at += 1
    return bytes(out)


def decode_table(data: bytes, tokens: int) -> tuple[int, Ints]:
    """Decode exactly `tokens` frequencies that sum to 2^precision."""
    reader = Reader(data, "table")
    precision = reader.byte()
    if not MIN_PRECISION <= precision <= MAX_PRECISION:
        raise PayloadError(f"table precision is {precision}; it must be in [6, 16]")
    freq = np.zeros(tokens, np.int64)
    at = 0
    while at < tokens:
        freq[at] = reader.varint(0, 1 << precision)
        at += 1 if freq[at] else 1 + reader.varint(0, tokens - at - 1)
    reader.finish()
    if freq.sum() != 1 << precision:
        raise PayloadError(f"table sums to {freq.sum()}, expected {1 << precision}")
    return precision, freq


def token_count(symbols: int) -> int:
    """Number of tokens for `symbols` symbols."""
    return int(_token(symbols - 1)) + 1


@compiled
def _token(symbol: Whole) -> Whole:
    if symbol < 1 << DIRECT:
        return symbol
    spare = _spare_bits(symbol)
    exponent, leading = spare + MANTISSA - DIRECT, symbol >> spare
    return (1 << DIRECT) + (exponent << MANTISSA) + leading - (1 << MANTISSA)


@compiled
def _spare_bits(symbol: Whole) -> int:
    spare = 0
    while symbol >> spare >= 2 << MANTISSA:
        spare += 1
    return spare


def tokenize(symbols: Symbols) -> tuple[Tokens, bytes]:
    """Tokens, and the spare bits of the large symbols, first bit lowest."""
    if not symbols.size or symbols.max() < 1 << DIRECT:
        return symbols.astype(np.uint16), b""
    tokens = np.empty(symbols.size, np.uint16)
    out = np.zeros(2 * symbols.size + 8, np.uint8)  # at most 16 spare bits each
    used = _tokenize(symbols, tokens, out)
    return tokens, out[: -(-used // 8)].tobytes()


@compiled
def _tokenize(symbols: Symbols, tokens: Tokens, out: Bytes) -> int:
    at = 0
    for i in range(symbols.size):
        symbol = np.int64(symbols[i])
        tokens[i] = _token(symbol)
        if symbol >= 1 << DIRECT:
            for b in range(_spare_bits(symbol)):
                out[at >> 3] |= np.uint8(((symbol >> b) & 1) << (at & 7))
                at += 1
    return at


def detokenize(tokens: Tokens, spare: bytes, symbols: int) -> Symbols:
    """Invert `tokenize`; every symbol must be below `symbols`, and every spare bit used."""
    out = tokens.astype(np.uint32)
    if spare or (tokens.size and tokens.max() >= 1 << DIRECT):
        used = _detokenize(tokens, np.frombuffer(spare, np.uint8), symbols, out)
        if used < 0 or len(spare) != -(-used // 8):
            raise PayloadError(f"spare bits do not match levels below {symbols}")
        if used % 8 and spare[-1] >> (used % 8):
            raise PayloadError("the spare bits are not padded with zeros")
    return out


@compiled
def _detokenize(tokens: Tokens, spare: Bytes, symbols: int, out: Symbols) -> int:
    at, end = 0, spare.size * 8
    for i in range(tokens.size):
        beyond = np.int64(tokens[i]) - (1 << DIRECT)
        if beyond < 0:
            continue
        bits = (beyond >> MANTISSA) + DIRECT - MANTISSA
        symbol = ((1 << MANTISSA) + (beyond & ((1 << MANTISSA) - 1))) << bits
        if at + bits > end:
            return -1
        for b in range(bits):
            symbol |= _bit(spare, at) << b
            at += 1
        if symbol >= symbols:
            return -1
        out[i] = symbol
    return at


def encode_levels(tokens: Tokens, precision: int, freq: Ints) -> bytes:
    """Encode `tokens`: final state (8 bytes), then 32-bit words, little-endian."""
    words = np.empty(tokens.size // 2 + 2, np.uint32)
    state, used = _rans_write(tokens, np.uint64(precision), *_wide(freq), words)
    return int(state).to_bytes(STATE_BYTES, "little") + words[:used][::-1].astype("<u4").tobytes()


def _wide(freq: Ints) -> tuple[Wide, Wide]:
    """Frequencies and cumulative frequencies in the type of the state."""
    return freq.astype(np.uint64), (np.cumsum(freq) - freq).astype(np.uint64)


@compiled
def _rans_write(
    tokens: Tokens, precision: np.uint64, freq: Wide, cumulative: Wide, words: Words
) -> tuple[np.uint64, int]:
    state, used = np.uint64(1 << 31), 0
    shift, half = np.uint64(63) - precision, np.uint64(32)
    for i in range(tokens.size - 1, -1, -1):
        f = freq[tokens[i]]
        # f = 2^P (a single token) would shift out of 64 bits; it never overflows the state.
        if (state >> shift) >= f:
            words[used] = np.uint32(state & np.uint64(0xFFFFFFFF))
            used += 1
            state >>= half
        quotient = state // f
        state = (quotient << precision) + (state - quotient * f) + cumulative[tokens[i]]
    return state, used


def decode_levels(data: bytes, precision: int, freq: Ints, count: int) -> Tokens:
    """Decode exactly `count` tokens; every byte must be used, the last state be the initial one."""
    if len(data) < STATE_BYTES or (len(data) - STATE_BYTES) % 4:
        raise PayloadError(f"levels have {len(data)} bytes, expected 8 plus a multiple of 4")
    state = np.uint64(int.from_bytes(data[:STATE_BYTES], "little"))
    words = np.frombuffer(data, "<u4", offset=STATE_BYTES).astype(np.uint32)
    tokens = np.empty(count, np.uint16)
    slots = np.repeat(np.arange(freq.size, dtype=np.uint16), freq)
    if not _rans_read(state, words, np.uint64(precision), *_wide(freq), slots, tokens):
        raise PayloadError(f"levels do not decode to {count} tokens")
    return tokens


@compiled
def _rans_read(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    state: np.uint64, words: Words, precision: np.uint64, freq: Wide, cumulative: Wide,
    slots: Tokens, tokens: Tokens,
) -> bool:  # fmt: skip
    low, half, at = np.uint64(1 << 31), np.uint64(32), 0
    window = (np.uint64(1) << precision) - np.uint64(1)
    if state < low or state >> np.uint64(63):
        return False
    for i in range(tokens.size):
        slot = state & window
        token = slots[slot]
        tokens[i] = token
        state = freq[token] * (state >> precision) + slot - cumulative[token]
        if state < low:
            if at >= words.size:
                return False
            state = (state << half) | np.uint64(words[at])
            at += 1
    return at == words.size and state == low
