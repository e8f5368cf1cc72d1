"""Liars: who they are, what they send, and that a server with rules survives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anycostfl.attacks import LIES, Attack, corrupt, liars
from anycostfl.records import totals
from anycostfl.simulate import run
from small_runs import small_config


def test_a_fifth_of_the_fleet_lies_the_same_way_every_time() -> None:
    chosen = liars(Attack("scale", 0.2), 60, seed=3)
    assert len(chosen) == 12
    assert set(chosen.values()) == {"scale"}
    assert chosen == liars(Attack("scale", 0.2), 60, seed=3)
    assert chosen.keys() != liars(Attack("scale", 0.2), 60, seed=4).keys()
    assert liars(Attack(), 60, seed=3) == {}


@pytest.mark.parametrize("kind", LIES)
def test_what_liars_send(kind: str) -> None:
    update = {"w": torch.randn(16, 5), "b": torch.randn(16), "temperature": torch.tensor(1.5)}
    assert corrupt(update, kind, seed=1)["temperature"].shape == ()
    lie = corrupt(update, kind, seed=1)["w"]
    told = corrupt(update, kind, seed=1)["w"]
    assert torch.equal(lie, told)
    if kind == "sign-flip":
        assert torch.equal(lie, -update["w"])
    if kind == "scale":
        assert torch.equal(lie, 100 * update["w"])
    if kind == "poison":
        assert not lie[:12].any()
        assert lie.norm() == pytest.approx(float(update["w"].norm()), rel=0.5)
    if kind == "inflate":
        assert torch.equal(lie[:15], update["w"][:15])
        assert lie[15].norm() > 10 * update["w"][15].norm()


def test_those_who_point_away_are_left_out_and_it_is_written_down(tmp_path: Path) -> None:
    more = ("attack.share=0.25", "run.rounds=2", "aggregation.agree=0.2", "fleet.devices=8")
    config = small_config(tmp_path, "attack.kind=sign-flip", "fleet.cohort=8", *more)
    lying = liars(config.attack, 8, config.run.seed)
    first = next(iter(run(config)))
    out = {d.device for d in first.devices if d.status.startswith("left out: agrees")}
    assert set(lying) <= out  # an honest one with odd data may be among them
    assert len(out) < 4
    assert totals([first])["left_out"] == len(out)


@pytest.mark.parametrize("kind", LIES)
def test_liars_do_not_stop_a_run(tmp_path: Path, kind: str) -> None:
    overrides = (f"attack.kind={kind}", "attack.share=0.25", "run.rounds=2")
    records = list(run(small_config(tmp_path, *overrides, "aggregation.combine=trimmed")))
    assert len(records) == 2
    assert all(r.accuracy is not None for r in records)
