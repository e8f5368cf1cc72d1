"""Each baseline against its own paper: hand-computed values, oracles, and hostile bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anycostfl import ElasticModel, methods, models
from anycostfl.codec import Upload, byte_budget, flatten
from anycostfl.codec.frame import payload_binding
from anycostfl.codec.sparse import Layout, Ranked, Sparse, draw, fill, pack_sparse, unpack_sparse
from anycostfl.config import load_preset
from anycostfl.errors import PayloadError, UnknownNameError
from anycostfl.methods import fedhq, heterofl, qsgd, stc, uveqfed
from anycostfl.planning.draw import draw_cohort
from anycostfl.planning.strategy import Binds

SHAPES = {"a.weight": (24, 10, 5, 5), "a.bias": (24,), "b.weight": (50, 96)}
BOUND = payload_binding(b"plan", SHAPES)
ISSUED = Upload(1.0, 7, b"plan")


def update(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=random) ** 3 / 100 for n, s in SHAPES.items()}


def vector(tensors: Mapping[str, Tensor]) -> np.ndarray:
    return flatten(tensors).astype(np.float64)


def compressing() -> list[str]:
    """Methods that never ask for whole updates."""
    config = load_preset("fmnist-iid")
    devices = draw_cohort(config.fleet, seed=0, round_index=0).devices
    plans = {
        name: methods.load(name).plan(devices, config.workload, config.limits_of(name))
        for name in methods.names()
    }
    return [name for name, plan in plans.items() if plan.beta.max() < 1]


def test_all_but_fedavg_and_its_kin_compress() -> None:
    assert {"anycostfl", "anycostfl+", "stc", "heterofl"} < set(compressing())
    assert not DENSE & set(compressing())


# --- every method ---------------------------------------------------------------------------------

DENSE = {"fedavg", "fedavg/one-width", "fedavg/the-able", "fedavgm", "fedadam", "fedyogi"}
DENSE |= {"fedprox", "fednova"}
UNMASKED = DENSE | {"fedhq", "heterofl", "heterofl/without-scaler", "qsgd", "stc", "uveqfed"}
UNMASKED |= {"anycostfl/without-aio", "fedrolex", "fjord"}
BY_SAMPLES = DENSE | {"fedhq", "qsgd", "uveqfed"}
BY_SAMPLES |= {*methods.variants("anycostfl+")} - {"anycostfl+/without-samples"}


@pytest.mark.parametrize("name", [x for n in methods.names() for x in (n, *methods.variants(n))])
def test_what_is_not_sent_counts_as_zero_but_for_all_in_one_aggregation(name: str) -> None:
    method, beta = methods.load(name), 1.0 if name in {*DENSE, "anycostfl/without-fgc"} else 0.03
    payload = method.encode(update(), Upload(beta, 7, b"plan", codec=method.codec))
    decoded = method.decode(payload, SHAPES, ISSUED)
    everywhere = all(bool(mask.all()) for mask in decoded.masks.values())
    dense = beta == 1.0 or method.codec == "lowrank"  # every element is sent
    assert everywhere == (dense or name in UNMASKED)


@pytest.mark.parametrize("name", [x for n in methods.names() for x in (n, *methods.variants(n))])
def test_which_methods_weigh_by_samples(name: str) -> None:
    method = methods.load(name)
    assert method.by_samples == (name in BY_SAMPLES)
    if name in BY_SAMPLES:
        weights = method.weigh(np.ones(2), np.full(2, 0.03), np.array([100.0, 300.0]))
        assert weights == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("name", compressing())
@pytest.mark.parametrize("beta", [1 / 25, 1 / 33, 1 / 43])
def test_payloads_fill_the_budget_and_never_exceed_it(name: str, beta: float) -> None:
    method, given_ = methods.load(name), update()
    budget = byte_budget(beta, vector(given_).size)
    payload = method.encode(given_, Upload(beta, 7, b"plan", codec=method.codec))
    assert 0.9 * budget <= len(payload) <= budget
    decoded = method.decode(payload, SHAPES, ISSUED)
    wanted = vector(given_)
    assert np.linalg.norm(vector(decoded.values) - wanted) < np.linalg.norm(wanted)
    assert list(decoded.values) == list(SHAPES)
    assert all(decoded.values[n].shape == decoded.masks[n].shape == SHAPES[n] for n in SHAPES)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", methods.names())
def test_what_is_encoded_can_be_decoded_up_to_the_largest_float(name: str) -> None:
    method, largest = methods.load(name), float(np.finfo(np.float32).max)
    ends = {n: torch.where(u > 0, largest, -0.9 * largest) for n, u in update().items()}
    payload = method.encode(ends, Upload(1.0 if name in DENSE else 0.1, 7, b"plan"))
    assert np.isfinite(vector(method.decode(payload, SHAPES, ISSUED).values)).all()


@pytest.mark.parametrize("name", methods.names())
def test_zeros_survive(name: str) -> None:
    method = methods.load(name)
    nothing = {n: torch.zeros(s) for n, s in SHAPES.items()}
    payload = method.encode(nothing, Upload(1.0, 7, b"plan"))
    assert not vector(method.decode(payload, SHAPES, ISSUED).values).any()


@pytest.mark.parametrize("name", methods.names())
def test_a_payload_of_another_plan_is_refused(name: str) -> None:
    method = methods.load(name)
    payload = method.encode(update(), Upload(1.0, 7, b"plan"))
    with pytest.raises(PayloadError, match="bound to another"):
        method.decode(payload, SHAPES, Upload(1.0, 7, b"another plan"))


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(methods.names()))
def test_damaged_payloads_are_refused(data: st.DataObject, name: str) -> None:
    method = methods.load(name)
    payload = method.encode(update(), Upload(0.06 if name not in DENSE else 1, 7, b"plan"))
    at = data.draw(st.integers(0, len(payload) - 1))
    damaged = (
        payload[:at] + bytes([payload[at] ^ data.draw(st.integers(1, 255))]) + payload[at + 1 :]
    )
    with pytest.raises(PayloadError):
        method.decode(damaged, SHAPES, ISSUED)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", methods.names())
def test_a_cohort_of_nobody_has_no_strategies(name: str) -> None:
    """As when every device is suspended."""
    config = load_preset("demo")
    nobody = draw_cohort(config.fleet, seed=0, round_index=0).devices.take(slice(0, 0))
    assert not len(methods.load(name).plan(nobody, config.workload, config.limits_of(name)))


def test_heterofl_is_described_with_the_limits_and_codec_it_has() -> None:
    config = load_preset("demo", ["limits.alpha_min=0.05", "compression.codec=lowrank"])
    devices = draw_cohort(config.fleet, seed=0, round_index=0).devices
    planned = heterofl.plan(devices, config.workload, config.limits_of("heterofl"))
    assert not np.any(planned.binds & Binds.ALPHA_MIN)
    assert np.all(planned.quality > planned.beta)


def test_anycostfl_plus_keeps_to_the_least_upload() -> None:
    config = load_preset("demo", ["limits.beta_min=0.01"])
    devices = draw_cohort(config.fleet, seed=0, round_index=0).devices
    limits = config.limits_of("anycostfl+")
    planned = methods.load("anycostfl+").plan(devices, config.workload, limits)
    assert np.all(planned.beta[planned.feasible] == 0.01)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(UnknownNameError, match="stc"):
        methods.load("sct")


# --- the shared sparse payload --------------------------------------------------------------------


@given(
    kept=st.lists(st.booleans(), min_size=1, max_size=300),
    group=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([1, 3, 200, 100_000]),
)
def test_sparse_payloads_return_what_was_packed(
    kept: list[bool], group: int, seed: int, spread: int
) -> None:
    layout, random = Layout(len(kept), scalars=2, group=group), np.random.default_rng(seed)
    count = layout.integers(sum(kept))
    given_ = Sparse(np.array(kept), (0.5, -2.0), random.integers(-spread, spread + 1, count))
    got = unpack_sparse(pack_sparse(given_, BOUND), BOUND, layout)
    assert (got.kept == given_.kept).all()
    assert (got.integers == given_.integers).all()
    assert got.scalars == ((0.5, -2.0) if any(kept) else (0.0, 0.0))


@settings(max_examples=200)
@given(body=st.binary(max_size=200))
def test_any_sealed_body_is_refused_or_decodes(body: bytes) -> None:
    from anycostfl.codec.frame import seal

    layout = Layout(300, scalars=1)
    try:
        got = unpack_sparse(seal(b"ACFS", body, BOUND), BOUND, layout)
    except PayloadError:
        return
    assert got.kept.size == 300
    assert got.integers.size == np.count_nonzero(got.kept)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=200), st.integers(1, 200))
def test_the_largest_are_the_largest(values: list[float], count: int) -> None:
    flat = np.array(values, np.float32)
    kept = Ranked(flat).largest(count)
    assert not kept[flat == 0].any()
    assert kept.sum() <= count
    if kept.any() and not kept.all():
        # Ranks are 1/1024 apart.
        assert np.abs(flat[kept]).min() * 1.001 >= np.abs(flat[~kept]).max()


@given(st.integers(30, 3000), st.floats(0.3, 3.0), st.floats(1, 1e5))
def test_fill_finds_the_largest_that_fits(budget: int, power: float, start: float) -> None:
    def encode(number: int) -> bytes:
        return bytes(min(10**6, 26 + int(number**power)))

    size = len(fill(budget, start, 10**5, encode))
    assert size <= budget
    bound = len(encode(min(10**5, int((budget - 26) ** (1 / power)))))
    assert size >= min(0.995 * budget, bound) - 1 or size >= 0.9 * bound


@given(st.integers(2, 60), st.floats(0.6, 1.0), st.floats(0.5, 0.95))
def test_fill_does_not_stray_where_the_next_number_is_too_large(
    best: int, power: float, begin: float
) -> None:
    tried: list[int] = []

    def encode(number: int) -> bytes:
        tried.append(number)
        return bytes(26 + int(10_000 * number**power))

    budget = len(encode(best)) + 50  # less than full, and best + 1 does not fit
    tried.clear()
    assert len(fill(budget, begin * best, 2**22, encode)) == len(encode(best))
    assert max(tried) <= 2 * best + 2
    assert len(tried) <= 12


def test_draws_are_right_on_average() -> None:
    values = np.array([0.0, 0.25, 1.0, 2.75, 10.5])
    chance = np.random.default_rng(0).random((20_000, 5), np.float32)
    mean = np.mean([draw(values, row) for row in chance], 0)
    assert mean == pytest.approx(values, abs=0.015)


# --- STC ------------------------------------------------------------------------------------------


def test_stc_by_hand() -> None:
    flat = np.array([0.1, -4.0, 3.0, 0.5, -0.2, 7.0, 0.0, -1.0], np.float32)
    places = stc.places_of({"b": (3,), "a": (5, 1)})
    sparse = stc.ternary(flat, places, [Ranked(flat[place]) for place in places], 0.3)
    assert sparse.kept.tolist() == [False, True, True, False, False, True, False, False]
    assert sparse.scalars == (3.5, 7.0)
    assert sparse.integers.tolist() == [-1, 0, 0]  # minus, plus, plus


def test_stc_sends_one_magnitude_a_tensor_and_has_feedback() -> None:
    payload = stc.encode(update(), Upload(1 / 40, 7, b"plan"))
    sent = stc.decode(payload, SHAPES, ISSUED).values
    for name, tensor in sent.items():
        assert len(torch.unique(tensor.abs())) <= 2, name  # 0 and μ
    assert len(np.unique(np.abs(vector(sent)))) == len(SHAPES) + 1
    assert methods.load("stc").feedback


# --- QSGD -----------------------------------------------------------------------------------------


def test_qsgd_is_unbiased_on_what_it_keeps() -> None:
    flat = flatten(update())
    ranked = Ranked(flat)
    total, runs = np.zeros(flat.size), 400
    for seed in range(runs):
        sparse = qsgd.quantize(flat, ranked, 500, seed)
        total[sparse.kept] += sparse.integers * sparse.scalars[0]
    unit = sparse.scalars[0]
    error = total[sparse.kept] / runs - flat[sparse.kept]
    assert np.abs(error).max() < 5 * unit / math.sqrt(runs) / 2  # five standard deviations
    assert not total[~sparse.kept].any()


def test_qsgd_levels_are_parts_of_the_norm() -> None:
    flat = np.array([3.0, -4.0, 0.0, 0.0], np.float32)
    sparse = qsgd.quantize(flat, Ranked(flat), 2, seed=1)
    levels = math.ceil(math.sqrt(2) / qsgd.STEP)
    assert sparse.scalars[0] == pytest.approx(5.0 / levels)
    assert np.abs(sparse.integers * sparse.scalars[0] - [3, -4]).max() <= 5.0 / levels
    assert np.sign(sparse.integers).tolist() == [1, -1]


# --- UVeQFed --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=20))
def test_nearest_is_nearest(points: list[tuple[float, float]]) -> None:
    given_ = np.array(points)
    found = uveqfed.nearest(given_) @ uveqfed.BASIS
    lattice = np.array(list(itertools.product(range(-25, 26), repeat=2))) @ uveqfed.BASIS
    best = np.linalg.norm(given_[:, None] - lattice[None], axis=2).min(1)
    assert np.linalg.norm(given_ - found, axis=1) == pytest.approx(best, abs=1e-9)


@given(st.lists(st.tuples(*[st.integers(-2047, 2047)] * 2), min_size=1, max_size=50))
def test_every_lattice_point_has_another_number(points: list[tuple[int, int]]) -> None:
    there = np.array(points)
    assert uveqfed.point(uveqfed.number(there)).tolist() == there.tolist()


def test_numbers_of_lattice_points_leave_none_out() -> None:
    square = np.array(list(itertools.product(range(-20, 20), repeat=2)))  # zigzag: 0 … 39 each
    assert sorted(uveqfed.number(square).tolist()) == list(range(-800, 800))


def test_uveqfed_sends_what_the_decoder_can_place() -> None:
    """Server and device draw the same dither: every pair comes back within its cell."""
    dense = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    payload = uveqfed.METHOD.encode({"w": dense}, Upload(0.3, 0, b"plan"))
    got = uveqfed.METHOD.decode(payload, {"w": (300, 1000)}, Upload(0.3, 0, b"plan")).values["w"]
    kept = got != 0
    assert kept.sum() > 2 * 2 * uveqfed.CHUNK  # more than one portion of the dither
    wanted, sent = dense[kept].double().numpy(), got[kept].double().numpy()
    scale = uveqfed.STEP * math.sqrt((wanted**2).mean())
    ends = len(sent) - len(sent) % 2
    error = (sent - wanted)[:ends].reshape(-1, 2)
    assert np.linalg.norm(error, axis=1).max() <= (1 / math.sqrt(3) + 1e-4) * scale


def test_one_huge_element_costs_uveqfed_a_coarser_step_and_no_more() -> None:
    flat = np.append(np.full(2_000_000, 1e-6), [1.0, -1.0]).astype(np.float32)
    sparse = uveqfed.quantize(flat, Ranked(flat), flat.size, 1)
    assert sparse.scalars[0] == pytest.approx(1 / uveqfed.FURTHEST)
    error = uveqfed.dequantize(sparse, 1) - flat
    assert np.abs(error).max() <= 1 / math.sqrt(3) / uveqfed.FURTHEST + 1e-6


def test_the_dither_cancels() -> None:
    """The error is uniform over the cell, whatever the value: its mean 0, its size 5/72 each."""
    flat, pairs = np.full(40_000, 0.123, np.float32), 20_000
    sparse = uveqfed.quantize(flat, Ranked(flat), flat.size, 1)
    scale = sparse.scalars[0]
    error = (uveqfed.dequantize(sparse, 1) - flat).reshape(pairs, 2) / scale
    assert np.linalg.norm(error, axis=1).max() <= 1 / math.sqrt(3) + 1e-5  # the covering radius
    assert error.mean(0) == pytest.approx(0.0, abs=0.01)
    assert (error**2).mean() == pytest.approx(5 / 72, rel=0.03)  # the hexagon's second moment
    wrong = uveqfed.dequantize(sparse, 2) - flat
    assert (wrong**2).mean() > 1.5 * scale**2 * (error**2).mean()


# --- FedHQ ----------------------------------------------------------------------------------------


def test_fedhq_is_unbiased() -> None:
    flat = flatten(update())
    runs, levels = 300, 40
    unit = float(np.abs(flat).max()) / levels
    total = np.zeros(flat.size)
    for seed in range(runs):
        sparse = fedhq.quantize(flat, levels, np.random.default_rng(seed).random(flat.size, "f4"))
        total[sparse.kept] += sparse.integers * sparse.scalars[0]
    assert np.abs(total / runs - flat).max() < 6 * unit / math.sqrt(runs) / 2


def test_fedhq_draws_fractions_of_a_level_where_the_rate_pays_for_no_more() -> None:
    random = torch.Generator().manual_seed(0)
    dense = {"w": torch.randn(100, 100, generator=random)}
    total, size = np.zeros(10_000), byte_budget(1 / 40, 10_000)
    for seed in range(300):
        payload = fedhq.encode(dense, Upload(1 / 40, seed, b""))
        assert 0.95 * size < len(payload) <= size
        got = vector(
            fedhq.METHOD.decode(payload, {"w": (100, 100)}, Upload(1 / 40, seed, b"")).values
        )
        assert np.abs(got).max() > vector(dense).max()
        total += got
    wanted = vector(dense)
    assert total @ wanted / (wanted @ wanted) / 300 == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", ["qsgd", "stc", "uveqfed"])
def test_ties_are_sent_as_far_as_the_rate_goes(name: str) -> None:
    signs = {"w": torch.randn(100, 100, generator=torch.Generator().manual_seed(0)).sign()}
    payload = methods.load(name).encode(signs, Upload(1 / 40, 0, b""))
    assert 0.9 * byte_budget(1 / 40, 10_000) < len(payload) <= byte_budget(1 / 40, 10_000)


def test_fedhq_weights_by_hand_and_best() -> None:
    beta, samples = np.array([1 / 32, 2 / 32]), np.ones(2)
    # One bit is one level, q = 0.55; two bits are three levels, q = 0.55/9.
    share = 1.55 / (1.55 + 1 + 0.55 / 9)
    assert fedhq.weigh(beta, beta, samples) == pytest.approx([1 - share, share])
    cost = 1 + 0.55 / np.array([1.0, 9.0])
    grid = np.linspace(0.01, 0.99, 99)
    assert share == pytest.approx(
        grid[np.argmin(grid**2 * cost[1] + (1 - grid) ** 2 * cost[0])], abs=0.006
    )


def test_fedhqs_weights_know_its_quantizer() -> None:
    """They come close to those that the measured errors would give."""
    given_, bits = update(), np.array([0.67, 1.0, 1.5, 1.9])
    errors = np.empty(bits.size)
    for i, beta in enumerate(bits / 32):
        payload = fedhq.METHOD.encode(given_, Upload(beta, 3, b"plan"))
        lost = vector(fedhq.METHOD.decode(payload, SHAPES, ISSUED).values) - vector(given_)
        errors[i] = lost @ lost / (vector(given_) @ vector(given_))
    modelled = fedhq.ERROR / (np.exp2(bits) - 1) ** 2
    assert (modelled / errors).max() < 2.5
    assert (errors / modelled).max() < 2.5
    weights = fedhq.weigh(np.ones(4), bits / 32, np.ones(4))
    bound, best, alike = (
        (p**2 * (1 + errors)).sum()
        for p in (weights, 1 / (1 + errors) / (1 / (1 + errors)).sum(), np.full(4, 0.25))
    )
    assert best <= bound < best + (alike - best) / 2


def test_fedhq_gives_better_channels_more_bits() -> None:
    config = load_preset("fmnist-iid")
    cohort = draw_cohort(config.fleet, seed=0, round_index=0)
    planned = fedhq.plan(cohort.devices, config.workload, config.limits_of("fedhq"))
    order = np.argsort(cohort.devices.rate_bps)
    assert (np.diff(planned.beta[order]) >= 0).all()
    assert planned.beta.mean() == pytest.approx(1 / 33, rel=0.01)


# --- HeteroFL -------------------------------------------------------------------------------------


def test_heterofl_widths_follow_the_processor_as_in_the_papers_table() -> None:
    config = load_preset("fmnist-iid")
    alphas, shares = [], []
    for number in range(30):
        cohort = draw_cohort(config.fleet, seed=0, round_index=number)
        planned = heterofl.plan(cohort.devices, config.workload, config.limits_of("heterofl"))
        order = np.argsort(cohort.devices.energy_coefficient)
        assert (np.diff(planned.alpha[order]) <= 0).all()
        alphas.append(planned.alpha.mean())
        shares.append((planned.alpha * planned.beta).mean())
        assert planned.latency_s.max() > config.fleet.latency_s  # it does not know the radio
    assert np.mean(alphas) == pytest.approx(0.79, abs=0.03)
    assert np.mean(shares) == pytest.approx(1 / 41, rel=0.02)


def test_the_scaler_knows_layers_that_compute_their_weights() -> None:
    odd = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    net = ElasticModel(nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 8), odd), torch.randn(2, 6))
    sub = net.shrink(0.3).module
    heterofl.prepare(sub, net.module)
    first, some = sub.get_submodule("0"), torch.randn(2, 6)
    width = first.eval()(some).shape[1]
    assert width < 20
    assert torch.allclose(first.train()(some), 20 / width * first.eval()(some))


@pytest.mark.parametrize("rule", ["fast", "sqrt"])
def test_the_scaler_makes_up_for_what_each_layer_lost(rule: str) -> None:
    net = ElasticModel(models.load("cnn").build(), torch.randn(2, 1, 28, 28), rule=rule)
    sub = net.shrink(0.4).module
    heterofl.prepare(sub, net.module)
    factors = []
    for name, layer in sub.named_children():
        weight, full = layer.get_parameter("weight"), net.module.get_parameter(f"{name}.weight")
        some = torch.randn(2, weight.shape[1], *weight.shape[2:])
        factors.append(full.shape[0] / weight.shape[0])
        assert torch.allclose(layer.train()(some), factors[-1] * layer.eval()(some))
    assert max(factors) > 1
    assert factors[-1] == 1  # as many classes as ever


def test_without_its_scaler_heterofl_trains_what_was_cut() -> None:
    net = ElasticModel(models.load("cnn").build(), torch.randn(2, 1, 28, 28))
    sub, some = net.shrink(0.4).module, torch.randn(2, 1, 28, 28)
    assert methods.load("heterofl/without-scaler").prepare is None
    assert torch.equal(sub.train()(some), sub.eval()(some))
    heterofl.prepare(sub, net.module)
    assert not torch.allclose(sub.train()(some), sub.eval()(some))
