"""`compress` and `decompress` from outside: exact, within budget, reproducible, hard to hurt."""

import random
import tracemalloc
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anycostfl.codec import byte_budget, compress, decompress, flatten, kernel, sections
from anycostfl.codec.frame import OVERHEAD, payload_binding
from anycostfl.errors import BetaError, PayloadError, UnknownNameError, UpdateError
from mutations import BINDING, PLAN, corrupt, seal, survives, valid_payloads

SHAPES = {"conv.weight": (16, 8, 3, 3), "conv.bias": (16,), "fc.weight": (40, 200), "scale": ()}


def sample(seed: int = 0, scale: float = 1e-3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=draw).pow(3) * scale for n, s in SHAPES.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[n], second[n]) for n in first)


def lossless(update: dict[str, Tensor], beta: float = 1.0) -> bool:
    return same(decompress(compress(update, beta, seed=0), update).values, update)


def test_decoded_values_are_exactly_the_quantized_ones() -> None:
    update = sample()
    payload = compress(update, 0.05, seed=5, blocks={"fc.weight": 25})
    decoded = decompress(payload, update)
    parts = sections.lay_out(SHAPES, {"fc.weight": 25})
    flat = flatten(update)
    mask = torch.cat([decoded.masks[part.name].reshape(-1) for part in parts]).numpy()
    sent = sections.unpack(payload, parts, payload_binding(b"", SHAPES))
    assert sent is not None
    grid, symbols = sent[1].grid, sent[1].symbols
    every = kernel.Spans(np.arange(flat.size), np.ones(flat.size, np.int64))
    kept = every.take(np.flatnonzero(mask))
    assert np.array_equal(kernel.quantize(flat, kept, grid, seed=5).symbols, symbols)
    sizes = np.array([kernel.point(int(symbol), *grid.bounds) for symbol in symbols])
    expected = np.zeros(flat.size, np.float32)
    expected[mask] = sizes * np.where(flat[mask] < 0, -1, 1)
    values = torch.cat([decoded.values[part.name].reshape(-1) for part in parts]).numpy()
    assert np.array_equal(values, expected)


def test_masks_are_whole_kernels_of_largest_norm_and_cover_every_value() -> None:
    update = sample()
    decoded = decompress(compress(update, 0.04, seed=0, blocks={"fc.weight": 25}), SHAPES)
    fc, mask = update["fc.weight"], decoded.masks["fc.weight"]
    blocks = mask.reshape(-1, 25)
    assert (blocks.all(1) == blocks.any(1)).all()
    norm = fc.reshape(-1, 25).norm(dim=1)
    assert norm[blocks.all(1)].min() >= norm[~blocks.all(1)].max()
    assert all(not decoded.values[n][~decoded.masks[n]].any() for n in SHAPES)
    assert all(decoded.masks[n].dtype == torch.bool for n in SHAPES)


def test_the_last_kernel_of_a_row_is_kept_or_dropped_whole_though_it_is_shorter() -> None:
    update = {"w": torch.randn(20, 70, generator=torch.Generator().manual_seed(1))}
    mask = decompress(compress(update, 0.1, seed=0), update).masks["w"]
    kernels = (mask[:, :32], mask[:, 32:64], mask[:, 64:])
    assert all((kernel.all(1) == kernel.any(1)).all() for kernel in kernels)
    assert mask.any()
    assert not mask.all()


def test_mean_of_many_draws_is_the_kept_update() -> None:
    """300 draws, every kept element within 6 standard errors: fails wrongly once in 10^5."""
    update, draws = {"w": torch.randn(20, 32, generator=torch.Generator().manual_seed(1))}, 300
    decoded = [decompress(compress(update, 0.2, seed=s), update) for s in range(draws)]
    always = torch.stack([d.masks["w"] for d in decoded]).all(0)
    values = torch.stack([d.values["w"] for d in decoded]).double()
    assert always.float().mean() > 0.5
    error = (values.mean(0) - update["w"]).abs()[always]
    # The step is not the same in every draw; the spread of the draws bounds the error either way.
    spread = values.std(0)[always].clamp_min(1e-3) / draws**0.5
    assert (error <= 6 * spread).all()


