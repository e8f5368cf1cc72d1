"""The context-adaptive range coder: exact, small, hard to hurt."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from anycostfl.codec import byte_budget
from anycostfl.codec.arrays import Integers
from anycostfl.codec.context import MAX_BITS, RangeDecoder, RangeEncoder, new_contexts
from anycostfl.errors import PayloadError
from mutations import PLAN, corrupt, survives, valid_payloads
from shannon import entropy_bytes


def coded(*matrices: Integers) -> bytes:
    encoder, contexts = RangeEncoder(0), new_contexts()
    for matrix in matrices:
        encoder.integers(matrix, contexts)
    return encoder.finish()


def laplacian(scale: float, rows: int = 60, columns: int = 500, seed: int = 0) -> Integers:
    drawn = np.random.default_rng(seed).laplace(0, scale, (rows, columns))
    return np.rint(drawn).clip(-(2**MAX_BITS) + 1, 2**MAX_BITS - 1).astype(np.int32)


@settings(max_examples=200)
@given(
    st.lists(
        arrays(
            np.int32,
            st.tuples(st.integers(0, 12), st.integers(0, 12)),
            elements=st.one_of(
                st.integers(-3, 3), st.integers(-(2**MAX_BITS) + 1, 2**MAX_BITS - 1)
            ),
        ),
        max_size=4,
    )
)
def test_any_matrices_come_back(matrices: list[Integers]) -> None:
    decoder, contexts = RangeDecoder(coded(*matrices)), new_contexts()
    for matrix in matrices:
        rows, columns = matrix.shape
        assert np.array_equal(decoder.integers(rows, columns, contexts), matrix)
    decoder.finish()


@pytest.mark.parametrize("scale", [0.15, 0.4, 2.0, 30.0, 3e4, 3e7])
def test_size_is_near_the_entropy_of_what_has_no_structure(scale: float) -> None:
    matrix = laplacian(scale, 100, 1000)
    decay = np.exp(-1 / scale)
    none = -np.expm1(-0.5 / scale)
    some = 1 - none
    bits = -none * np.log2(none) + some * (1 - np.log2(some))
    bits -= some * (np.log2(1 - decay) + decay / (1 - decay) * np.log2(decay))
    assert len(coded(matrix)) * 8 <= 1.05 * bits * matrix.size


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_or_columns_of_unequal_size_cost_less_than_their_histogram(axis: int) -> None:
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(0, 1.5, (80, 1) if axis else (1, 600)))
    matrix = np.rint(rng.laplace(0, 1, (80, 600)) * sizes).astype(np.int32)
    histogram = np.unique(matrix, return_counts=True)[1]
    assert len(coded(matrix)) < 0.95 * entropy_bytes(histogram)


def test_all_zeros_cost_next_to_nothing() -> None:
    assert len(coded(np.zeros((400, 400), np.int32))) < 260


@settings(max_examples=200)
@given(st.binary(max_size=80), st.integers(1, 30), st.integers(1, 30))
def test_any_bytes_give_integers_in_range_or_end_too_soon(
    data: bytes, rows: int, columns: int
) -> None:
    decoder = RangeDecoder(data)
    try:
        matrix = decoder.integers(rows, columns, new_contexts())
    except PayloadError:
        assert len(data) < int(decoder.state[3]) <= 5 * rows * columns + 8
    else:
        assert (np.abs(matrix.astype(np.int64)) < 2**MAX_BITS).all()
        assert int(decoder.state[3]) <= len(data)


def test_bytes_that_are_missing_or_too_many_are_noticed() -> None:
    data = coded(laplacian(5.0))
    with pytest.raises(PayloadError, match="coded integers continue"):
        RangeDecoder(data[:-9]).integers(60, 500, new_contexts())
    longer = RangeDecoder(data + bytes(9))
    longer.integers(60, 500, new_contexts())
    with pytest.raises(PayloadError, match="coded integers take"):
        longer.finish()


def test_interval_that_hugs_a_boundary_is_coded_right() -> None:
    """Half-and-half bits keep the middle of the interval near a byte boundary for long."""
    matrix = np.tile(np.array([[0, 1]], np.int32), (2000, 4))
    rng = np.random.default_rng(3)
    noisy = np.where(rng.random(matrix.shape) < 0.5, matrix, 1 - matrix).astype(np.int32)
    decoder = RangeDecoder(coded(noisy))
    assert np.array_equal(decoder.integers(2000, 8, new_contexts()), noisy)


def test_corrupted_low_rank_payloads_decode_in_range_or_are_refused() -> None:
    payloads, draw = valid_payloads("lowrank"), random.Random(1)
    assert all(survives(payload) for payload in payloads)
    outcome = [survives(corrupt(draw.choice(payloads), draw)[1]) for _ in range(2500)]
    assert not all(outcome)
    assert any(outcome)
    assert byte_budget(1.0, sum(map(int, map(np.prod, PLAN.values())))) >= max(map(len, payloads))
