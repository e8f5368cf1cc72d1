"""Cutting into kernels, keeping the largest, quantizing without bias."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.codec import flatten, kernel, sections
from anycostfl.codec.arrays import Floats
from anycostfl.codec.kernel import Norms, Spans
from anycostfl.codec.sections import Grid, Part
from anycostfl.errors import UpdateError

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((64, 32, 5, 5), 25),  # a convolution kernel
        ((64, 32, 3), 3),  # one-dimensional convolution
        ((512, 3136), 32),  # fully connected, nothing known
        ((10, 20), 20),  # rows shorter than 32
        ((128, 64, 1, 1), 32),  # a 1×1 convolution is a fully connected layer
        ((512,), 32),
        ((), 1),
        ((0, 4), 4),
    ],
)
def test_default_kernel_length(shape: tuple[int, ...], block: int) -> None:
    assert sections.default_block(shape) == block


@given(shape=SHAPES, block=st.integers(1, 9))
def test_kernels_tile_the_tensor_and_never_cross_a_row(shape: tuple[int, ...], block: int) -> None:
    width = max(1, sections.row_width(shape))
    part = Part("w", shape, offset=5, block=min(block, width))
    spans = kernel.spans_of([part])
    covered = [j for s, n in zip(spans.start, spans.length, strict=True) for j in range(s, s + n)]
    assert covered == list(range(5, 5 + part.size))
    assert part.kernels == spans.start.size
    rows = (spans.start - 5) // width
    assert ((spans.start + spans.length - 1 - 5) // width == rows).all()


def test_last_kernel_of_a_row_may_be_shorter() -> None:
    spans = kernel.spans_of([Part("w", (2, 5), 0, 2)])
    assert spans.start.tolist() == [0, 2, 4, 5, 7, 9]
    assert spans.length.tolist() == [2, 2, 1, 2, 2, 1]


def test_a_kernel_longer_than_its_row_is_refused() -> None:
    with pytest.raises(UpdateError, match=r"kernel length is 6; it must be in \[1, 5\]"):
        sections.lay_out({"w": (2, 5)}, {"w": 6})


def test_measures_norm_and_magnitudes() -> None:
    flat = np.array([3, -4, 0, 0, 0, -2], np.float32)
    norms = kernel.measure(flat, kernel.spans_of([Part("w", (3, 2), 0, 2)]))
    assert norms.energy.tolist() == [25, 0, 4]
    assert norms.largest.tolist() == [4, 0, 2]
    assert norms.smallest.tolist() == [3, np.inf, 2]


def test_ranks_by_norm_with_ties_in_order_and_without_zero_kernels() -> None:
    energy = np.array([1.0, 9, 0, 9, 4])
    norms = Norms(energy, np.zeros(5, np.float32), np.zeros(5, np.float32))
    assert kernel.rank(norms).tolist() == [1, 3, 4, 0]


@pytest.mark.parametrize(("sparsity", "kept"), [(0.0, 10), (0.75, 2), (0.99, 1), (1.0, 1)])
def test_sparsity_is_the_share_dropped(sparsity: float, kept: int) -> None:
    assert kernel.kept_for(sparsity, 10) == kept


def points(grid: Grid) -> Floats:
    """The magnitude of every symbol: 0 first, then Q_0 … Q_L (0 only once)."""
    return np.array([kernel.point(s, *grid.bounds) for s in range(grid.symbols)], np.float32)


def test_points_are_the_papers() -> None:
    assert points(Grid(1.0, 3.0, 4)).tolist() == [0, 1, 1.5, 2, 2.5, 3]
    assert points(Grid(0.0, 3.0, 3)).tolist() == [0, 1, 2, 3]
    assert points(Grid(2.0, 2.0, 1)).tolist() == [0, 2, 2]


def test_range_starts_at_zero_only_if_the_least_magnitude_is_below_one_step() -> None:
    norms = Norms(np.ones(1), np.array([8.0], np.float32), np.array([1.0], np.float32))
    kept = np.zeros(1, np.int64)
    assert kernel.grid_for(norms, kept, 4) == Grid(0.0, 8.0, 4)
    assert kernel.grid_for(norms, kept, 8) == Grid(1.0, 8.0, 8)


def whole(count: int) -> Spans:
    return Spans(np.array([0]), np.array([count]))


@pytest.mark.parametrize("grid", [Grid(0.0, 1.0, 7), Grid(0.25, 0.75, 3), Grid(1e-40, 1e-39, 5)])
def test_quantizer_is_exact_on_its_points(grid: Grid) -> None:
    flat = np.concatenate([points(grid), -points(grid)])
    quantized = kernel.quantize(flat, whole(flat.size), grid, seed=1)
    signs = np.packbits(flat[quantized.symbols > 0] < 0, bitorder="little")
    assert np.array_equal(quantized.signs, signs)
    again = kernel.dequantize(quantized, np.ones(flat.size, np.bool_))
    assert np.array_equal(again, flat)


@pytest.mark.parametrize(
    ("value", "grid"),
    [
        (0.613, Grid(0.0, 1.0, 4)),
        (0.613, Grid(0.5, 0.7, 1)),
        (1e-3, Grid(0.0, 1.0, 1)),
        (0.999, Grid(0.0, 1.0, 3)),
        (3e30, Grid(0.0, 1e31, 2)),
        (7e-45, Grid(0.0, 3e-44, 3)),  # denormals, whose points are rounded to a few float32
    ],
)
def test_quantizer_is_unbiased_with_the_variance_of_its_draw(value: float, grid: Grid) -> None:
    """Mean of 40,000 draws within 5 standard errors: a right quantizer fails 6 times in 10^7."""
    count = 40_000
    flat = np.full(count, value, np.float32)
    symbols = kernel.quantize(flat, whole(count), grid, seed=7).symbols
    drawn = points(grid).astype(np.float64)[symbols]
    low, high = drawn.min(), drawn.max()
    true = float(np.float32(value))
    assert low < true < high
    assert len(set(symbols.tolist())) == 2
    variance = (true - low) * (high - true)
    assert abs(drawn.mean() - true) < 5 * np.sqrt(variance / count)
    assert drawn.var() == pytest.approx(variance, rel=0.1)


def test_draw_depends_on_seed_and_place_only() -> None:
    flat = np.random.default_rng(0).random(1000).astype(np.float32)
    grid = Grid(0.0, 1.0, 8)
    symbols = kernel.quantize(flat, whole(1000), grid, seed=3).symbols
    part = Spans(np.array([100, 700]), np.array([50, 20]))
    fewer = kernel.quantize(flat, part, grid, seed=3).symbols
    assert fewer.tolist() == symbols[100:150].tolist() + symbols[700:720].tolist()
    other = kernel.quantize(flat, whole(1000), grid, seed=4).symbols
    assert (other != symbols).any()


def test_exact_zeros_of_a_kept_kernel_stay_zero() -> None:
    flat = np.array([0, 0.5, -0.0, 1], np.float32)
    quantized = kernel.quantize(flat, whole(4), Grid(0.5, 1.0, 2), seed=0)
    assert quantized.symbols.tolist() == [0, 1, 0, 3]
    assert quantized.signs.tolist() == [0]


def test_flatten_refuses_integers() -> None:
    with pytest.raises(UpdateError, match=r"steps is torch\.int64"):
        flatten({"steps": torch.zeros(2, dtype=torch.int64)})
