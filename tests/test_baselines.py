"""FedNova, FedProx, FedRolex, FjORD and AnycostFL+'s variants against what their papers claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anycostfl import methods
from anycostfl.config import load_preset
from anycostfl.data.samples import Samples
from anycostfl.device import Training, nested_in, nested_levels, train
from anycostfl.errors import NotShrinkableError
from anycostfl.methods import anycostfl_plus, fednova, fjord
from anycostfl.models.vit import Vit
from anycostfl.planning.draw import draw_cohort
from anycostfl.records.round import Status
from anycostfl.rounds import channel_order, first_state, flops_ratio, permuted
from anycostfl.shrink import ElasticModel
from anycostfl.shrink.widths import take
from anycostfl.simulate import simulate
from anycostfl.tasks import Task, no_data
from small_runs import small_config, small_fleet

# --- FedNova --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=8), st.integers(1, 50), st.floats(0, 0.95))
def test_with_equal_work_fednova_is_fedavg(
    weights: list[float], steps: int, momentum: float
) -> None:
    factors = fednova.rescale(np.array(weights), np.full(len(weights), float(steps)), momentum)
    assert factors == pytest.approx(1.0)


def test_steps_with_momentum_reach_as_far_as_they_do() -> None:
    for momentum in (0.0, 0.5, 0.9):
        velocity = distance = 0.0
        for count in range(1, 6):
            velocity = momentum * velocity + 1.0
            distance += velocity
            assert fednova.accumulated(np.array([float(count)]), momentum)[0] == pytest.approx(
                distance
            )


def test_on_quadratics_fednova_finds_the_optimum_and_fedavg_does_not() -> None:
    """The paper's example: two devices, one does more local steps on ½(w − c)²."""
    centres, steps, rate = np.array([0.0, 1.0]), np.array([2.0, 20.0]), 0.01
    weights = np.array([0.5, 0.5])

    def limit(factors: np.ndarray) -> float:
        w = 5.0
        for _ in range(3000):
            updates = (w - centres) * (1 - (1 - rate) ** steps)
            w -= float((weights * factors * updates).sum())
        return w

    assert limit(fednova.rescale(weights, steps, 0.0)) == pytest.approx(0.5, abs=0.05)
    assert limit(np.ones(2)) > 0.85


# --- FedProx --------------------------------------------------------------------------------------


