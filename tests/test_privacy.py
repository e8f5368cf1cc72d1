"""Differential privacy: what one device can move is bounded, and what it spends is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anycostfl.config import load_preset
from anycostfl.errors import ConfigError
from anycostfl.flower.policy import PolicyError
from anycostfl.loop import run_rounds
from anycostfl.records.journal import format_record, parse_record
from anycostfl.records.round import Status, summarise
from anycostfl.rounds import close_round, first_state, open_round
from anycostfl.server.privacy import Privacy, clip_to, epsilon, private_means, privatise
from contributions import random_contribution, small_net
from small_runs import small_config, small_fleet
from test_policy import device

CENTRAL = ("privacy.mode=central", "privacy.clip=0.5", "privacy.noise=1.5")


def moved(norm: float, contributions: list[object]) -> torch.Tensor:
    """The sum of all moves without noise, as one vector, times the size of the cohort."""
    like = dict(small_net().module.named_parameters())
    still = Privacy("central", norm, 1e-30)
    random = torch.Generator().manual_seed(0)
    moves = private_means(like, contributions, still, 4, random)  # type: ignore[arg-type]
    assert all(bool(move.sent.all()) for move in moves.values())
    return torch.cat([4 * move.step.flatten() for move in moves.values()])


@settings(max_examples=25, deadline=None)
@given(
    alpha=st.floats(0.1, 1.0),
    share=st.floats(0.05, 1.0),
    scale=st.sampled_from((1e-9, 1.0, 1e12)),
    seed=st.integers(0, 99),
)
def test_one_device_moves_the_sum_by_at_most_the_clip(
    alpha: float, share: float, scale: float, seed: int
) -> None:
    """Whatever its width, its mask and the size of its update; the others stay as they are."""
    others: list[object] = [random_contribution(a, 0.3, i) for i, a in enumerate((0.4, 1.0, 0.7))]
    one = random_contribution(alpha, share, seed)
    values = {name: scale * v for name, v in one.update.values.items()}
    one = replace(one, update=replace(one.update, values=values), weight=1e6)
    with_it, without = moved(0.5, [*others, one]), moved(0.5, others)
    assert float((with_it - without).norm()) <= 0.5 * (1 + 1e-9)


def test_updates_are_clipped_by_their_norm_and_never_stretched() -> None:
    assert clip_to({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 10.0)["w"].item() == 3.0
    scaled = clip_to({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
    assert [scaled["w"].item(), scaled["b"].item()] == pytest.approx([0.6, 0.8])
    assert clip_to({"w": torch.zeros(3)}, 1.0)["w"].tolist() == [0.0] * 3


def test_noise_has_the_size_that_is_accounted_for() -> None:
    like = {"w": torch.zeros(200, 500)}
    random = torch.Generator().manual_seed(0)
    move = private_means(like, [], Privacy("central", 0.5, 3.0), 10, random)["w"]
    assert float(move.step.std()) == pytest.approx(3.0 * 0.5 / 10, rel=0.01)
    noisy = privatise(like, Privacy("local", 0.5, 3.0), random)["w"]
    assert float(noisy.std()) == pytest.approx(1.5, rel=0.01)


def exact(multiplier: float, rounds: int, delta: float) -> float:
    """ε of composed Gaussian mechanisms (Balle and Wang, 2018), by bisection."""
    phi, mu = NormalDist().cdf, math.sqrt(rounds) / multiplier
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        lost = phi(-middle / mu + mu / 2) - math.exp(middle) * phi(-middle / mu - mu / 2)
        low, high = (middle, high) if lost > delta else (low, middle)
    return low


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.1, 10), (4.0, 1), (0.8, 3)])
def test_epsilon_is_that_of_composed_gaussians(multiplier: float, rounds: int) -> None:
    pytest.importorskip("dp_accounting")
    assert epsilon(multiplier, rounds, 1e-5) == pytest.approx(exact(multiplier, rounds, 1e-5), 1e-3)


def test_a_private_run_counts_what_the_most_frequent_device_spent(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    config = small_config(tmp_path, *CENTRAL, "run.rounds=3")
    experiment, fleet = small_fleet(config)
    records = [result.record for result in run_rounds(experiment, fleet)]
    took_part = [d.device for r in records for d in r.devices if d.status is Status.OK]
    most = max(map(took_part.count, took_part))
    assert records[-1].epsilon == pytest.approx(exact(1.5, most, 1e-5), rel=1e-3)
    assert summarise("anycostfl", config.metric, None, records)["epsilon"] == records[-1].epsilon
    assert parse_record(format_record(records[-1])) == records[-1]


def test_noise_moves_every_trained_element_and_no_running_statistic(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    experiment, fleet = small_fleet(small_config(tmp_path, *CENTRAL))
    state = first_state(experiment)
    state, plan = open_round(experiment, state, fleet.offers(0, state.suspensions))
    closed, record = close_round(experiment, state, plan, fleet.perform(plan))
    for name in experiment.trained:
        assert bool((closed.weights[name] != state.weights[name]).all()), name
    again, _ = close_round(experiment, state, plan, fleet.perform(plan))
    assert all(torch.equal(again.weights[n], w) for n, w in closed.weights.items())
    assert len({d.weight for d in record.devices if d.alpha}) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["run.method=stc"], "error feedback breaks"),
        (["compression.feedback=true"], "error feedback breaks"),
        (["aggregation.agree=0.2"], "without aggregation.agree"),
        (["aggregation.combine=median"], "without aggregation.combine"),
        (["data.evaluate=devices"], "metrics tell about the data"),
    ],
)
def test_what_has_no_bound_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_preset("demo", ["privacy.mode=central", *settings])
    assert load_preset("demo", settings).privacy.mode == "none"


def test_an_owner_has_noise_on_updates_whatever_the_server_says(tmp_path: Path) -> None:
    plain, task = device(tmp_path)
    private, _ = device(tmp_path, clip_norm=0.1, noise=2.0)
    first, second = (private.perform(task, {}, None).payload for _ in range(2))
    assert plain.perform(task, {}, None).payload == plain.perform(task, {}, None).payload
    assert first != second  # the noise does not follow from the server's seed
    fed = replace(private, told=replace(private.told, feedback=True))
    with pytest.raises(PolicyError, match="only methods without it"):
        fed.perform(task, {}, None)
