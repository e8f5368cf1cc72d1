"""Adaptive server optimizers by hand and by their papers' properties; the averaged model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.methods import load
from anycostfl.runs import begin, journal, resume
from anycostfl.server.adaptive import FLOOR, SECOND_DECAY, adapt
from anycostfl.server.aggregate import Move, averaged
from anycostfl.simulate import simulate
from anycostfl.state import State
from small_runs import small_config, small_fleet


def move(*values: float | None) -> dict[str, Move]:
    """A step by element; None where nobody sent anything."""
    sent = torch.tensor([value is not None for value in values])
    return {"w": Move(torch.tensor([value or 0.0 for value in values]).double(), sent)}


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_two_steps_by_hand(kind: str) -> None:
    first, second = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    m, v = 0.0, FLOOR**2
    for delta in (0.5, -0.25):
        found, first, second = adapt(kind, 0.9, move(delta), first, second)
        m = 0.9 * m + 0.1 * delta
        if kind == "adam":
            v = SECOND_DECAY * v + (1 - SECOND_DECAY) * delta**2
        else:
            v -= (1 - SECOND_DECAY) * delta**2 * float(np.sign(v - delta**2))
        assert found["w"].step.item() == pytest.approx(m / (v**0.5 + FLOOR), rel=1e-5)
    assert first["w"].item() == pytest.approx(m, rel=1e-6)
    assert second["w"].item() == pytest.approx(v, rel=1e-6)


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_what_nobody_sent_stays_as_it_is(kind: str) -> None:
    _, first, second = adapt(kind, 0.9, move(1.0, 1.0), {}, {})
    found, after, then = adapt(kind, 0.9, move(1.0, None), first, second)
    assert found["w"].step[1] == 0
    assert not found["w"].sent[1]
    assert (after["w"][1], then["w"][1]) == (first["w"][1], second["w"][1])
    assert after["w"][0] != first["w"][0]


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_yogis_second_moment_moves_by_no_more_than_the_square(one: float, two: float) -> None:
    """What tells it from Adam: after a large step, v does not fall at once."""
    _, first, second = adapt("yogi", 0.0, move(one), {}, {})
    _, _, after = adapt("yogi", 0.0, move(two), first, second)
    change = abs(float(after["w"] - second["w"]))
    assert change <= (1 - SECOND_DECAY) * two**2 * (1 + 1e-4) + 1e-9


@given(st.floats(0.05, 100.0))
def test_steps_hardly_depend_on_the_scale_of_updates(scale: float) -> None:
    """Far above τ, as adaptive methods are meant to: the step's size is the optimizer's own."""
    one, *_ = adapt("adam", 0.0, move(1.0), {}, {})
    other, *_ = adapt("adam", 0.0, move(scale), {}, {})
    assert other["w"].step.item() == pytest.approx(one["w"].step.item(), rel=0.3)


def test_the_average_begins_at_the_first_model() -> None:
    names = ["w"]
    models: list[State] = [{"w": torch.tensor([x])} for x in (1.0, 3.0, 3.0)]
    average: State = {}
    seen = []
    for weights in models:
        average = averaged(average, weights, names, 0.5)
        seen.append(average["w"].item())
    assert seen == [1.0, 2.0, 2.5]


def test_what_is_evaluated_is_the_average(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.method=fedadam", "server_optimizer.average=0.5")
    experiment, fleet = small_fleet(config)
    with fleet as devices:
        *_, last = simulate(config)
        assert last.state.average.keys() == set(experiment.trained)
        deployed = {**last.state.weights, **last.state.average}
        found = devices.evaluate(deployed)
    assert found is not None
    assert last.record.metric == found.value
    assert any(not torch.equal(last.state.weights[n], t) for n, t in last.state.average.items())


@pytest.mark.parametrize("name", ["fedadam", "anycostfl+/tuned", "fedrolex"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, f"run.method={name}", "run.rounds=4")
    *_, whole = simulate(config)
    home = tmp_path / "run"
    rounds = journal(simulate(config), config, begin(home, config))
    next(rounds), next(rounds)
    rounds.close()
    again = resume(home)
    *_, last = journal(simulate(config, start=again.saved), config, again.writer)
    for kind in ("weights", "velocity", "second", "average"):
        one, other = getattr(whole.state, kind), getattr(last.state, kind)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[n], other[n]) for n in one), kind
    assert bool(last.state.second) == (name == "fedadam")
    assert bool(last.state.average) == (name == "anycostfl+/tuned")


def test_the_configuration_has_the_last_word() -> None:
    from anycostfl.config import load_preset

    config = load_preset("demo", ["server_optimizer.kind=yogi", "server_optimizer.momentum=0.3"])
    method = config.method_of("fedadam")
    assert (method.server, method.momentum) == ("yogi", 0.3)
    assert load("fedadam").server == "adam"
