"""Within a round: what each device is told, what becomes of its reply, what it paid.

The simulator and the Flower adapter call the same functions in the same order, so a seeded round
gives the same global model in both.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anycostfl import cost
from anycostfl.aggregate import (
    Contribution,
    Rules,
    agreements,
    clip_bound,
    clipped,
    size_of,
)
from anycostfl.bench import Agreed, Bench
from anycostfl.codec import check_codec
from anycostfl.codec.frame import OVERHEAD
from anycostfl.config import Config, identity
from anycostfl.errors import PayloadError
from anycostfl.fleet import Cohort
from anycostfl.methods import Method, Upload, elements
from anycostfl.shrink import Order, WidthPlan
from anycostfl.state import State, Update
from anycostfl.types import Binds, DeviceRecord, Devices, Reason, Strategies, Workload
from anycostfl.workers import DeviceSide, Job, Purpose, Reply, draw_seed

# --- what the server tells each device ------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A strategy made concrete for one device: its sub-model, how to upload, its weight."""

    position: int  # in the cohort
    device: int
    plan: WidthPlan
    shapes: Mapping[str, tuple[int, ...]]  # of what it uploads
    upload: Upload
    seed: int
    weight: float
    download: int  # bytes of the sub-model as it is

    def job(self, memories: Mapping[int, State], moved: Order, liars: Mapping[int, str]) -> Job:
        """What the device has to know, and how it lies in an experiment with liars."""
        memory, lie = memories.get(self.device), liars.get(self.device, "")
        return Job(self.device, self.plan.alpha, self.upload, self.seed, memory, moved, lie)


def assign(
    config: Config, side: DeviceSide, cohort: Cohort, strategies: Strategies, number: int
) -> list[Assignment]:
    """One assignment for every device that can afford to take part."""
    able = np.flatnonzero(strategies.feasible)
    if not len(able):
        return []
    method = config.method_of(config.run.method)
    held = side.sample_counts()[cohort.index]  # of the split, not what devices claim
    samples = held[able].astype(np.float64) if method.by_samples else np.ones(len(able))
    weights = method.weigh(strategies.alpha[able], strategies.quality[able], samples)
    return [
        _assign_one(config, side, strategies, number, (i, int(cohort.index[i]), weight))
        for i, weight in zip(able.tolist(), weights.tolist(), strict=True)
    ]


def _assign_one(
    config: Config,
    side: DeviceSide,
    strategies: Strategies,
    number: int,
    who: tuple[int, int, float],
) -> Assignment:
    net, method = side.net, config.method_of(config.run.method)
    position, device, weight = who
    plan = net.plan(float(strategies.alpha[position]))
    trained = (name for name, p in net.module.named_parameters() if p.requires_grad)
    shapes = {name: plan.shapes[name] for name in trained}
    # α·β·S bits, whatever share of the parameters the sub-model really has.
    share = float(strategies.beta[position])
    bits = plan.alpha * share * config.workload.size_bits
    upload = Upload(  # what is not compressed at all may be a little longer than its α says
        beta=1.0 if share == 1 else min(1.0, bits / (32 * elements(shapes))),
        seed=draw_seed(config.run.seed, number, device, Purpose.QUANTIZE),
        binding=binding(config, number, device, plan),
        blocks=net.blocks(),
        codec=method.codec,
        feedback=method.feedback,
    )
    shuffle = draw_seed(config.run.seed, number, device, Purpose.SHUFFLE)
    return Assignment(position, device, plan, shapes, upload, shuffle, weight, net.bytes_of(plan))


def binding(config: Config, number: int, device: int, plan: WidthPlan) -> bytes:
    """What a payload belongs to: run, round, device and plan."""
    what = (identity(config), number, device, sorted(plan.widths.items()))
    return hashlib.blake2s(repr(what).encode()).digest()


# --- what comes back ------------------------------------------------------------------------------