def local_update(proximal: float, epochs: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    module = nn.Linear(3, 2, bias=False)
    random = torch.Generator().manual_seed(0)
    data = Samples(torch.randn(8, 3, generator=random), torch.arange(8) % 2)
    training = Training(learning_rate=0.5, batch=8)
    task = Task(load=no_data)
    return train(module, data, task, training, 1, epochs=epochs, proximal=proximal)["weight"]


def test_the_first_step_knows_no_proximal_term() -> None:
    assert torch.equal(local_update(1.0), local_update(0.0))


def test_the_second_step_is_pulled_back_by_rate_times_mu() -> None:
    """w₂ = w₁ − η(∇F(w₁) + μ(w₁ − w₀)): the update is smaller by η·μ·(w₀ − w₁)."""
    one, free, pulled = local_update(0.0), local_update(0.0, 2), local_update(0.25, 2)
    assert torch.allclose(free - pulled, 0.5 * 0.25 * one, atol=1e-7)


def test_a_stronger_term_keeps_closer_to_the_global_model() -> None:
    sizes = [float(local_update(mu, 30).norm()) for mu in (0.0, 0.1, 1.0)]
    assert sizes == sorted(sizes, reverse=True)


# --- FedRolex -------------------------------------------------------------------------------------


def test_the_window_rolls_over_all_channels_and_comes_back(tmp_path: Path) -> None:
    """S_t = {t, …, t + k − 1} mod K, and after K rounds every channel was held equally often."""
    experiment, _ = small_fleet(small_config(tmp_path, "run.method=fedrolex"))
    state, group = first_state(experiment), "conv1"
    size = len(experiment.net.sorting_order(state.weights)[group])
    held, kept = np.zeros(size), size // 4
    for number in range(size):
        state = replace(state, rounds=number)
        state = permuted(experiment, state, channel_order(experiment, state))
        window = [int(i) for i in state.moved[group][:kept]]
        assert window == [(number + i) % size for i in range(kept)]
        held[window] += 1
    assert np.all(held == kept)


# --- FjORD ----------------------------------------------------------------------------------------


def test_levels_below_the_devices_own_take_part() -> None:
    assert nested_levels(fjord.LEVELS, 0.8) == [0.25, 0.5, 0.75]
    assert nested_levels(fjord.LEVELS, 0.25) == []
    assert nested_levels((), 1.0) == []


@pytest.mark.parametrize(("least", "wanted"), [(0.25, [0.25, 0.375, 0.5, 0.625]), (0.4, None)])
def test_a_step_costs_the_mean_of_its_levels(least: float, wanted: list[float] | None) -> None:
    held = np.array(fjord.levels(least))
    assert held[0] == least
    means = fjord.mean_level(held, least)
    assert np.all(np.diff(means) > 0)
    if wanted:
        assert means.tolist() == wanted


def test_what_is_charged_is_the_mean_over_the_widths_that_are_trained(tmp_path: Path) -> None:
    experiment, _ = small_fleet(small_config(tmp_path, "run.method=fjord"))
    net = experiment.net
    parts = [net.plan(level).flops_ratio for level in fjord.LEVELS]
    assert flops_ratio(experiment, net.plan(1.0)) == pytest.approx(np.mean(parts))
    assert flops_ratio(experiment, net.plan(0.25)) == parts[0]


def test_nested_steps_train_prefixes_and_nothing_else() -> None:
    """Two steps, one of them narrow: only the wide one moves what the narrow model lacks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net = ElasticModel(module, torch.randn(2, 4))
    random = torch.Generator().manual_seed(0)
    data = Samples(torch.randn(8, 4, generator=random), torch.arange(8) % 2)
    training, task = Training(learning_rate=0.1, batch=8), Task(load=no_data)

    def trained(epochs: int) -> dict[str, torch.Tensor]:
        sub = net.shrink(1.0)
        narrower = [nested_in(sub, net.shrink(0.25))]
        return train(sub.module, data, task, training, 5, epochs=epochs, nested=narrower)

    width = net.plan(0.25).widths["0"]
    assert 0 < width < 8
    first, both = trained(1), trained(2)
    outer = [(update["0.weight"][width:] != 0).any().item() for update in (first, both)]
    inner = [(update["0.weight"][:width] != 0).any().item() for update in (first, both)]
    assert inner == [True, True]
    assert outer[1]
    wide_once = first if outer[0] else {n: both[n] - first[n] for n in both}
    assert (wide_once["0.weight"][width:] != 0).any()


def test_fjord_runs_within_budgets_where_half_of_its_levels_are_narrow(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, "run.method=fjord", "run.budgets=strict", "run.rounds=2", "limits.alpha_min=0.25"
    )
    records = [result.record for result in simulate(config)]
    done = [d for r in records for d in r.devices if d.status is Status.OK]
    assert {d.alpha for d in done} <= set(fjord.LEVELS)


# --- FedAvg's variants, AnycostFL+'s --------------------------------------------------------------


def strict_plan(name: str, *more: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    config = load_preset("demo", ["run.budgets=strict", *more])
    devices = draw_cohort(config.fleet, seed=0, round_index=0).devices
    planned = config.method_of(name).plan(devices, config.workload, config.limits_of(name))
    return planned.alpha, planned.work, planned.feasible


def test_one_width_is_one_width_and_the_able_do_all_their_work() -> None:
    alpha, work, feasible = strict_plan("fedavg/one-width")
    assert len(set(alpha[feasible])) == 1
    assert np.all(work[feasible] == 1)
    alpha, work, feasible = strict_plan("fedavg/the-able")
    assert 0 < feasible.sum() < len(feasible)
    assert np.all(alpha[feasible] == 1)
    assert np.all(work[feasible] == 1)


def test_no_sub_model_below_the_least_width() -> None:
    alpha, work, feasible = strict_plan(
        "anycostfl+/tuned", "fleet.energy_min_j=0.01", "fleet.energy_max_j=0.07"
    )
    assert feasible.all()
    assert alpha.min() == anycostfl_plus.LEAST_WIDTH
    assert np.all(work[alpha > anycostfl_plus.LEAST_WIDTH] > 1 - 1e-6)
    assert work.max() <= 1


def test_further_work_only_where_the_width_leaves_slack() -> None:
    alpha, work, _ = strict_plan("anycostfl+/extra-work", "fleet.energy_max_j=4.0")
    assert work.max() > 1
    assert np.all(work <= anycostfl_plus.MOST_WORK)
    assert np.all(alpha[work > 1] == 1)


def test_anycostfl_plus_is_what_it_was() -> None:
    """Presets and saved runs of this name keep their meaning (decision 0075)."""
    method = methods.load("anycostfl+")
    assert (method.momentum, method.average, method.by_samples) == (0.5, 0.0, False)
    assert method.plan is anycostfl_plus.plan


def test_a_narrower_model_is_found_inside_a_wider_one_where_heads_are_cut() -> None:
    """Each head keeps its first channels, so the narrower model is no prefix of the wider one."""
    torch.manual_seed(0)
    net = ElasticModel(Vit(), torch.randn(2, 3, 32, 32))
    wide, narrow = net.shrink(0.6), net.shrink(0.3)
    nested = nested_in(wide, narrow)
    held, whole = dict(wide.module.named_parameters()), dict(net.module.named_parameters())
    for name, index in nested.index.items():
        wanted = take(whole[name], narrow.plan.index[name])
        assert torch.equal(take(held[name], index), wanted)
    with pytest.raises(NotShrinkableError, match="no part"):
        nested_in(narrow, wide)
