"""The gate and the bench: what is refused, who sits out for it, and that a resumed run knows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl import methods
from anycostfl.aggregate import Rules
from anycostfl.bench import Agreed, Bench, Gate, bench_of
from anycostfl.codec.frame import OVERHEAD
from anycostfl.config import to_toml
from anycostfl.errors import ConfigError
from anycostfl.experiment import prepare
from anycostfl.fleet import draw_cohort
from anycostfl.methods import elements
from anycostfl.records import RunWriter
from anycostfl.report import summarise
from anycostfl.rounds import (
    DUPLICATE,
    MOST_SURPLUS,
    Assignment,
    Outcome,
    _judge,
    assign,
    binding,
    one_line,
    receive,
    screen,
)
from anycostfl.runs import Turn, keep, take_up
from anycostfl.simulate import play
from anycostfl.state import tensors_of
from anycostfl.types import DeviceRecord, RoundRecord
from anycostfl.workers import DeviceSide, InProcess, Job, Reply
from small_runs import small_config


def told(number: int, **statuses: str) -> RoundRecord:
    devices = [DeviceRecord(int(d[1:]), s, 1, 0.0, 1.0, 1.0) for d, s in statuses.items()]
    return RoundRecord(number, None, tuple(devices))


def test_what_devices_say_does_not_reach_the_terminal_as_commands() -> None:
    said = "disk full\x1b[2J\x1b]0;owned\x07 \u202e\n all  fine"
    assert one_line(said) == "disk full\ufffd[2J\ufffd]0;owned\ufffd \ufffd all fine"
    assert len(one_line("x" * 1000)) == 300


# --- strikes --------------------------------------------------------------------------------------


def test_three_refusals_bench_a_device_and_one_more_does_when_it_is_back() -> None:
    rules = Gate(strikes=3, bench_rounds=4)
    bench = bench_of([told(n, d5="refused: damaged: x", d6="ok") for n in range(3)], rules)
    assert bench.back == {5: 7}
    assert [bench.holds(5, n) for n in range(3, 9)] == [True] * 4 + [False] * 2
    assert bench.free(range(4, 7), 3) == {4, 6}
    for number in range(3, 7):
        bench = bench.after(told(number, d6="ok"), rules)
    assert bench.back == {}
    bench = bench.after(told(7, d5="refused: damaged: x"), rules)
    assert bench.back == {5: 12}


def test_sitting_out_prolongs_nothing_and_a_use_takes_a_strike_back() -> None:
    rules = Gate(strikes=3, bench_rounds=4)
    bench = bench_of([told(n, d5="refused: damaged: x") for n in range(3)], rules)
    for number in range(3, 7):
        bench = bench.after(told(number, d5="benched: until round 7"), rules)
    assert bench == Bench(strikes={5: 2})
    bench = bench.after(told(7, d5="ok"), rules)
    assert bench == Bench(strikes={5: 1})
    bench = bench.after(told(8, d5="refused: damaged: x"), rules)
    assert bench == Bench(strikes={5: 2})


@pytest.mark.parametrize(
    "status",
    ["missing: no reply within 2 s", "failed: nan", "sat out: radio", "unused: 1", "benched: x"],
)
def test_a_bad_link_or_a_bad_day_is_no_strike(status: str) -> None:
    assert bench_of([told(n, d5=status) for n in range(50)], Gate()) == Bench()


def test_second_replies_are_strikes_though_the_first_is_used() -> None:
    device = DeviceRecord(5, "ok", 1, 0.0, 1.0, 1.0, surplus=(DUPLICATE,) * 4)
    assert bench_of([RoundRecord(0, None, (device,))], Gate()).back == {5: 21}


def test_a_gate_of_no_rounds_or_less_than_no_strikes_is_refused() -> None:
    with pytest.raises(ConfigError, match="strikes"):
        Gate(strikes=-1)
    with pytest.raises(ConfigError, match="bench_rounds"):
        Gate(bench_rounds=0)


def test_no_strikes_no_bench() -> None:
    rounds = [told(n, d5="refused: damaged: x") for n in range(50)]
    assert bench_of(rounds, Gate(strikes=0)).back == {}


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 9))
def test_whoever_is_used_at_least_as_often_is_never_benched(
    refused: list[bool], strikes: int, rounds: int
) -> None:
    """In no stretch of its rounds more refusals than uses, plus strikes: then no bench."""
    bench, worst, level = Bench(), 0, 0
    for number, bad in enumerate(refused):
        bench = bench.after(
            told(number, d1="refused: x: y" if bad else "ok"), Gate(strikes, rounds)
        )
        level = max(level + (1 if bad else -1), 0)
        worst = max(worst, level)
        if worst < strikes:
            assert bench.back == {}
        if worst == strikes:
            break
    assert bool(bench.back) == (worst >= strikes)


# --- agreement ------------------------------------------------------------------------------------


def agreed(number: int, **cosines: float | None) -> RoundRecord:
    devices = [
        DeviceRecord(int(d[1:]), "ok", 1, 0.0, 1.0, 1.0, agreement=cosine)
        for d, cosine in cosines.items()
    ]
    return RoundRecord(number, None, tuple(devices))


def test_agreements_of_all_rounds_of_a_device_are_added_up_beside_the_medians() -> None:
    rounds = [
        agreed(0, d1=0.5, d2=0.25, d3=-0.5),  # median 0.25
        agreed(1, d1=0.75, d3=-0.25, d4=None),  # median 0.25
        agreed(2, d4=None),
        agreed(3, d2=0.125, d3=0.125, d4=0.125, d5=0.125),
    ]
    assert bench_of(rounds, Gate()).agreed == {
        1: Agreed(1.25, 0.5),
        2: Agreed(0.375, 0.375),
        3: Agreed(-0.625, 0.625),
        4: Agreed(0.125, 0.125),
        5: Agreed(0.125, 0.125),
    }


def screened(folder: Path, bench: Bench, flipped: Sequence[int] = ()) -> dict[int, Outcome]:
    """What becomes of the updates of a first round, by the place in the cohort."""
    side, assignments, _ = first_round(folder)
    lies = {assignments[i].device: "sign-flip" for i in flipped}
    replies = InProcess(side).perform([a.job({}, {}, lies) for a in assignments])
    outcomes = receive(side.method, assignments, replies)
    rules = Rules(clip=2.0, agree=0.2)
    found = screen(side.method, outcomes, rules, tensors_of(side.net.module), bench)
    return dict(enumerate(found))


def test_one_round_leaves_out_a_device_nobody_knows_but_not_one_that_has_agreed_before(
    tmp_path: Path,
) -> None:
    found = screened(tmp_path, Bench(), flipped=[0])
    assert [o.status.partition(":")[0] for o in found.values()] == ["left out", "ok", "ok", "ok"]
    cosines = [o.agreement for o in found.values() if o.agreement is not None]
    assert len(cosines) == 4
    usual = statistics.median(cosines)
    device, cosine = found[0].assignment.device, cosines[0]
    assert cosine < 0.2 * usual
    # Just enough: own + cosine = 0.2 (others + median) in exact numbers, a little more here.
    before = Agreed(0.2 * (1.0 + usual) - cosine + 1e-9, 1.0)
    assert screened(tmp_path, Bench(agreed={device: before}), flipped=[0])[0].status == "ok"
    less = Agreed(before.own - 2e-9, 1.0)
    assert screened(tmp_path, Bench(agreed={device: less}), flipped=[0])[0].status != "ok"


def test_who_pointed_away_before_is_left_out_though_it_agrees_now(tmp_path: Path) -> None:
    honest = screened(tmp_path, Bench())
    assert all(o.status == "ok" for o in honest.values())
    device = honest[2].assignment.device
    found = screened(tmp_path, Bench(agreed={device: Agreed(-2.0, 2.0)}))
    assert found[2].status.startswith("left out: agrees with the others -0.")
    assert found[2].agreement == honest[2].agreement  # it can still win back what it lost


@pytest.mark.parametrize("usual", [-0.5, 0.0])
def test_where_nobody_agrees_with_anybody_nobody_is_left_out(tmp_path: Path, usual: float) -> None:
    _, assignments, replies = first_round(tmp_path)
    outcome = Outcome(assignments[0], replies[0], "ok")
    for cosine in (-0.49, -0.51):
        assert _judge(outcome, cosine, usual, Rules(agree=0.2), Bench()).status == "ok"


# --- the gate -------------------------------------------------------------------------------------


def first_round(folder: Path, *more: str) -> tuple[DeviceSide, list[Assignment], list[Reply]]:
    config = small_config(folder, *more)
    side = prepare(config)
    samples = side.sample_counts()
    cohort = draw_cohort(config.fleet, seed=0, round_index=0, samples=samples)
    limits = config.limits_of(config.run.method)
    strategies = side.method.plan(cohort.devices, config.workload, limits)
    assignments = assign(config, side, cohort, strategies, 0)
    replies = list(InProcess(side).perform([a.job({}, {}, {}) for a in assignments]))
    return side, assignments, replies


def test_the_first_reply_of_a_device_counts_and_every_further_one_is_refused(
    tmp_path: Path,
) -> None:
    side, assignments, replies = first_round(tmp_path)
    other = replace(replies[1], payload=b"something else")
    came = [*reversed(replies), other, *[replies[1]] * 20]
    outcomes = receive(side.method, assignments, came)
    assert [o.assignment for o in outcomes] == assignments
    assert [o.status for o in outcomes] == ["ok"] * 4
    assert outcomes[1].reply.payload == replies[1].payload
    assert outcomes[1].surplus == (DUPLICATE,) * MOST_SURPLUS
    assert outcomes[0].surplus == ()


@pytest.mark.parametrize("method", methods.names())
def test_the_payload_of_another_device_is_refused(tmp_path: Path, method: str) -> None:
    side, assignments, replies = first_round(tmp_path, f"run.method={method}")
    for reply, borrowed in ((replies[0], replies[1]), (replies[1], replies[0])):
        stolen = replace(reply, payload=borrowed.payload)
        one = next(a for a in assignments if a.device == reply.device)
        (outcome,) = receive(side.method, [one], [stolen])
        assert outcome.status.startswith("refused: ")


def test_the_same_round_of_an_experiment_with_other_settings_is_another_round(
    tmp_path: Path,
) -> None:
    side, assignments, replies = first_round(tmp_path)
    _, others, _ = first_round(tmp_path, "training.learning_rate=0.01")
    assert [o.status for o in receive(side.method, assignments, replies)] == ["ok"] * 4
    for outcome in receive(side.method, others, replies):
        assert outcome.status.startswith("refused: foreign: ")


def test_what_a_device_says_is_cut_to_one_short_line(tmp_path: Path) -> None:
    side, assignments, replies = first_round(tmp_path)
    talk = Reply(replies[0].device, error="bad\n" * 100_000)
    (outcome,) = receive(side.method, assignments[:1], [talk])
    assert outcome.status.startswith("failed: bad bad")
    assert len(outcome.status) < 320
    flood = Reply(replies[0].device, bytes(20_000_000))
    (outcome,) = receive(side.method, assignments[:1], [flood])
    assert outcome.status.startswith("refused: malformed: a payload of this plan has at most ")


def test_a_payload_is_no_longer_than_planned_and_of_the_codec_that_was_asked_for(
    tmp_path: Path,
) -> None:
    side, assignments, replies = first_round(tmp_path)
    told, reply = assignments[0], replies[0]
    planned = int(told.upload.beta * 4 * elements(told.shapes))
    assert len(reply.payload) <= planned
    long = replace(reply, payload=bytes(planned + OVERHEAD + 1))
    (outcome,) = receive(side.method, [told], [long])
    assert "has at most" in outcome.status
    other = replace(told, upload=replace(told.upload, codec="lowrank"))
    (sent,) = InProcess(side).perform([other.job({}, {}, {})])
    assert receive(side.method, [other], [sent])[0].status == "ok"
    (outcome,) = receive(side.method, [told], [sent])
    assert outcome.status == "refused: malformed: the payload is lowrank; kernel was asked for"


def test_a_payload_belongs_to_its_round_wherever_the_data_lies(tmp_path: Path) -> None:
    here, there = small_config(tmp_path), small_config(tmp_path, "data.path=/elsewhere")
    _, (first, *_), _ = first_round(tmp_path)
    assert binding(here, 0, 1, first.plan) == binding(there, 0, 1, first.plan)


# --- a whole run ----------------------------------------------------------------------------------

RUN = ("run.rounds=9", "fleet.devices=6", "fleet.cohort=3", "gate.bench_rounds=3")


class Spoiling:
    """Some devices send payloads that are not payloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: Sequence[int]) -> None:
        honest = DeviceSide.perform

        def perform(side: DeviceSide, job: Job) -> Reply:
            reply = honest(side, job)
            return replace(reply, payload=b"?" * 99) if job.device in devices else reply

        monkeypatch.setattr(DeviceSide, "perform", perform)


