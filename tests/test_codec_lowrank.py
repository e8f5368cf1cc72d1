"""The low-rank codec from outside: within budget, better with more bytes, exact to decode, safe."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anycostfl.codec import byte_budget, compress, decompress, laplace, lowrank, matricization
from anycostfl.codec.context import RangeDecoder, RangeEncoder, new_contexts
from anycostfl.codec.factor import factorize
from anycostfl.codec.frame import OVERHEAD, payload_binding, seal, varint
from anycostfl.codec.laplace import Magnitudes
from anycostfl.codec.matricization import (
    ContextSets,
    Mode,
    basis_of,
    fold_rows,
    max_rank,
    sides,
    unfold,
)
from anycostfl.codec.spectrum import _waves, from_spectrum, layout_of, to_spectrum
from anycostfl.errors import BetaError, PayloadError, UpdateError

SHAPES = {"conv.weight": (16, 8, 3, 3), "conv.bias": (16,), "fc.weight": (40, 200), "scale": ()}


def sample(seed: int = 0, scale: float = 1e-3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=draw).pow(3) * scale for n, s in SHAPES.items()}


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=draw)
    return left @ torch.randn(rank, columns, generator=draw)


def packed(update: dict[str, Tensor], beta: float) -> bytes:
    return compress(update, beta, seed=0, codec="lowrank")


def sealed(body: bytes, shapes: dict[str, tuple[int, ...]]) -> bytes:
    return seal(lowrank.MAGIC, body, payload_binding(b"", shapes))


def error(update: dict[str, Tensor], beta: float) -> float:
    decoded = decompress(packed(update, beta), update).values
    lost = sum(float((u - decoded[n]).double().square().sum()) for n, u in update.items())
    return lost / sum(float(u.double().square().sum()) for u in update.values())


@settings(max_examples=40)
@given(st.floats(0.004, 1.0), st.integers(0, 99), st.sampled_from([1e-42, 1e-30, 1e-3, 1e20, 1e36]))
def test_payload_never_exceeds_its_budget(beta: float, seed: int, scale: float) -> None:
    update = sample(seed, scale)
    payload = packed(update, beta)
    assert len(payload) <= beta * 4 * sum(t.numel() for t in update.values())
    decoded = decompress(payload, SHAPES)
    assert all(value.isfinite().all() for value in decoded.values.values())
    assert all(mask.all() for mask in decoded.masks.values())


@pytest.mark.parametrize("beta", [1 / 4, 1 / 15, 1 / 40])
def test_budget_is_well_used(beta: float) -> None:
    update = {"w": torch.randn(200, 300, generator=torch.Generator().manual_seed(0))}
    assert len(packed(update, beta)) >= 0.95 * byte_budget(beta, 60_000)


@pytest.mark.parametrize("beta", [1 / 60, 1 / 75, 1 / 100])
def test_budget_is_well_used_though_the_estimate_errs(beta: float) -> None:
    """Few large elements: three guesses after the estimate still fill only half of the budget."""
    update = {"w": torch.randn(184, 170, generator=torch.Generator().manual_seed(0)).pow(3)}
    assert len(packed(update, beta)) >= 0.97 * byte_budget(beta, 184 * 170)


def test_values_of_few_kinds_are_not_dropped_though_sizes_jump() -> None:
    values = torch.randn(300, 400)
    update = {"w": values.sign() * (values.abs() > 1)}
    payload = compress(update, 1 / 30, seed=0, codec="lowrank")
    assert len(payload) > byte_budget(1 / 30, values.numel()) / 2
    assert decompress(payload, update).values["w"].any()


def test_integers_are_refused() -> None:
    with pytest.raises(UpdateError, match="floating point"):
        compress({"w": torch.arange(400)}, 1 / 4, seed=0, codec="lowrank")


def test_more_bytes_mean_less_error() -> None:
    errors = [error(sample(), beta) for beta in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 1
    assert errors[-1] < 1e-9


def test_matrix_of_low_rank_costs_its_factors_only() -> None:
    """Rank 3 of 400 × 600: 3,000 numbers instead of 240,000; 16 bits each make it nearly exact."""
    update = {"w": low_rank(400, 600, 3)}
    assert error(update, 1 / 80) < 1e-6
    other = {"w": torch.randn(400, 600, generator=torch.Generator().manual_seed(0))}
    assert error(other, 1 / 80) > 0.3


@pytest.mark.parametrize("mode", [Mode.OUT, Mode.IN])
def test_convolution_is_sent_in_the_mode_in_which_it_has_low_rank(mode: Mode) -> None:
    shape = (24, 18, 5, 4)
    values = np.zeros(layout_of(shape), np.float32)
    fold_rows(values, mode, 0, low_rank(*sides(values.shape, mode), 3).numpy())
    assert np.linalg.matrix_rank(unfold(values, mode)) == 3
    flat = values.ravel()
    from_spectrum(flat, shape)
    update = {"w": torch.from_numpy(flat.reshape(shape))}
    payload = packed(update, 0.1)
    assert (payload[25], payload[26]) == (mode, 3)
    assert error(update, 0.1) < 1e-3


@pytest.mark.parametrize("layout", [(5, 7), (7, 5), (4, 4, 3), (9, 20, 2), (3, 2, 40), (1, 6)])
def test_rows_of_a_matricization_go_back_where_they_came_from(layout: tuple[int, ...]) -> None:
    values = np.arange(np.prod(layout), dtype=np.float32).reshape(layout)
    for mode in (Mode.OUT, Mode.IN) if len(layout) == 3 else (Mode.OUT,):
        matrix, again = unfold(values, mode), np.zeros(layout, np.float32)
        assert matrix.shape == sides(layout, mode)
        for first in range(0, len(matrix), 3):
            fold_rows(again, mode, first, np.ascontiguousarray(matrix[first : first + 3]))
        assert np.array_equal(again, values)


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (3, 9, 3, 1), (20, 2, 5, 7), (6, 5, 1, 1), (4,)])
def test_spectrum_keeps_energy_and_goes_back(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).numpy()
    laid = to_spectrum(values)
    assert laid.shape == layout_of(shape)
    assert np.square(laid).sum() == pytest.approx(np.square(values).sum(), rel=1e-5)
    flat = laid.flatten()
    from_spectrum(flat, shape)
    assert np.allclose(flat.reshape(shape), values, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((3, 4, 16, 16), (256, 3, 4)),
        ((3, 4, 1, 256), (256, 3, 4)),
        ((3, 4, 1, 257), (3, 1028)),
        ((1, 4, 64, 64), (1, 16384)),
    ],
)
def test_only_small_kernels_are_transformed(
    shape: tuple[int, ...], layout: tuple[int, ...]
) -> None:
    assert layout_of(shape) == layout


def test_large_planes_take_no_table_of_their_size_squared() -> None:
    update = {"positions": torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))}
    other = {"positions": torch.ones(1, 2, 60, 60)}
    decompress(packed(other, 0.5), other)  # compile
    tracemalloc.start()
    try:
        decoded = decompress(packed(update, 0.5), update).values["positions"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.allclose(decoded, update["positions"], atol=1e-3)
    assert peak < 4 * 2**20


def test_the_table_of_waves_has_multiples_of_two_to_the_minus_24_and_true_zeros() -> None:
    for size in ((3, 3), (5, 7), (16, 16)):
        waves = _waves(*size).astype(np.float64)
        assert np.array_equal(np.rint(waves * 2**24), waves * 2**24)
        assert np.allclose(waves @ waves.T, np.eye(len(waves)), atol=2e-6)
    assert not _waves(3, 3)[1, 1]  # cos(π/2), which no float64 gives


def test_kernels_that_are_flat_have_one_frequency() -> None:
    laid = to_spectrum(np.ones((4, 3, 5, 5), np.float32))
    assert np.allclose(laid[0], 5)
    assert np.abs(laid[1:]).max() < 1e-6


def test_kernels_go_back_in_a_fixed_order_of_sums() -> None:
    draw = np.random.default_rng(0)
    spectrum = draw.normal(size=(6, 4)).astype(np.float32)  # 2 × 3 kernels, 4 of them
    flat, waves = spectrum.flatten(), _waves(2, 3)
    from_spectrum(flat, (2, 2, 2, 3))
    expected = np.zeros((4, 6), np.float32)
    for frequency in range(6):
        expected += waves[frequency] * spectrum[frequency][:, None]
    assert np.array_equal(flat.reshape(4, 6), expected)


def test_weak_directions_beyond_single_precision_are_found() -> None:
    decay = torch.logspace(0, -6, 60)  # energies down to 1e-12 of the largest
    left, right = (torch.linalg.qr(low_rank(n, 60, 60, n)).Q for n in (60, 400))
    matrix = left * decay @ right.T
    found = factorize(matrix, 50)
    left_over = float((matrix - found.basis @ found.rows).square().sum())
    assert left_over <= 1.1 * float(decay[50:].square().sum())


@pytest.mark.parametrize(("rows", "rank"), [(30, 20), (300, 12)])
def test_factorize_finds_the_strongest_directions(rows: int, rank: int) -> None:
    decay = torch.logspace(0, -3, rows)
    matrix = torch.linalg.qr(low_rank(rows, rows, rows)).Q * decay @ low_rank(rows, 400, rows, 1)
    found = factorize(matrix, rank)
    best = torch.linalg.svdvals(matrix.double()).square()
    missed = float(matrix.double().square().sum()) - float((found.strength**2).sum())
    assert missed <= 1.05 * float(best[rank:].sum()) + 1e-5 * float(best.sum())
    assert torch.allclose(found.basis.T @ found.basis, torch.eye(rank), atol=1e-4)


def test_estimate_of_bits_and_error_is_near_the_truth() -> None:
    rng = np.random.default_rng(0)
    for mean in (0.3, 1.0, 6.0, 40.0):
        matrix = rng.laplace(0, mean, (200, 320)).astype(np.float32)
        bits, lost = Magnitudes(np.full((1, 1), np.log2(mean)), np.ones(1)).cost(1.0)
        numbers = laplace.quantize(matrix, np.ones(200, np.float32))
        encoder = RangeEncoder(0)
        encoder.integers(numbers, new_contexts())
        assert 8 * len(encoder.finish()) / matrix.size == pytest.approx(float(bits[0]), rel=0.06)
        real = float(np.square(matrix - numbers, dtype=np.float64).mean())
        assert real == pytest.approx(float(lost[0]), rel=0.06)


def test_the_largest_magnitude_is_read_as_it_was_written() -> None:
    matrix = np.array([[1e12, -3e38, 2.0**30, 2.0**30 - 64, 2.0**29]], np.float32)
    numbers = laplace.quantize(matrix, np.ones(1, np.float32))
    most = 2**30 - 64  # the largest float32 of 30 bits
    assert numbers.tolist() == [[most, -most, most, most, 2**29]]
    encoder = RangeEncoder(0)
    encoder.integers(numbers, new_contexts())
    assert np.array_equal(RangeDecoder(encoder.finish()).integers(1, 5, new_contexts()), numbers)


@pytest.mark.parametrize("half_octaves", [0, 1, 6, 79, 80])
def test_columns_are_their_integers_times_powers_of_the_root_of_two(half_octaves: int) -> None:
    numbers = np.array([[1, -3, 2**30 - 64]], np.int32)
    basis = basis_of(numbers, np.array([half_octaves], np.int32))
    factor = 2.0 ** -(half_octaves // 2) * (0.5**0.5 if half_octaves % 2 else 1.0)
    assert basis[:, 0].tolist() == [float(np.float32(n * factor)) for n in numbers[0].tolist()]


def test_same_bytes_every_time_and_whatever_the_order_of_names() -> None:
    update = sample()
    payload = packed(update, 0.1)
    assert packed(dict(reversed(update.items())), 0.1) == payload == packed(update, 0.1)
    backwards = dict(reversed(SHAPES.items()))
    assert list(decompress(payload, backwards).values) == list(backwards)


@pytest.mark.parametrize("columns", [41, matricization.TILE, matricization.TILE + 5])
def test_decoder_adds_up_in_a_fixed_order(columns: int) -> None:
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(33, 17)).astype(np.float32)
    rows = rng.integers(-(2**20), 2**20, (17, columns), dtype=np.int32)
    expected = np.zeros((33, columns), np.float32)
    for k in range(17):
        expected += basis[:, k : k + 1] * rows[k].astype(np.float32)
    assert np.array_equal(matricization._product(basis, rows), expected)


@pytest.mark.parametrize("index", [-9000, -2049, -1, 0, 1, 255, 256, 12345])
def test_steps_are_exact_and_their_index_is_found_again(index: int) -> None:
    step = lowrank.step_of(index)
    assert lowrank.step_of(index + 256) == 2 * step
    assert step < lowrank.step_of(index + 1) <= step * (1 + 1 / 256)


def test_zeros_are_an_empty_payload_that_counts_everywhere() -> None:
    update = {n: torch.zeros(s) for n, s in SHAPES.items()}
    payload = packed(update, 0.1)
    decoded = decompress(payload, SHAPES)
    assert len(payload) == OVERHEAD
    assert not any(value.any() for value in decoded.values.values())
    assert all(mask.all() for mask in decoded.masks.values())


def test_vectors_scalars_and_empty_tensors_travel_along() -> None:
    update = {"w": torch.linspace(-1, 1, 100), "none": torch.zeros(0, 3), "one": torch.ones(1, 1)}
    update["scale"] = torch.tensor(0.5)
    decoded = decompress(packed(update, 1.0), update).values
    assert [value.shape for value in decoded.values()] == [u.shape for u in update.values()]
    assert all(torch.allclose(decoded[n], u, atol=1e-5) for n, u in update.items())
    with pytest.raises(BetaError, match="buys 4 bytes"):
        packed({"scale": torch.tensor(1.0)}, 1.0)


def test_hardly_any_bytes_still_make_a_payload() -> None:
    update = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    assert OVERHEAD <= len(packed(update, 0.008)) <= 32


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1.0, 3.4e38])
def test_values_of_any_scale_survive(value: float) -> None:
    update = {"w": torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).sign() * value}
    decoded = decompress(packed(update, 0.5), update).values["w"]
    assert decoded.isfinite().all()
    assert ((decoded.double() / update["w"].double() - 1).abs() < 0.01).all()


def test_what_is_not_finite_is_refused_by_name() -> None:
    update = sample()
    update["fc.weight"][3, 7] = float("nan")
    with pytest.raises(UpdateError, match=r"fc\.weight has an element that is not finite"):
        packed(update, 0.1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\0\0", "ends early"),
        (b"\0\0\x7f\0\0", "is out of range"),
        (b"\0\0\0\x01", "ends early"),
        (b"\0\0\0\x04\x01\0", "cannot have mode 4"),
        (b"\0\0\0\x09\0", "cannot have mode 9"),
        (b"\0\0\0\x02\0\0", "outside 1 to 2"),
        (b"\0\0\0\x02\x03\0", "outside 1 to 2"),
        (b"\0\0\0\x02\x01\0" + b"\0" * 8, "strength of a column"),
        (b"\0\0\0\x01\0" + b"\xff" * 60, "coded integers take"),
        (b"\0\0\0\0\0" + bytes(8), "coded integers take"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, message: str) -> None:
    shapes = {"a": (4, 6), "b": (2,)}
    assert max_rank((4, 6), Mode.OUT) == 2
    with pytest.raises(PayloadError, match=message):
        decompress(sealed(body, shapes), shapes)


def test_payload_for_another_plan_or_binding_is_refused() -> None:
    payload = compress(sample(), 0.1, seed=0, codec="lowrank", binding=b"round 1")
    with pytest.raises(PayloadError, match="another run"):
        decompress(payload, SHAPES, binding=b"round 2")
    with pytest.raises(PayloadError, match="names or shapes"):
        decompress(payload, {"w": (3, 3)}, binding=b"round 1")


def zeros_in(mode: Mode, shape: tuple[int, ...]) -> bytes:
    """A few bytes that make the decoder fill as much as a plan allows."""
    encoder, contexts, layout = RangeEncoder(0), ContextSets(), layout_of(shape)
    head = b"\0\0\0" + bytes([mode])
    if mode is Mode.DIRECT:
        encoder.integers(np.zeros((layout[0] * layout[1], layout[2]), np.int32), contexts.direct)
    else:
        short, long = sides(layout, mode)
        rank = max_rank(layout, mode)
        head += varint(rank)
        encoder.integers(np.zeros((1, rank), np.int32), contexts.direct)
        encoder.integers(np.zeros((rank, short), np.int32), contexts.columns)
        encoder.integers(np.zeros((rank, long), np.int32), contexts.rows)
    return sealed(head + encoder.finish(), {"w": shape})


def test_no_work_is_done_on_numbers_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (300, 300)
    head = b"\0\0\0" + bytes([Mode.OUT]) + varint(max_rank(layout_of(shape), Mode.OUT))
    monkeypatch.setattr(matricization, "_product", None)  # a call would be a TypeError
    with pytest.raises(PayloadError, match="continue beyond"):
        decompress(sealed(head + b"\x80" * 4, {"w": shape}), {"w": shape})


@pytest.mark.parametrize(
    ("mode", "shape"), [(Mode.OUT, (700, 700)), (Mode.DIRECT, (256, 256, 3, 3))]
)
def test_a_few_bytes_take_no_more_than_twice_the_plan(mode: Mode, shape: tuple[int, ...]) -> None:
    payload = zeros_in(mode, shape)
    decompress(payload, {"w": shape})
    tracemalloc.start()
    try:
        decompress(payload, {"w": shape})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 8 * np.prod(shape) + 2**19


@pytest.mark.parametrize("shape", [(700, 900), (64, 64, 9, 9)])
def test_decoding_takes_no_more_than_twice_the_plan(shape: tuple[int, ...]) -> None:
    update = {"w": torch.randn(shape, generator=torch.Generator().manual_seed(0))}
    payload, size = packed(update, 0.5), update["w"].numel()
    decompress(payload, update)
    tracemalloc.start()
    try:
        decompress(payload, update)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 8 * size + 2**24
