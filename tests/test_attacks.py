"""Liars: who they are, what they send, and that a server with rules survives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anycostfl.fleets.attackers import LIES, Attack, corrupt, liars
from anycostfl.report import summarise
from anycostfl.simulate import run
from small_runs import small_config


def test_a_fifth_of_the_fleet_lies_the_same_way_every_time() -> None:
    chosen = liars(Attack("scale", 0.2), 60, seed=3)
    assert len(chosen) == 12
    assert set(chosen.values()) == {"scale"}
    assert chosen == liars(Attack("scale", 0.2), 60, seed=3)
    assert chosen.keys() != liars(Attack("scale", 0.2), 60, seed=4).keys()
    assert liars(Attack(), 60, seed=3) == {}


UPDATE = {"w": torch.arange(80.0).view(16, 5) - 40, "b": torch.ones(16), "scale": torch.tensor(1.5)}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_follows_from_its_seed_and_has_the_updates_shapes(kind: str) -> None:
    lie, again = corrupt(UPDATE, kind, seed=1), corrupt(UPDATE, kind, seed=1)
    assert {n: t.shape for n, t in lie.items()} == {n: t.shape for n, t in UPDATE.items()}
    assert all(torch.equal(lie[name], again[name]) for name in UPDATE)


def test_liars_turn_an_update_round_or_make_it_large() -> None:
    assert torch.equal(corrupt(UPDATE, "sign-flip", seed=1)["w"], -UPDATE["w"])
    assert torch.equal(corrupt(UPDATE, "scale", seed=1)["w"], 100 * UPDATE["w"])


def test_liars_send_noise() -> None:
    lie, update = corrupt(UPDATE, "random", seed=1)["w"], UPDATE["w"]
    assert lie.norm() == pytest.approx(10 * float(update.norm()), rel=0.3)
    assert abs(torch.cosine_similarity(lie.flatten(), update.flatten(), 0)) < 0.4


def test_liars_aim_at_the_last_channels() -> None:
    poison, inflated = (corrupt(UPDATE, kind, seed=1)["w"] for kind in ("poison", "inflate"))
    assert not poison[:12].any()
    assert poison.norm() == pytest.approx(float(UPDATE["w"].norm()), rel=0.5)
    assert torch.equal(inflated[:15], UPDATE["w"][:15])
    assert inflated[15].norm() > 10 * UPDATE["w"][15].norm()


def test_those_who_point_away_are_left_out_and_it_is_written_down(tmp_path: Path) -> None:
    more = ("attack.share=0.25", "run.rounds=2", "aggregation.agree=0.2", "fleet.devices=8")
    config = small_config(tmp_path, "attack.kind=sign-flip", "fleet.cohort=8", *more)
    lying = liars(config.attack, 8, config.run.seed)
    first = next(iter(run(config)))
    out = {d.device for d in first.devices if d.status.startswith("left out: agrees")}
    assert set(lying) <= out  # an honest one with odd data may be among them
    assert len(out) < 4
    assert summarise("anycostfl", 1.0, [first])["updates_left_out"] == len(out)


@pytest.mark.parametrize("kind", LIES)
def test_liars_do_not_stop_a_run(tmp_path: Path, kind: str) -> None:
    overrides = (f"attack.kind={kind}", "attack.share=0.25", "run.rounds=2")
    records = list(run(small_config(tmp_path, *overrides, "aggregation.combine=trimmed")))
    assert len(records) == 2
    assert all(r.accuracy is not None for r in records)
