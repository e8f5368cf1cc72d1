"""Rounds on the server: pure halves, assignments, the gate, exclusion, and suspended devices."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from anycostfl import methods
from anycostfl.codec.frame import OVERHEAD
from anycostfl.config import fingerprint, to_toml
from anycostfl.device import Reply
from anycostfl.experiment import Experiment, build_experiment, load_data
from anycostfl.fleets.attackers import Attackers
from anycostfl.fleets.simulated import InProcess, SimulatedFleet
from anycostfl.loop import RoundResult, run_rounds
from anycostfl.methods import elements
from anycostfl.metrics import MetricInfo, Score
from anycostfl.planning.draw import Cohort, draw_cohort
from anycostfl.records.round import Status, summarise
from anycostfl.records.run import RunWriter
from anycostfl.rounds import (
    MOST_DUPLICATES,
    Assignment,
    Outcome,
    RoundPlan,
    ServerState,
    _judge,
    accepted,
    assign,
    close_round,
    exclude,
    first_state,
    one_line,
    open_round,
    payload_binding,
    receive,
    restored_state,
)
from anycostfl.runs import journal, resume
from anycostfl.server.robust import DEFENCE
from anycostfl.server.suspensions import Agreement, Suspensions, suspensions_after
from anycostfl.state import State
from small_runs import small_config, small_fleet, small_holdings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rounds")


@dataclass(frozen=True, slots=True, eq=False)
class OpenRound:
    """A round that is open, and what its devices replied."""

    experiment: Experiment
    fleet: SimulatedFleet
    state: ServerState
    plan: RoundPlan
    replies: Sequence[Reply]

    def receive(self, *replies: Reply, of: Sequence[Assignment] | None = None) -> list[Outcome]:
        assignments = self.plan.assignments if of is None else of
        return receive(self.experiment.method, assignments, replies)


@functools.cache
def first_round(folder: Path, *more: str) -> OpenRound:
    experiment, fleet = small_fleet(small_config(folder, *more))
    return opened(experiment, fleet, first_state(experiment))


def opened(experiment: Experiment, fleet: SimulatedFleet, state: ServerState) -> OpenRound:
    state, plan = open_round(experiment, state, fleet.offers(state.rounds, state.suspensions))
    return OpenRound(experiment, fleet, state, plan, list(fleet.perform(plan)))


def statuses(outcomes: Iterable[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


# --- state in, state out --------------------------------------------------------------------------

EVERYTHING = ("compression.downlink=0.1", "server_optimizer.momentum=0.9", "aggregation.agree=0.2")


def snapshot(value: object) -> object:
    """A copy of nested data that compares by content."""
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        return str(array.dtype), array.shape, array.tobytes()
    if is_dataclass(value):
        return [(item.name, snapshot(getattr(value, item.name))) for item in fields(value)]
    if isinstance(value, Mapping):
        return [(key, snapshot(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return value


def second_round(folder: Path) -> OpenRound:
    """With momentum, a public model, agreements and a ledger from the first one."""
    first = first_round(folder, *EVERYTHING)
    state, _ = close_round(first.experiment, first.state, first.plan, first.replies)
    return opened(first.experiment, first.fleet, state)


def scribble(experiment: Experiment) -> None:
    """Change the weights that the traced model holds: they are scratch space."""
    experiment.net.load({n: t + 1 for n, t in experiment.initial_weights.items()})


def test_open_round_is_pure(folder: Path) -> None:
    first = first_round(folder, *EVERYTHING)
    state, _ = close_round(first.experiment, first.state, first.plan, first.replies)
    assert state.velocity
    assert state.public
    assert state.ledger.steps
    offers = first.fleet.offers(1, state.suspensions)
    before = snapshot((state, offers))
    once = snapshot(open_round(first.experiment, state, offers))
    scribble(first.experiment)
    assert snapshot(open_round(first.experiment, state, offers)) == once
    assert snapshot((state, offers)) == before
    after, plan = open_round(first.experiment, state, offers)
    assert (after.rounds, plan.number) == (1, 1)


def test_close_round_is_pure_and_the_order_of_replies_does_not_matter(folder: Path) -> None:
    second = second_round(folder)
    given = second.state, second.plan, second.replies
    before = snapshot(given)
    once = snapshot(close_round(second.experiment, *given))
    scribble(second.experiment)
    assert snapshot(close_round(second.experiment, *given)) == once
    backwards = close_round(second.experiment, second.state, second.plan, second.replies[::-1])
    assert snapshot(backwards) == once
    assert snapshot(given) == before
    assert backwards[0].rounds == 2
    assert backwards[0].velocity.keys() == second.state.velocity.keys()


def test_too_few_replies_move_nothing(folder: Path) -> None:
    first = first_round(folder)
    state, record = close_round(
        first.experiment, first.state, first.plan, first.replies, min_replies=5
    )
    assert {d.status for d in record.devices} == {Status.UNUSED}
    assert record.devices[0].detail == "4 usable replies, at least 5 needed"
    assert snapshot(state.weights) == snapshot(first.state.weights)


# --- assignments ----------------------------------------------------------------------------------


def test_a_thousand_assignments_are_distinct_and_do_not_depend_on_their_order(folder: Path) -> None:
    many = ("fleet.devices=1000", "fleet.cohort=1000", "fleet.bandwidth_hz=1e10")
    experiment = build_experiment(small_config(folder, *many))
    config = experiment.config

    def assigned(cohort: Cohort) -> list[Assignment]:
        plan = experiment.method.plan(cohort.devices, config.workload, experiment.limits)
        return assign(experiment, cohort, plan, number=3)

    cohort = draw_cohort(config.fleet, seed=0, round_index=3)
    order = np.random.default_rng(0).permutation(1000)
    shuffled = Cohort(cohort.index[order], cohort.distance_m[order], cohort.devices.take(order))
    one, other = assigned(cohort), assigned(shuffled)
    assert len(one) == 1000
    seeds = {a.seed for a in one} | {a.upload.seed for a in one}
    assert len(seeds) == 2000
    assert len({a.upload.binding for a in one}) == 1000
    assert [a.device for a in other] == cohort.index[order].tolist()
    by_device = {a.device: a for a in one}
    for a in other:
        same = by_device[a.device]
        assert a.weight == pytest.approx(same.weight, rel=1e-12)
        assert (a.upload, a.seed, a.download) == (same.upload, same.seed, same.download)
        assert (a.plan.widths, a.shapes) == (same.plan.widths, same.shapes)
    again = assigned(cohort)
    assert [(a.position, a.weight) for a in again] == [(a.position, a.weight) for a in one]


def test_assignments_of_other_rounds_and_seeds_have_other_seeds_and_bindings(folder: Path) -> None:
    first = first_round(folder)
    other = build_experiment(small_config(folder, "run.seed=1"))
    rounds = [
        assign(experiment, first.plan.offers.cohort, first.plan.strategies, number)
        for experiment, number in ((first.experiment, 0), (first.experiment, 1), (other, 0))
    ]
    everything = [a for assignments in rounds for a in assignments]
    assert len(everything) == 12
    assert len({a.seed for a in everything} | {a.upload.seed for a in everything}) == 24
    assert len({a.upload.binding for a in everything}) == 12


def test_devices_are_told_the_learning_rate_of_the_round(folder: Path) -> None:
    experiment, fleet = small_fleet(
        small_config(folder, "training.schedule=cosine", "training.warmup=2", "run.rounds=6")
    )
    training, rates = experiment.config.training, list[float]()
    for number in range(6):
        state = replace(first_state(experiment), rounds=number)
        _, plan = open_round(experiment, state, fleet.offers(number, state.suspensions))
        told = {a.job(None, {}).learning_rate for a in plan.assignments}
        assert told == {training.rate_in(number, 6)}
        rates += told
    assert len(set(rates)) == 6
    assert max(rates) == training.learning_rate == rates[2]


def test_a_simulated_device_trains_at_the_rate_it_is_told(folder: Path) -> None:
    first = first_round(folder)
    [slower] = [replace(a, learning_rate=1e-9) for a in first.plan.assignments[:1]]
    [reply] = first.fleet.perform(replace(first.plan, assignments=[slower]))
    [small], [usual] = (first.receive(r, of=[slower]) for r in (reply, first.replies[0]))
    assert small.status is usual.status is Status.OK
    assert 0 < small.size < 1e-6 * usual.size


def test_what_samples_are_prepared_by_is_kept_once_the_fleet_has_said_it(folder: Path) -> None:
    first = first_round(folder)
    offers, known = first.plan.offers, {"mean": torch.ones(1)}
    assert not first.state.fitted
    state, _ = open_round(first.experiment, first.state, replace(offers, fitted=known))
    assert state.fitted is known
    later, _ = open_round(first.experiment, state, offers)  # it does not say it again
    assert later.fitted is known
    point = later.checkpoint()
    assert point["fitted"] == known
    assert restored_state(first.experiment, point, []).fitted == known


def test_a_payload_belongs_to_its_round_wherever_the_data_lies(folder: Path) -> None:
    here, there = small_config(folder), small_config(folder, "data.path=/elsewhere")
    plan = first_round(folder).plan.assignments[0].plan
    bindings = {payload_binding(fingerprint(config), 0, 1, plan) for config in (here, there)}
    assert len(bindings) == 1


# --- the gate -------------------------------------------------------------------------------------


def test_control_characters_of_devices_do_not_reach_the_terminal() -> None:
    said = "disk full\x1b[2J\x1b]0;owned\x07 \u202e\n all  fine"
    assert one_line(said) == "disk full\ufffd[2J\ufffd]0;owned\ufffd \ufffd all fine"
    assert len(one_line("x" * 1000)) == 300


def test_the_first_reply_of_a_device_counts_and_every_further_one_is_refused(folder: Path) -> None:
    first = first_round(folder)
    replies = first.replies
    other = replace(replies[1], payload=b"something else")
    outcomes = first.receive(*reversed(replies), other, *[replies[1]] * 20)
    assert [o.assignment for o in outcomes] == list(first.plan.assignments)
    assert statuses(outcomes) == [Status.OK] * 4
    assert outcomes[1].reply.payload == replies[1].payload
    assert [o.duplicates for o in outcomes] == [0, MOST_DUPLICATES, 0, 0]


@pytest.mark.parametrize("method", methods.names())
def test_the_payload_of_another_device_is_refused(folder: Path, method: str) -> None:
    first = first_round(folder, f"run.method={method}")
    one, two = first.replies[:2]
    swapped = replace(one, payload=two.payload), replace(two, payload=one.payload)
    outcomes = first.receive(*swapped, *first.replies[2:])
    assert statuses(outcomes) == [Status.REFUSED] * 2 + [Status.OK] * 2


def test_the_same_round_of_an_experiment_with_other_settings_is_another_round(folder: Path) -> None:
    first, other = first_round(folder), first_round(folder, "training.learning_rate=0.01")
    assert statuses(first.receive(*first.replies)) == [Status.OK] * 4
    for outcome in other.receive(*first.replies):
        assert (outcome.status, outcome.cause) == (Status.REFUSED, "foreign")


def test_what_a_device_says_is_cut_to_one_short_line(folder: Path) -> None:
    first = first_round(folder)
    device = first.replies[0].device
    for reply, status, cause in (
        (Reply(device, error="bad\n" * 100_000), Status.FAILED, ""),
        (Reply(device, missing="bad\n" * 100_000), Status.MISSING, ""),
        (Reply(device, unreadable="bad\n" * 100_000), Status.REFUSED, "unreadable"),
    ):
        (outcome,) = first.receive(reply, of=first.plan.assignments[:1])
        assert (outcome.status, outcome.cause) == (status, cause)
        assert outcome.detail.startswith("bad bad")
        assert len(outcome.detail) <= 300


def test_a_payload_is_no_longer_than_planned_and_of_the_codec_that_was_asked_for(
    folder: Path,
) -> None:
    first = first_round(folder)
    assignment, reply = first.plan.assignments[0], first.replies[0]
    planned = int(assignment.upload.beta * 4 * elements(assignment.shapes))
    assert len(reply.payload) <= planned
    for size in (planned + OVERHEAD + 1, 20_000_000):
        (outcome,) = first.receive(replace(reply, payload=bytes(size)), of=[assignment])
        assert (outcome.status, outcome.cause) == (Status.REFUSED, "malformed")
        assert outcome.detail.startswith("a payload of this plan has at most ")
    other = replace(assignment, upload=replace(assignment.upload, codec="lowrank"))
    (sent,) = first.fleet.perform(replace(first.plan, assignments=[other]))
    assert statuses(first.receive(sent, of=[other])) == [Status.OK]
    (outcome,) = first.receive(sent, of=[assignment])
    assert (outcome.status, outcome.cause) == (Status.REFUSED, "malformed")
    assert outcome.detail == "the payload is lowrank; kernel was asked for"


def test_what_is_not_compressed_is_never_too_long(folder: Path) -> None:
    """A sub-model's share of the parameters may be more than its share α of S."""
    uncompressed = ("run.method=anycostfl/without-fgc", "workload.size_bits=1000")
    first = first_round(folder, *uncompressed)
    assert set(statuses(first.receive(*first.replies))) == {Status.OK}