@settings(max_examples=40)
@given(st.floats(0.004, 1.0), st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1e20]))
def test_payload_never_exceeds_its_budget(beta: float, seed: int, scale: float) -> None:
    update = sample(seed, scale)
    payload = compress(update, beta, seed=seed)
    assert len(payload) <= beta * 32 * sum(t.numel() for t in update.values()) / 8
    assert decompress(payload, SHAPES).values["fc.weight"].isfinite().all()


def test_same_seed_same_bytes_on_any_number_of_threads() -> None:
    update, threads = sample(), torch.get_num_threads()
    payloads = set()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            payloads.add(compress(update, 0.1, seed=9))
    finally:
        torch.set_num_threads(threads)
    assert len(payloads) == 1
    assert compress(update, 0.1, seed=10) not in payloads


def test_order_of_names_does_not_matter_to_the_bytes_and_is_kept_in_the_result() -> None:
    update = sample()
    backwards = dict(reversed(update.items()))
    payload = compress(update, 0.1, seed=0)
    assert compress(backwards, 0.1, seed=0) == payload
    assert list(decompress(payload, backwards).values) == list(backwards)


def test_accepts_shapes_or_tensors_to_decode() -> None:
    update = sample()
    payload = compress(update, 0.1, seed=0)
    assert same(decompress(payload, SHAPES).values, decompress(payload, update).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_type_is_read_as_float32(dtype: torch.dtype) -> None:
    update = {n: t.to(dtype) for n, t in sample(scale=1.0).items()}
    single = {n: t.float() for n, t in update.items()}
    assert compress(update, 0.1, seed=0) == compress(single, 0.1, seed=0)


def test_non_contiguous_and_differentiable_tensors_are_fine() -> None:
    weight = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).t()
    plain = {"w": weight.contiguous()}
    assert compress({"w": weight}, 0.3, seed=0) == compress(plain, 0.3, seed=0)
    assert compress({"w": weight.requires_grad_()}, 0.3, seed=0) == compress(plain, 0.3, seed=0)


def test_all_zero_update_is_an_empty_payload_with_an_empty_mask() -> None:
    update = {n: torch.zeros(s) for n, s in SHAPES.items()}
    payload = compress(update, 0.1, seed=0)
    decoded = decompress(payload, SHAPES)
    assert len(payload) == OVERHEAD
    assert same(decoded.values, update)
    assert not any(mask.any() for mask in decoded.masks.values())


def test_one_element_and_one_distinct_value_are_exact() -> None:
    many = torch.zeros(400)
    many[123] = -0.3
    assert lossless({"w": many})
    constant = {"w": torch.full((50, 40), -1.7e-5)}
    assert lossless(constant, beta=0.1)
    assert len(compress(constant, 1.0, seed=0)) == len(compress(constant, 0.1, seed=0)) < 350


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-30, 1.0, 1e30, 3.4e38])
def test_values_of_any_scale_are_exact_where_they_can_be(value: float) -> None:
    signs = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).sign()
    assert lossless({"w": signs * value}, beta=0.1)


def test_an_update_of_mostly_zeros_is_not_cut_short() -> None:
    update = {"weight": torch.zeros(512, 3136), "bias": torch.randn(10)}
    decoded = decompress(compress(update, 1 / 15, seed=0), update).values
    assert error(update, decoded) < 1e-9


def test_values_of_few_kinds_are_exact_where_there_is_room() -> None:
    update = {"w": torch.randn(30, 100).round()}
    decoded = decompress(compress(update, 0.5, seed=0), update).values
    assert error(update, decoded) < 1e-6


def test_more_bytes_are_never_much_worse() -> None:
    update = {"w": torch.randn(81, 18), "s": torch.randn(77, 5).sign()}
    errors = [
        error(update, decompress(compress(update, beta, seed=0), update).values)
        for beta in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
    ]
    assert all(more <= 1.5 * less + 1e-9 for less, more in pairwise(errors))


def error(update: Mapping[str, Tensor], decoded: Mapping[str, Tensor]) -> float:
    lost = sum(float((update[n] - decoded[n]).double().square().sum()) for n in update)
    return lost / sum(float(t.double().square().sum()) for t in update.values())