def statuses(turns: Sequence[Turn], device: int) -> Iterator[str]:
    for turn in turns:
        yield from (d.status.partition(":")[0] for d in turn.record.devices if d.device == device)


def test_a_benched_device_sends_nothing_and_others_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spoiling(monkeypatch, [2])
    turns = list(play(small_config(tmp_path, *RUN, "fleet.cohort=5")))
    seen = list(statuses(turns, 2))
    assert seen[:3] == ["refused"] * 3
    assert "benched" in seen[3:6]
    for turn in turns:
        sat = [d for d in turn.record.devices if d.status.startswith("benched")]
        assert all(d.bytes_up == d.bytes_down == 0 for d in sat)
        assert len(turn.record.devices) - len(sat) == 5
    found = summarise("anycostfl", 1.0, [turn.record for turn in turns])
    assert found["updates_refused"] == seen.count("refused")
    assert found["rounds_benched"] == seen.count("benched")


def test_a_run_goes_on_with_the_same_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Spoiling(monkeypatch, [0, 1, 2])
    config = small_config(tmp_path, *RUN, "run.checkpoint_every=1")
    whole = list(play(config))
    assert any("benched" in d.status for turn in whole for d in turn.record.devices)
    for turn in whole[:-1:3]:
        rest = list(play(config, start=turn.after))
        assert [t.record for t in rest] == [t.record for t in whole[turn.after.rounds :]]
        assert rest[-1].after.bench == whole[-1].after.bench
    assert whole[-1].after.bench == bench_of([t.record for t in whole], config.gate)

    writer = RunWriter.create(tmp_path / "run", to_toml(config))
    turns = keep(play(config), config, writer)
    for _ in range(5):
        next(turns)
    turns.close()
    before = take_up(tmp_path / "run")
    assert before.start is not None
    assert before.start.bench == whole[4].after.bench
    again = list(play(config, start=before.start))
    for name, tensor in whole[-1].after.state.items():
        assert torch.equal(tensor, again[-1].after.state[name])