# --- exclusion ------------------------------------------------------------------------------------


@functools.cache
def outcomes_of(folder: Path, *flipped: int) -> tuple[Experiment, ServerState, list[Outcome]]:
    """A first round in which some places of the cohort flip the sign of their updates."""
    config = replace(small_config(folder), aggregation=DEFENCE)
    experiment, fleet = small_fleet(config)
    state = first_state(experiment)
    state, plan = open_round(experiment, state, fleet.offers(0, state.suspensions))
    attackers = Attackers({plan.assignments[i].device: "sign-flip" for i in flipped})
    holdings = small_holdings(config, load_data(config))
    devices = InProcess(experiment.runtime, holdings, attackers)
    experiment.net.load(plan.model)
    replies = devices.perform([a.job(None, plan.moved) for a in plan.assignments])
    return experiment, state, receive(experiment.method, plan.assignments, replies)


def excluded(folder: Path, suspensions: Suspensions, *flipped: int) -> list[Outcome]:
    """What becomes of those updates, where the server knows this of earlier rounds."""
    experiment, state, outcomes = outcomes_of(folder, *flipped)
    return exclude(experiment, replace(state, suspensions=suspensions), outcomes)


def test_one_round_excludes_an_unknown_device_but_not_one_that_agreed_before(folder: Path) -> None:
    found = excluded(folder, Suspensions(), 3)
    assert statuses(found) == [Status.OK] * 3 + [Status.EXCLUDED]
    cosines = [o.agreement for o in found if o.agreement is not None]
    assert len(cosines) == 4
    usual = statistics.median(cosines)
    device, cosine = found[3].assignment.device, cosines[3]
    assert cosine < 0.2 * usual
    # Just enough: own + cosine = 0.2 (others + median) in exact numbers, a little more here.
    before = Agreement(0.2 * (1.0 + usual) - cosine + 1e-9, 1.0)
    known = excluded(folder, Suspensions(agreement={device: before}), 3)
    assert known[3].status is Status.OK
    less = Agreement(before.own - 2e-9, 1.0)
    known = excluded(folder, Suspensions(agreement={device: less}), 3)
    assert known[3].status is Status.EXCLUDED