def test_huge_and_tiny_values_together_stay_finite_and_in_range() -> None:
    update = {"w": torch.logspace(-44, 38, 2000)}
    decoded = decompress(compress(update, 0.25, seed=0), update).values["w"]
    assert decoded.isfinite().all()
    assert decoded.max() <= update["w"].max()


def test_unknown_codecs_are_named() -> None:
    with pytest.raises(UnknownNameError, match="no codec 'zip'; there are kernel, lowrank"):
        compress(sample(), 0.1, seed=0, codec="zip")


def test_single_scalar_needs_more_than_its_own_four_bytes() -> None:
    with pytest.raises(BetaError, match="buys 4 bytes for 1 elements"):
        compress({"scale": torch.tensor(1.0)}, 1.0, seed=0)


def test_empty_and_zero_dimensional_tensors_travel_along() -> None:
    update = {"w": torch.ones(100), "none": torch.zeros(0, 3), "gone": torch.zeros(3, 0)}
    update["scale"] = torch.tensor(1.0)
    decoded = decompress(compress(update, 1.0, seed=0), update)
    assert same(decoded.values, update)
    assert decoded.values["scale"].shape == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_what_is_not_finite_is_refused_by_name(bad: float) -> None:
    update = {n: t.double() for n, t in sample().items()}
    update["fc.weight"][3, 7] = bad
    with pytest.raises(UpdateError, match=r"fc\.weight has an element that is not finite"):
        compress(update, 0.1, seed=0)


@pytest.mark.parametrize("beta", [0.0, -1.0, 1.5, float("nan")])
def test_beta_outside_its_range_is_refused(beta: float) -> None:
    with pytest.raises(BetaError, match="must be in"):
        compress(sample(), beta, seed=0)


def test_below_one_kernel_the_payload_is_empty_and_below_that_an_error() -> None:
    update = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    payload = compress(update, 0.008, seed=0)
    assert len(payload) == OVERHEAD <= byte_budget(0.008, 1000)
    assert not decompress(payload, update).masks["w"].any()
    with pytest.raises(BetaError, match="even an empty payload takes 26"):
        compress(update, 0.006, seed=0)


def test_kernels_of_one_element_need_no_more_memory_than_the_plan_allows() -> None:
    size = 200_000
    update = {"w": torch.randn(1, size, generator=torch.Generator().manual_seed(0))}
    payload = compress(update, 0.25, seed=0, blocks={"w": 1})
    decompress(payload, update)
    tracemalloc.start()
    try:
        decompress(payload, update)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 64 * size + 2**20


def test_payload_that_promises_everything_for_nothing_is_bounded_by_the_plan() -> None:
    """A table with one token costs no bits per element; the plan's size is the limit."""
    payload = compress({"w": torch.ones(64, 512)}, 0.05, seed=0)
    decoded = decompress(payload, {"w": (64, 512)})
    assert decoded.values["w"].eq(1).all()
    with pytest.raises(PayloadError, match="names or shapes"):
        decompress(payload, {"w": (4096, 4096)})


@pytest.mark.parametrize("seed", range(4))
def test_corrupted_payloads_decode_in_range_or_are_refused(seed: int) -> None:
    """A short run of fuzz/run.py; docs/LOG.md records the long ones."""
    payloads, draw = valid_payloads(), random.Random(seed)
    outcome = [survives(corrupt(draw.choice(payloads), draw)[1]) for _ in range(2500)]
    assert not all(outcome)
    assert any(outcome)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 24), st.booleans())
def test_arbitrary_bytes_behind_a_genuine_header_are_refused_or_in_range(
    data: bytes, which: int, resealed: bool
) -> None:
    payload = valid_payloads_once()[which][:22] + data
    survives(seal(payload) if resealed else payload)


def valid_payloads_once(cache: list[bytes] = []) -> list[bytes]:  # noqa: B006 - that is the point
    if not cache:
        cache.extend(valid_payloads())
    return cache


def test_valid_payloads_decode() -> None:
    assert all(survives(payload) for payload in valid_payloads_once())
    assert len(set(valid_payloads_once())) >= 15
    with pytest.raises(PayloadError, match="another run"):
        decompress(valid_payloads_once()[0], PLAN, binding=BINDING + b"!")