def test_a_run_goes_on_with_the_same_agreements(tmp_path: Path) -> None:
    liars = ("attack.kind=sign-flip", "attack.share=0.25", "aggregation.agree=0.2")
    config = small_config(tmp_path, "run.rounds=5", "run.checkpoint_every=1", *liars)
    whole = list(play(config))
    writer = RunWriter.create(tmp_path / "run", to_toml(config))
    turns = keep(play(config), config, writer)
    for _ in range(3):
        next(turns)
    turns.close()
    start = take_up(tmp_path / "run").start
    assert start is not None
    assert start.bench == whole[2].after.bench
    assert start.bench.agreed
    again = list(play(config, start=start))
    assert [t.record for t in again] == [t.record for t in whole[3:]]
    for name, tensor in whole[-1].after.state.items():
        assert torch.equal(tensor, again[-1].after.state[name])


def test_a_fleet_that_is_benched_altogether_plays_empty_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spoiling(monkeypatch, range(6))
    config = small_config(tmp_path, *RUN, "fleet.cohort=6", "gate.strikes=1", "run.rounds=5")
    turns = list(play(config))
    assert [t.record.bytes_up > 0 for t in turns] == [True, False, False, False, True]
    assert turns[1].record.accuracy == turns[2].record.accuracy


def test_what_is_not_compressed_is_never_too_long(tmp_path: Path) -> None:
    """A sub-model's share of the parameters may be more than its share α of S."""
    uncompressed = ("run.method=anycostfl/without-fgc", "workload.size_bits=1000")
    side, assignments, replies = first_round(tmp_path, *uncompressed)
    assert {o.status for o in receive(side.method, assignments, replies)} == {"ok"}