def test_a_device_that_pointed_away_before_is_excluded_though_it_agrees_now(folder: Path) -> None:
    honest = excluded(folder, Suspensions())
    assert statuses(honest) == [Status.OK] * 4
    device = honest[2].assignment.device
    found = excluded(folder, Suspensions(agreement={device: Agreement(-2.0, 2.0)}))
    assert found[2].status is Status.EXCLUDED
    assert found[2].detail.startswith("agrees with the others -0.")
    assert found[2].agreement == honest[2].agreement  # it can still win back what it lost


@pytest.mark.parametrize("usual", [-0.5, 0.0])
def test_where_no_updates_agree_none_is_excluded(folder: Path, usual: float) -> None:
    first = first_round(folder)
    outcome = Outcome(first.plan.assignments[0], first.replies[0], Status.OK)
    for cosine in (-0.49, -0.51):
        assert _judge(outcome, cosine, usual, 0.2, Suspensions()).status is Status.OK


# --- whole runs -----------------------------------------------------------------------------------


class DamagingFleet:
    """A simulated fleet in which some devices send payloads that are none."""

    def __init__(self, fleet: SimulatedFleet, devices: Iterable[int]) -> None:
        self._fleet, self._devices = fleet, set(devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def offers(self, number: int, suspensions: Suspensions) -> Any:
        return self._fleet.offers(number, suspensions)

    def perform(self, plan: RoundPlan) -> Iterator[Reply]:
        for reply in self._fleet.perform(plan):
            damaged = reply.device in self._devices
            yield replace(reply, payload=b"?" * 99) if damaged else reply

    def evaluate(self, weights: State) -> Score | None:
        return self._fleet.evaluate(weights)

    def memory(self) -> Mapping[int, State]:
        return self._fleet.memory()


def statuses_of(device: int, results: Iterable[RoundResult]) -> list[Status]:
    found = (d for result in results for d in result.record.devices)
    return [d.status for d in found if d.device == device]


def test_a_suspended_device_sends_nothing_and_others_are_drawn_instead(folder: Path) -> None:
    more = ("run.rounds=6", "fleet.devices=6", "fleet.cohort=5", "gate.suspend_rounds=3")
    experiment, fleet = small_fleet(small_config(folder, *more, "run.evaluate_every=6"))
    results = list(run_rounds(experiment, DamagingFleet(fleet, [2])))
    seen = statuses_of(2, results)
    assert seen[:3] == [Status.REFUSED] * 3
    assert Status.SUSPENDED in seen[3:6]
    for result in results:
        out = [d for d in result.record.devices if d.status is Status.SUSPENDED]
        assert all(d.bytes_up == d.bytes_down == 0 for d in out)
        assert len(result.record.devices) - len(out) == 5
    found = summarise("anycostfl", MetricInfo(), 1.0, [result.record for result in results])
    assert found["updates_refused"] == seen.count(Status.REFUSED)
    assert found["rounds_suspended"] == seen.count(Status.SUSPENDED)


def test_a_resumed_run_has_the_same_suspensions_and_agreements(
    folder: Path, tmp_path: Path
) -> None:
    rules = ("aggregation.agree=0.2", "gate.strikes=1", "gate.suspend_rounds=3")
    attack = ("attack.kind=sign-flip", "attack.share=0.25", "fleet.devices=8", "fleet.cohort=5")
    run = ("run.rounds=6", "run.checkpoint_every=1", "run.evaluate_every=3")
    config = small_config(folder, *rules, *attack, *run)
    experiment, simulated = small_fleet(config)
    fleet = DamagingFleet(simulated, [0, 1])
    whole = list(run_rounds(experiment, fleet))
    records = [result.record for result in whole]
    assert any(d.status is Status.SUSPENDED for r in records for d in r.devices)
    assert whole[2].state.suspensions.until
    assert whole[2].state.suspensions.agreement
    for done, result in enumerate(whole, 1):
        assert result.state.suspensions == suspensions_after(records[:done], config.gate)

    rounds = journal(
        run_rounds(experiment, fleet),
        config,
        RunWriter.create(tmp_path / "run", to_toml(config)),
    )
    for _ in range(3):
        next(rounds)
    rounds.close()
    saved = resume(tmp_path / "run").saved
    assert saved.checkpoint is not None
    start = restored_state(experiment, saved.checkpoint, saved.records)
    assert start.suspensions == whole[2].state.suspensions
    again = list(run_rounds(experiment, fleet, start))
    assert [result.record for result in again] == records[3:]
    for name, tensor in whole[-1].state.weights.items():
        assert torch.equal(tensor, again[-1].state.weights[name])


def test_a_fleet_that_is_suspended_altogether_has_empty_rounds(folder: Path) -> None:
    more = ("fleet.devices=6", "fleet.cohort=6", "gate.strikes=1", "gate.suspend_rounds=3")
    experiment, fleet = small_fleet(small_config(folder, *more, "run.rounds=5"))
    results = list(run_rounds(experiment, DamagingFleet(fleet, range(6))))
    assert [r.record.bytes_up > 0 for r in results] == [True, False, False, False, True]
    assert results[1].record.metric == results[2].record.metric


def test_an_update_of_some_steps_counts_by_their_share(folder: Path) -> None:
    """A quarter of the steps, a quarter of the weight; no other weight changes."""
    first = first_round(folder)
    whole = receive(first.experiment.method, first.plan.assignments, first.replies)
    short = [replace(first.replies[0], done=0.25), *first.replies[1:]]
    cut = receive(first.experiment.method, first.plan.assignments, short)
    weights = [
        [contribution.weight for contribution in accepted(first.experiment, outcomes)]
        for outcomes in (whole, cut)
    ]
    assert weights[1] == [0.25 * weights[0][0], *weights[0][1:]]
    _, record = close_round(first.experiment, first.state, first.plan, short)
    assert next(d.done for d in record.devices if d.status is Status.OK) == 0.25
