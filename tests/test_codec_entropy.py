"""Golomb masks, frequency tables, rANS levels: lossless, small, and safe to read."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anycostfl.codec import entropy
from anycostfl.codec.arrays import Bools
from anycostfl.codec.entropy import MaskCoding
from anycostfl.codec.frame import Reader, varint
from anycostfl.errors import PayloadError
from shannon import entropy_bytes

compiles = settings(deadline=None)  # the first call compiles


def random_mask(size: int, density: float) -> Bools:
    mask = np.random.default_rng(0).random(size) < density
    mask[size // 2] = True
    return mask


@compiles
@given(st.lists(st.booleans(), min_size=1, max_size=200).filter(any))
def test_masks_come_back(bits: list[bool]) -> None:
    mask = np.array(bits)
    data = entropy.encode_mask(mask)
    again = entropy.decode_mask(data, mask.size, int(mask.sum()))
    assert np.array_equal(again, mask)


@pytest.mark.parametrize(
    ("density", "coding"),
    [
        (0.01, MaskCoding.GOLOMB_KEPT),
        (0.2, MaskCoding.GOLOMB_KEPT),
        (0.5, MaskCoding.BITMAP),
        (0.97, MaskCoding.GOLOMB_DROPPED),
        (1.0, MaskCoding.ALL),
    ],
)
def test_mask_takes_the_smallest_coding_near_its_entropy(density: float, coding: int) -> None:
    mask = random_mask(20_000, density)
    data = entropy.encode_mask(mask)
    assert data[0] == coding
    counts = np.array([mask.sum(), (~mask).sum()])
    assert len(data) <= 1.05 * entropy_bytes(counts) + 4
    assert np.array_equal(entropy.decode_mask(data, mask.size, int(mask.sum())), mask)


def test_golomb_code_by_hand() -> None:
    # M = 3: remainders 0, 1, 2 are 0, 10, 11. Gaps 0, 4, 2 are 1·0, 01·10, 1·11.
    bits = "1 0 01 10 1 11".replace(" ", "")
    expected = int(bits[:8][::-1], 2).to_bytes(1, "little") + int(bits[8:][::-1], 2).to_bytes(1)
    assert entropy.golomb(np.array([0, 4, 2]), 3) == b"\x03" + expected
    assert entropy.golomb_bits(np.array([0, 4, 2]), 3) == len(bits)


@compiles
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 40))
def test_golomb_length_is_known_beforehand(gaps: list[int], parameter: int) -> None:
    data = entropy.golomb(np.array(gaps), parameter)
    bits = entropy.golomb_bits(np.array(gaps), parameter)
    assert len(data) == len(varint(parameter)) + math.ceil(bits / 8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends early"),
        (b"\x09", "mask coding is 9"),
        (b"\x00", "all 16 kernels"),
        (b"\x01\xff", "has 1 bytes"),
        (b"\x01\xff\xff", "3 of 16 bits"),
        (b"\x02\x00", "outside"),
        (b"\x02\x03", "Golomb"),
        (b"\x02\x03\x00\x00\x00\x00", "Golomb"),  # unary without an end
        (b"\x02\x01\x07\x00", "Golomb"),  # a byte too many
        (b"\x02\x01\x0f", "Golomb"),  # filling bits that are not zero
        (b"\x02\x01\x07" + bytes(9), "Golomb"),
    ],
)
def test_malformed_masks_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        entropy.decode_mask(data, 16, 3)


SKEWED = st.lists(st.integers(0, 400).map(lambda n: n * n // 400), min_size=1, max_size=500)


@compiles
@given(SKEWED, st.integers(0, 300))
def test_levels_come_back(numbers: list[int], unused: int) -> None:
    tokens = np.array(numbers, np.uint16)
    counts = np.bincount(tokens, minlength=int(tokens.max()) + 1 + unused)
    precision, freq = entropy.best_table(counts)
    table = entropy.encode_table(precision, freq)
    data = entropy.encode_levels(tokens, precision, freq)
    read_precision, read_freq = entropy.decode_table(table, counts.size)
    assert (read_precision, read_freq.tolist()) == (precision, freq.tolist())
    assert np.array_equal(
        entropy.decode_levels(data, read_precision, read_freq, tokens.size), tokens
    )


@compiles
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=300).filter(any))
def test_frequencies_sum_to_a_power_of_two_and_spare_every_symbol(numbers: list[int]) -> None:
    counts = np.array(numbers)
    freq = entropy.frequencies(counts, 10)
    assert freq.sum() == 1024
    assert ((freq > 0) == (counts > 0)).all()


def geometric(count: int, mean: float) -> entropy.Tokens:
    drawn = np.random.default_rng(1).geometric(1 / mean, count) - 1
    return np.minimum(drawn, 4000).astype(np.uint16)


@pytest.mark.parametrize("mean", [1.05, 2, 10, 300])
@pytest.mark.parametrize("count", [10, 1000, 200_000])
def test_levels_are_within_one_per_cent_of_their_entropy(count: int, mean: float) -> None:
    tokens = geometric(count, mean)
    counts = np.bincount(tokens)
    data = entropy.encode_levels(tokens, *entropy.best_table(counts))
    assert len(data) <= 1.01 * entropy_bytes(counts) + 64


@pytest.mark.parametrize("mean", [2, 10, 300])
def test_levels_are_within_one_per_cent_of_an_independent_coder(mean: float) -> None:
    constriction = pytest.importorskip("constriction", reason="no wheel for this machine")
    tokens = geometric(100_000, mean)
    counts = np.bincount(tokens)
    share = (counts / counts.sum()).astype(np.float32)
    model = constriction.stream.model.Categorical(share, perfect=False)
    oracle = constriction.stream.stack.AnsCoder()
    oracle.encode_reverse(tokens.astype(np.int32), model)
    ours = len(entropy.encode_levels(tokens, *entropy.best_table(counts)))
    assert abs(ours - 4 * oracle.num_words()) <= 0.01 * 4 * oracle.num_words() + 64


def test_levels_do_not_decode_from_anything_but_themselves() -> None:
    tokens = geometric(300, 4)
    precision, freq = entropy.best_table(np.bincount(tokens))
    data = entropy.encode_levels(tokens, precision, freq)
    for spoilt in (data[:-4], data + bytes(4), bytes(8) + data[8:], data[:7], data[:-1]):
        with pytest.raises(PayloadError, match="levels"):
            entropy.decode_levels(spoilt, precision, freq, tokens.size)
    with pytest.raises(PayloadError, match="to 301 "):
        entropy.decode_levels(data, precision, freq, tokens.size + 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x05\x20", "precision is 5"),
        (b"\x06\x3f\x00\x00", "sums to 63"),
        (b"\x06\x41", "outside 0 to 64"),
        (b"\x06\x40\x00\x05", "outside 0 to 0"),  # a run of zeros past the end
        (b"\x06\x40", "ends early"),
        (b"\x06\x40\x00\x00\x00", "unexpected bytes"),
        (b"\x06\xc0\x00\x00", "shortest form"),
    ],
)
def test_malformed_tables_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        entropy.decode_table(data, 2)


@compiles
@given(st.lists(st.integers(0, 2**24 - 1), max_size=40))
def test_symbols_of_any_size_become_few_tokens_and_come_back(numbers: list[int]) -> None:
    symbols = np.array(numbers, np.uint32)
    tokens, spare = entropy.tokenize(symbols)
    assert entropy.token_count(2**24) <= 65_536
    assert all(t < entropy.token_count(2**24) for t in tokens.tolist())
    assert np.array_equal(entropy.detokenize(tokens, spare, 2**24), symbols)


def test_tokens_keep_order_and_leave_no_gap() -> None:
    symbols = np.arange(3000, 20_000, dtype=np.uint32)
    tokens = entropy.tokenize(symbols)[0].astype(np.int64)
    assert set(np.diff(tokens).tolist()) == {0, 1}


def test_spare_bits_must_be_exact() -> None:
    tokens, spare = entropy.tokenize(np.array([9000, 17], np.uint32))
    with pytest.raises(PayloadError, match="spare"):
        entropy.detokenize(tokens, spare, 9000)  # a level above L
    for wrong in (b"", spare + b"\0", bytes([spare[0] | 0x80])):
        with pytest.raises(PayloadError, match="spare"):
            entropy.detokenize(tokens, wrong, 2**24)


@compiles
@given(st.integers(0, 2**62))
def test_varints_come_back(number: int) -> None:
    reader = Reader(varint(number), "test")
    assert reader.varint(0, 2**62) == number
    reader.finish()


def test_endless_varint_is_refused() -> None:
    with pytest.raises(PayloadError, match="more than 9 bytes"):
        Reader(b"\xff" * 20, "test").varint(0, 2**62)
