"""Attackers: which devices they are, what they send, and that a robust server survives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anycostfl import run
from anycostfl.config import Attack
from anycostfl.errors import ConfigError
from anycostfl.experiment import build_experiment, load_data
from anycostfl.fleets.attackers import ATTACKS, choose_attackers, corrupt, reject_attacks
from anycostfl.fleets.simulated import SimulatedFleet
from anycostfl.loop import run_rounds
from anycostfl.records.round import Status, summarise
from small_runs import small_config, small_holdings


def test_a_fifth_of_the_fleet_attacks_and_always_the_same_devices() -> None:
    chosen = choose_attackers(Attack("scale", 0.2), 60, seed=3)
    assert chosen is not None
    assert len(chosen.kinds) == 12
    assert set(chosen.kinds.values()) == {"scale"}
    assert chosen == choose_attackers(Attack("scale", 0.2), 60, seed=3)
    assert chosen != choose_attackers(Attack("scale", 0.2), 60, seed=4)
    assert choose_attackers(Attack(), 60, seed=3) is None


def test_an_attack_is_refused_where_devices_are_real() -> None:
    reject_attacks(Attack())
    with pytest.raises(ConfigError, match="given scale, must be none"):
        reject_attacks(Attack("scale"))


UPDATE = {"w": torch.arange(80.0).view(16, 5) - 40, "b": torch.ones(16), "scale": torch.tensor(1.5)}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_corrupted_update_follows_from_its_seed_and_has_the_updates_shapes(kind: str) -> None:
    false, again = corrupt(UPDATE, kind, seed=1), corrupt(UPDATE, kind, seed=1)
    assert {n: t.shape for n, t in false.items()} == {n: t.shape for n, t in UPDATE.items()}
    assert all(torch.equal(false[name], again[name]) for name in UPDATE)


def test_attackers_flip_an_update_or_make_it_large() -> None:
    assert torch.equal(corrupt(UPDATE, "sign-flip", seed=1)["w"], -UPDATE["w"])
    assert torch.equal(corrupt(UPDATE, "scale", seed=1)["w"], 100 * UPDATE["w"])


def test_attackers_send_noise() -> None:
    noise, update = corrupt(UPDATE, "random", seed=1)["w"], UPDATE["w"]
    assert noise.norm() == pytest.approx(10 * float(update.norm()), rel=0.3)
    assert abs(torch.cosine_similarity(noise.flatten(), update.flatten(), 0)) < 0.4


def test_attackers_aim_at_the_last_channels() -> None:
    poison, inflated = (corrupt(UPDATE, kind, seed=1)["w"] for kind in ("poison", "inflate"))
    assert not poison[:12].any()
    assert poison.norm() == pytest.approx(float(UPDATE["w"].norm()), rel=0.5)
    assert torch.equal(inflated[:15], UPDATE["w"][:15])
    assert inflated[15].norm() > 10 * UPDATE["w"][15].norm()


def test_devices_that_point_away_are_excluded_and_recorded(tmp_path: Path) -> None:
    more = ("attack.share=0.25", "run.rounds=2", "aggregation.agree=0.2", "fleet.devices=8")
    config = small_config(tmp_path, "attack.kind=sign-flip", "fleet.cohort=8", *more)
    attackers = choose_attackers(config.attack, 8, config.run.seed)
    assert attackers is not None
    first = next(iter(run(config)))
    out = {d.device for d in first.devices if d.status is Status.EXCLUDED}
    assert set(attackers.kinds) <= out  # an honest one with odd data may be among them
    assert len(out) < 4
    assert all("agrees with the others" in d.detail for d in first.devices if d.device in out)
    assert summarise("anycostfl", config.metric, 1.0, [first])["updates_excluded"] == len(out)


def test_attackers_do_not_stop_a_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2", "aggregation.combine=trimmed")
    dataset = load_data(config)
    honest, holdings = build_experiment(config, dataset), small_holdings(config, dataset)
    for kind in ATTACKS:
        attacked = replace(config, attack=Attack(kind, 0.25))
        experiment = replace(honest, config=attacked)
        results = list(run_rounds(experiment, SimulatedFleet(experiment, holdings)))
        assert len(results) == 2
        assert all(result.record.metric is not None for result in results)
        assert all(w.isfinite().all() for w in results[-1].state.weights.values())