DUPLICATE = "duplicate: it had replied in this round already"
MOST_SURPLUS = 10  # further replies of a device in a round that are written down
LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of an assignment: its reply, "ok" or why it does not count, the update's size.

    `surplus` says why further replies of the same device are refused, `agreement` how far the
    update points where the others' do.
    """

    assignment: Assignment
    reply: Reply
    status: str
    size: float = 0.0
    surplus: tuple[str, ...] = ()
    agreement: float | None = None


def receive(
    method: Method, assignments: Sequence[Assignment], replies: Iterable[Reply]
) -> list[Outcome]:
    """The gate: check replies as they come against what each device was told.

    The first reply of a device counts, if any does; outcomes are in the order of the assignments.
    """
    told = {a.device: a for a in assignments}
    found: dict[int, Outcome] = {}
    for reply in replies:
        first = found.get(reply.device)
        if first is None:
            found[reply.device] = _check(method, told[reply.device], reply)
        elif len(first.surplus) < MOST_SURPLUS:
            found[reply.device] = replace(first, surplus=(*first.surplus, DUPLICATE))
    return [found[a.device] for a in assignments]


def _check(method: Method, assignment: Assignment, reply: Reply) -> Outcome:
    if reply.missing:
        return Outcome(assignment, reply, _words("missing", reply.missing))
    if reply.error:
        return Outcome(assignment, reply, _words("failed", reply.error))
    if reply.unreadable:
        return Outcome(assignment, reply, _words("refused: unreadable", reply.unreadable))
    try:
        _check_length(assignment, reply.payload)
        check_codec(reply.payload, assignment.upload.codec)
        return Outcome(assignment, reply, "ok", size_of(_decode(method, assignment, reply)))
    except PayloadError as error:
        return Outcome(assignment, reply, _words(f"refused: {error.cause}", str(error)))


def _check_length(assignment: Assignment, payload: bytes) -> None:
    """Nobody has leave to send more than was planned, frame and all."""
    most = OVERHEAD + int(assignment.upload.beta * 4 * elements(assignment.shapes))
    if len(payload) > most:
        raise PayloadError(f"a payload of this plan has at most {most} bytes, not {len(payload)}")


def _words(begin: str, text: str) -> str:
    return f"{begin}: {one_line(text)}"


def one_line(text: str) -> str:
    """What a device made us say, cut to one line of a sane length that no terminal obeys."""
    line = " ".join(text[:LONGEST_REASON].split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def _decode(method: Method, assignment: Assignment, reply: Reply) -> Update:
    return method.decode(reply.payload, assignment.shapes, assignment.upload)


def accepted(method: Method, outcomes: Sequence[Outcome], rules: Rules) -> Iterator[Contribution]:
    """The updates that count, decoded once more, one at a time: the cohort never lies in memory."""
    # Whoever is left out still counts for the median: fewer honest ones would shift it.
    bound = clip_bound((o.size for o in outcomes), rules)
    for outcome in outcomes:
        if outcome.status != "ok":
            continue
        update = clipped(_decode(method, outcome.assignment, outcome.reply), bound)
        yield Contribution(outcome.assignment.plan, update, outcome.assignment.weight)


def screen(
    method: Method, outcomes: Sequence[Outcome], rules: Rules, like: State, bench: Bench
) -> list[Outcome]:
    """Leave out devices that point away from the others, if the rules ask for it.

    One round tells little when updates have become small, so all rounds of a device count. Two
    alone cannot tell which of them lies.
    """
    usable = [o for o in outcomes if o.status == "ok"]
    if not rules.agree or len(usable) <= 2:
        return list(outcomes)
    cosines = agreements(like, lambda: accepted(method, usable, rules))
    usual = statistics.median(cosines)
    found = {o.assignment.device: cosine for o, cosine in zip(usable, cosines, strict=True)}
    return [
        _judge(o, found[o.assignment.device], usual, rules, bench) if o.status == "ok" else o
        for o in outcomes
    ]


def _judge(outcome: Outcome, cosine: float, usual: float, rules: Rules, bench: Bench) -> Outcome:
    """An update with its agreement, left out if all of its device's so far come to too little."""
    seen = bench.agreed.get(outcome.assignment.device, Agreed()).with_round(cosine, usual)
    known = replace(outcome, agreement=cosine)
    if seen.usual <= 0 or seen.own >= rules.agree * seen.usual:
        return known  # where nobody agrees with anybody, nobody can be told apart
    share = seen.own / seen.usual
    return replace(known, status=f"left out: agrees with the others {share:.2f} times as usual")


def describe(
    config: Config, cohort: Cohort, strategies: Strategies, outcomes: Sequence[Outcome]
) -> tuple[DeviceRecord, ...]:
    """What every device of the cohort did and paid: bytes as encoded, FLOPs as cut."""
    by_position = {outcome.assignment.position: outcome for outcome in outcomes}
    return tuple(
        _describe_device(config, cohort, strategies, i, by_position.get(i))
        for i in range(len(cohort.index))
    )


def _describe_device(
    config: Config, cohort: Cohort, strategies: Strategies, i: int, outcome: Outcome | None
) -> DeviceRecord:
    devices = cohort.devices
    known = DeviceRecord(
        device=int(cohort.index[i]),
        status=f"sat out: {Reason(int(strategies.reason[i]))}",
        samples=int(devices.samples[i]),
        distance_m=float(cohort.distance_m[i]),
        rate_bps=float(devices.rate_bps[i]),
        budget_j=float(devices.energy_j[i]),
    )
    if outcome is None:
        return known
    plan, chosen, payload = outcome.assignment.plan, strategies[i], outcome.reply.payload
    done = replace(
        known,
        status=outcome.status,
        alpha=chosen.alpha,
        beta=chosen.beta,
        frequency_hz=chosen.frequency_hz,
        gain=chosen.gain,
        flops_ratio=plan.flops_ratio,
        weight=outcome.assignment.weight,
        bytes_up=len(payload),
        bytes_down=outcome.assignment.download,
        wire_bytes_up=outcome.reply.wire_bytes_up,
        wire_bytes_down=outcome.reply.wire_bytes_down,
        binds=tuple(Binds(int(strategies.binds[i])).words()),
        surplus=outcome.surplus,
        agreement=outcome.agreement,
    )
    return charge(done, devices, i, config.workload)


def charge(record: DeviceRecord, devices: Devices, i: int, workload: Workload) -> DeviceRecord:
    """What the i-th device pays for the FLOPs it computed, at its clock, and the bytes it sent."""
    here = devices.take(slice(i, i + 1))
    cycles = cost.sub_model_cycles(here, workload, record.flops_ratio)
    clock, upload_s = np.array([record.frequency_hz]), 8 * record.bytes_up / record.rate_bps
    return replace(
        record,
        compute_s=float(cost.compute_time_s(cycles, clock)[0]),
        upload_s=upload_s,
        compute_j=float(cost.compute_energy_j(cycles, clock, here.energy_coefficient)[0]),
        upload_j=float(cost.upload_energy_j(np.array([upload_s]), here.power_w)[0]),
    )
