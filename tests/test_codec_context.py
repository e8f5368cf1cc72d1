"""The range coder in context and the kernel codec that uses it: exact, small, hard to hurt."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from anycostfl.codec import byte_budget, compress, decompress, kernelplus
from anycostfl.codec.arrays import Integers
from anycostfl.codec.context import MAX_BITS, Source, Writer, likelihoods
from anycostfl.codec.frame import OVERHEAD, bond, seal
from anycostfl.errors import PayloadError, UnknownNameError
from mutations import PLAN, spoil, survives, valid_payloads
from shannon import entropy_bytes

SHAPES = {"conv.weight": (16, 8, 3, 3), "conv.bias": (16,), "fc.weight": (40, 200), "scale": ()}


def coded(*matrices: Integers, signed: bool = True) -> bytes:
    writer, contexts = Writer(0), likelihoods()
    for matrix in matrices:
        writer.integers(matrix, contexts, signed=signed)
    return writer.finish()


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
    source, contexts = Source(coded(*matrices)), likelihoods()
    for matrix in matrices:
        rows, columns = matrix.shape
        assert np.array_equal(source.integers(rows, columns, contexts), matrix)
    source.finish()


@settings(max_examples=50)
@given(arrays(np.int32, (7, 9), elements=st.integers(0, 9)))
def test_unsigned_integers_come_back(matrix: Integers) -> None:
    source = Source(coded(matrix, signed=False))
    assert np.array_equal(source.integers(7, 9, likelihoods(), signed=False), matrix)
    source.finish()


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
    source = Source(data)
    try:
        matrix = source.integers(rows, columns, likelihoods())
    except PayloadError:
        assert len(data) < int(source.state[3]) <= 5 * rows * columns + 8
    else:
        assert (np.abs(matrix.astype(np.int64)) < 2**MAX_BITS).all()
        assert int(source.state[3]) <= len(data)


def test_bytes_that_are_missing_or_too_many_are_noticed() -> None:
    data = coded(laplacian(5.0))
    with pytest.raises(PayloadError, match="coded integers go on"):
        Source(data[:-9]).integers(60, 500, likelihoods())
    longer = Source(data + bytes(9))
    longer.integers(60, 500, likelihoods())
    with pytest.raises(PayloadError, match="coded integers end"):
        longer.finish()


def test_interval_that_hugs_a_boundary_is_coded_right() -> None:
    """Half-and-half bits keep the middle of the interval near a byte boundary for long."""
    matrix = np.tile(np.array([[0, 1]], np.int32), (2000, 4))
    rng = np.random.default_rng(3)
    noisy = np.where(rng.random(matrix.shape) < 0.5, matrix, 1 - matrix).astype(np.int32)
    source = Source(coded(noisy))
    assert np.array_equal(source.integers(2000, 8, likelihoods()), noisy)


def sample(seed: int = 0, scale: float = 1e-3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=draw).pow(3) * scale for n, s in SHAPES.items()}


def error(update: dict[str, Tensor], decoded: dict[str, Tensor]) -> float:
    lost = sum(float((u - decoded[n]).double().square().sum()) for n, u in update.items())
    return lost / sum(float(u.double().square().sum()) for u in update.values())


@settings(max_examples=25)
@given(st.floats(0.004, 1.0), st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1e20]))
def test_kernel_plus_never_exceeds_its_budget(beta: float, seed: int, scale: float) -> None:
    update = sample(seed, scale)
    payload = compress(update, beta, seed=seed, codec="kernel+")
    assert len(payload) <= beta * 4 * sum(t.numel() for t in update.values())
    assert decompress(payload, SHAPES).values["fc.weight"].isfinite().all()


def test_kernel_plus_is_unbiased_and_masks_whole_kernels() -> None:
    update = {"w": torch.randn(20, 70, generator=torch.Generator().manual_seed(1))}
    payloads = [compress(update, 0.2, seed=s, codec="kernel+") for s in range(200)]
    decoded = [decompress(payload, update) for payload in payloads]
    always = torch.stack([d.masks["w"] for d in decoded]).all(0)
    values = torch.stack([d.values["w"] for d in decoded]).double()
    assert 0.3 < always.float().mean() < 1
    # What lies next to a point is hardly ever drawn elsewhere: its spread is not seen in 200 draws.
    spread = values.std(0)[always].clamp_min(1e-2) / 200**0.5
    assert ((values.mean(0) - update["w"]).abs()[always] <= 6 * spread).all()
    one = decoded[0].masks["w"]
    for part in (one[:, :32], one[:, 32:64], one[:, 64:]):  # the last of a row is shorter
        assert (part.all(1) == part.any(1)).all()


def test_kernel_plus_has_less_error_than_kernel_where_there_is_structure() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(200, 1, generator=draw), torch.randn(1, 320, generator=draw)
    update = {"w": torch.randn(200, 320, generator=draw) * (rows + columns).exp()}
    errors = {
        codec: error(update, decompress(compress(update, 0.05, seed=0, codec=codec), update).values)
        for codec in ("kernel", "kernel+")
    }
    assert errors["kernel+"] < 0.97 * errors["kernel"]


def test_kernel_plus_of_zeros_is_empty_and_unknown_codecs_are_named() -> None:
    update = {n: torch.zeros(s) for n, s in SHAPES.items()}
    payload = compress(update, 0.1, seed=0, codec="kernel+")
    assert len(payload) == OVERHEAD
    assert not decompress(payload, SHAPES).masks["fc.weight"].any()
    with pytest.raises(
        UnknownNameError, match=r"no codec 'zip'; there are kernel, kernel\+, lowrank"
    ):
        compress(update, 0.1, seed=0, codec="zip")


GRID = b"\0\0\0\0\0\0\x80\x3f\x04"  # u_min = 0, u_max = 1, L = 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GRID[:4], "ends early"),
        (GRID[:6] + b"\x80\x7f\x04\0", "not finite"),
        (GRID + b"\x21", "outside 0 to 20"),
        (GRID + b"\x05\xff\xff", "kept flags"),  # the first bit of every flag is 0
        (GRID + b"\0" + bytes(8), "coded integers end"),
    ],
)
def test_malformed_kernel_plus_bodies_are_refused(body: bytes, message: str) -> None:
    shapes = {"w": (3, 20)}
    with pytest.raises(PayloadError, match=message):
        decompress(seal(kernelplus.MAGIC, body, bond(b"", shapes)), shapes)


@pytest.mark.parametrize("codec", ["kernel+", "lowrank"])
def test_spoilt_payloads_decode_in_range_or_are_refused(codec: str) -> None:
    payloads, draw = valid_payloads(codec), random.Random(1)
    assert all(survives(payload) for payload in payloads)
    outcome = [survives(spoil(draw.choice(payloads), draw)[1]) for _ in range(2500)]
    assert not all(outcome)
    assert any(outcome)
    assert byte_budget(1.0, sum(map(int, map(np.prod, PLAN.values())))) >= max(map(len, payloads))
