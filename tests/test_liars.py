"""Rounds with few replies and liars among them: bounded by earlier rounds, or taken back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from anycostfl import methods
from anycostfl.config import load_preset
from anycostfl.device import Reply, Trained, learn_honestly
from anycostfl.experiment import load_data
from anycostfl.fleets.simulated import InProcess, SimulatedFleet
from anycostfl.loop import run_rounds
from anycostfl.metrics import MetricInfo, Score
from anycostfl.planning.draw import draw_cohort
from anycostfl.records.run import RunWriter
from anycostfl.rounds import (
    Offers,
    RoundPlan,
    first_state,
    has_collapsed,
    is_finite,
    keep_best,
    restored_state,
    with_score,
)
from anycostfl.runs import begin, journal, resume
from anycostfl.server.aggregate import LEAST_KNOWN, capped, clip_bound
from anycostfl.server.robust import Robustness, served
from anycostfl.server.suspensions import Suspensions
from anycostfl.state import State
from small_runs import small_config, small_fleet, small_holdings

FLEET = ("fleet.devices=4", "fleet.cohort=4", "fleet.energy_min_j=0.05")


@dataclass(frozen=True, slots=True)
class Liar:
    """A device that multiplies its update."""

    factor: float
    device: int

    def learn(self, runtime: Any, sub: Any, samples: Any, job: Any) -> Trained:
        trained = learn_honestly(runtime, sub, samples, job)
        factor = self.factor if job.device == self.device else 1.0
        update = {name: factor * tensor for name, tensor in trained.update.items()}
        return replace(trained, update=update)


@dataclass(slots=True)
class FewReplies:
    """A fleet in which only some devices answer from a round on, one of them a liar."""

    fleet: SimulatedFleet
    devices: InProcess
    answer: tuple[int, ...]
    since: int = 3
    scores: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def offers(self, number: int, suspensions: Suspensions) -> Offers:
        return self.fleet.offers(number, suspensions)

    def perform(self, plan: RoundPlan) -> Iterator[Reply]:
        if plan.number < self.since:
            yield from self.fleet.perform(plan)
            return
        self.devices.runtime.net.load(plan.model)
        for a in plan.assignments:
            if a.device in self.answer:
                yield self.devices.perform_one(a.job(None, plan.moved))
            else:
                yield Reply(a.device, missing="gone")

    def evaluate(self, weights: State) -> Score | None:
        return self.fleet.evaluate(weights)

    def memory(self) -> dict[int, State]:
        return {}


def moved(folder: Path, factor: float, answer: tuple[int, ...], rules: Robustness) -> list[float]:
    """How far the model moves in every round; device 0 lies from the fourth on."""
    config = replace(small_config(folder, *FLEET, "run.rounds=5"), aggregation=rules)
    experiment, fleet = small_fleet(config)
    liar: Any = Liar(factor, 0)
    holdings = small_holdings(config, load_data(config))
    few = FewReplies(fleet, InProcess(experiment.runtime, holdings, liar), answer)
    norms, before = [], first_state(experiment).weights
    before = {n: before[n].flatten().sort().values for n in experiment.trained}
    for result in run_rounds(experiment, few):
        after = {n: result.state.weights[n].flatten().sort().values for n in experiment.trained}
        total = sum(float((after[n] - before[n]).double().square().sum()) for n in after)
        norms.append(total**0.5)
        before = after
    return norms


REMEMBERING = Robustness(history=20)


def test_a_liar_alone_in_its_round_moves_the_model_no_further_than_earlier_ones(
    tmp_path: Path,
) -> None:
    open_, bounded = (moved(tmp_path, 1e6, (0,), r) for r in (Robustness(), REMEMBERING))
    assert open_[:3] == bounded[:3]
    assert open_[3] > 1e4 * open_[2]
    assert bounded[3] < 20 * max(bounded[:3])


def test_a_tiny_update_does_not_scale_an_honest_one_down(tmp_path: Path) -> None:
    open_, bounded = (moved(tmp_path, 1e-6, (0, 1), r) for r in (Robustness(), REMEMBERING))
    assert open_[3] < 1e-3 * open_[2]
    assert bounded[3] > 0.1 * bounded[2]


def test_bounds_follow_the_median_of_earlier_rounds_both_ways() -> None:
    earlier = [1.0] * LEAST_KNOWN
    assert clip_bound([1e6], 5.0, earlier) == 10.0
    assert clip_bound([1e-6, 1.0], 5.0, earlier) == 2.5
    assert clip_bound([1.2, 0.8, 1.1], 5.0, earlier) == 5.5
    assert clip_bound([1e6], 5.0, earlier[1:]) == 5e6  # too little is known yet
    assert clip_bound([1e6], 0.0, earlier) == np.inf


# --- a model that collapses -----------------------------------------------------------------------

HIGHER, LOWER = MetricInfo(), MetricInfo("loss", "", 1.0, higher_is_better=False)


@pytest.mark.parametrize(
    ("info", "earlier", "value", "collapsed"),
    [
        (HIGHER, [0.1, 0.3, 0.5, 0.55, 0.57], 0.03, True),
        (HIGHER, [0.1, 0.3, 0.5, 0.55, 0.57], 0.40, False),
        (HIGHER, [0.1, 0.3, 0.5, 0.57], 0.03, False),  # early evaluations say little
        (HIGHER, [0.1, 0.3], float("nan"), True),
        (HIGHER, [0.5] * 9, 0.4, False),  # nothing was gained
        (HIGHER, [0.5, 0.03, 0.55, 0.6, 0.6], 0.7, False),
        (LOWER, [2.0, 1.0, 0.9, 0.8, 0.7], 1.5, True),
        (LOWER, [2.0, 1.0, 0.9, 0.8, 0.7], 1.2, False),
        (LOWER, [2.0, 1.0, 0.9, 0.8, 0.7], float("inf"), True),
    ],
)
def test_what_a_collapse_is(
    info: MetricInfo, earlier: list[float], value: float, collapsed: bool
) -> None:
    assert has_collapsed(info, earlier, value) is collapsed


def test_a_model_that_is_not_finite_is_not_taken(tmp_path: Path) -> None:
    """Without rollback, every device fails in the rounds after."""
    far = "server_optimizer.step=1e12"
    for rules, finite in ((Robustness(clip=0.0), False), (Robustness(0.0, rollback=True), True)):
        config = replace(small_config(tmp_path, *FLEET, far, "run.rounds=2"), aggregation=rules)
        experiment, fleet = small_fleet(config)
        liar: Any = Liar(1e30, 0)
        holdings = small_holdings(config, load_data(config))
        few = FewReplies(fleet, InProcess(experiment.runtime, holdings, liar), (0,), since=0)
        results = list(run_rounds(experiment, few))
        assert is_finite(results[-1].state.weights) is finite
        assert [bool(r.record.remark) for r in results] == [finite] * 2


def test_a_collapsed_model_is_taken_back_and_the_journal_says_so(tmp_path: Path) -> None:
    config = small_config(tmp_path, *FLEET, "aggregation.rollback=true", "run.checkpoint_every=1")
    experiment, fleet = small_fleet(config)
    result = next(iter(run_rounds(experiment, fleet)))
    state, record = replace(result.state, metrics=()), result.record
    for value in (0.1, 0.3, 0.5, 0.55, 0.57):
        scored = with_score(replace(record, metric=None), Score(value, {}))
        state, scored = keep_best(experiment, state, scored)
        assert scored.remark == ""
    noise = {n: torch.randn_like(t) for n, t in state.weights.items()}
    fallen = replace(state, weights=noise, velocity=noise)
    back, said = keep_best(experiment, fallen, with_score(record, Score(0.03, {})))
    assert all(torch.equal(back.weights[n], w) for n, w in state.weights.items())
    assert back.velocity == {}
    assert said.metric == 0.57
    assert said.remark == "the model collapsed to 3.00 %: back to 57.00 %"


def test_what_defends_the_next_rounds_survives_a_restart(tmp_path: Path) -> None:
    rules = ("aggregation.rollback=true", "aggregation.history=2", "aggregation.clip=1.0")
    config = small_config(tmp_path, *rules, "run.rounds=6", "run.checkpoint_every=1")
    experiment, fleet = small_fleet(config)
    whole = list(run_rounds(experiment, fleet))
    assert len(whole[2].state.sizes) == 8
    rounds = journal(run_rounds(experiment, fleet), config, begin(tmp_path / "run", config))
    for _ in range(3):
        next(rounds)
    rounds.close()
    saved = resume(tmp_path / "run").saved
    assert saved.checkpoint is not None
    start = restored_state(experiment, saved.checkpoint, saved.records)
    known = whole[2].state
    assert (start.sizes, start.metrics) == (known.sizes, known.metrics)
    assert all(torch.equal(start.best[name], tensor) for name, tensor in known.best.items())
    again = list(run_rounds(experiment, fleet, start))
    assert [r.record for r in again] == [r.record for r in whole[3:]]


def test_what_is_off_leaves_nothing_in_journal_or_checkpoint(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    experiment, fleet = small_fleet(config)
    (result,) = run_rounds(experiment, fleet)
    kinds = {kind for kind, state in result.state.checkpoint().states.items() if state}
    assert kinds == {"model", "moved"}
    writer = RunWriter.create(tmp_path / "run", "")
    writer.append(result.record)
    assert b"remark" not in (writer.folder / "rounds.jsonl").read_bytes()


# --- claims and weights ---------------------------------------------------------------------------


def test_no_device_weighs_more_than_a_multiple_of_the_median() -> None:
    weights = np.array([0.1, 0.1, 0.1, 1e6])
    assert capped(weights, 4.0) == pytest.approx([1 / 7, 1 / 7, 1 / 7, 4 / 7])
    assert capped(weights, 0.0) is weights
    assert capped(np.zeros(0), 4.0).size == 0


def outvoted(claims: str, rate_bps: float) -> tuple[Iterable[float], float]:
    """What FedHQ plans for nine devices and one that claims this rate: β, and its own weight."""
    config = load_preset("demo", ["run.method=fedhq"])
    cohort = draw_cohort(replace(config.fleet, cohort=10), seed=0, round_index=0)
    rates = cohort.devices.rate_bps.copy()
    rates[0] = rate_bps
    devices = replace(cohort.devices, rate_bps=rates)
    limits = replace(config.limits_of("fedhq"), claims=claims)
    method = methods.load("fedhq")
    beta = method.plan(devices, config.workload, limits).beta
    weights = method.weigh(np.ones(10), beta, np.ones(10))
    return beta[1:], float(capped(weights, 4.0 if claims == "median" else 0.0)[0])


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_one_claimed_rate_moves_nobody_elses_plan() -> None:
    honest, _ = outvoted("median", 1e6)
    moved, own = outvoted("median", 1e18)
    assert list(moved) == pytest.approx(list(honest), rel=0.5)
    assert own < 0.4
    starved, own = outvoted("mean", 1e18)
    assert max(starved) < 1e-9
    assert own > 0.99


def test_real_devices_are_served_with_every_defence() -> None:
    rules = served(Robustness(history=3))
    assert (rules.history, rules.max_weight, rules.rollback) == (3, 4.0, True)
    assert served(Robustness(max_weight=0.0, rollback=False)).max_weight == 0.0
