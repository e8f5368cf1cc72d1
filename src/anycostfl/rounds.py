"""One round on the server in two pure halves, `open_round` and `close_round`.

    open    sort channels, make the downlink's step, plan a strategy for every device, assign
    close   check replies, aggregate what counts, record what everyone did and paid

State goes in and comes out; nothing is kept here. Every random number of a round comes from a
generator seeded by (seed, round, device, purpose), and payloads are aggregated in the order of the
cohort, so neither the fleet nor the order of replies changes a result.
"""

from __future__ import annotations

import enum
import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from anycostfl.codec import Upload, check_codec
from anycostfl.codec.frame import OVERHEAD
from anycostfl.config import Run
from anycostfl.device import Job, Reply
from anycostfl.errors import PayloadError
from anycostfl.experiment import Experiment
from anycostfl.methods import Method
from anycostfl.metrics import Score
from anycostfl.planning import cost
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.draw import Cohort
from anycostfl.planning.planner import with_offers
from anycostfl.planning.strategy import BIND_WORDS, REASON_WORDS, Offer, Strategies
from anycostfl.records.checkpoint import MEMORY, Checkpoint
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.records.run import SavedRun
from anycostfl.server.aggregate import (
    Contribution,
    apply_moves,
    clip_bound,
    clipped,
    size_of,
    weighted_means,
)
from anycostfl.server.downlink import Ledger, Step, first_public, ledger_of
from anycostfl.server.robust import agreements, ranked_means
from anycostfl.server.suspensions import Agreement, Suspensions, suspensions_after
from anycostfl.shrink import Order, WidthPlan, recalibrate
from anycostfl.state import State, Update, clone_state

MOST_DUPLICATES = 10  # further replies of a device in a round that are counted
LONGEST_DETAIL = 300  # characters


@dataclass(frozen=True, slots=True, eq=False)
class ServerState:
    """What the server knows between rounds.

    `weights` are the global model's, `velocity` the optimizer's, `public` the model as devices know
    it where the downlink is compressed, `moved` says from where each channel came since the first
    round. `memories` are what simulated devices remember; real ones keep them. `fitted` is what
    samples are prepared by (`data.prepare`), where the server learnt it from its devices.
    """

    rounds: int  # finished
    weights: State
    velocity: State = field(default_factory=dict)
    public: State = field(default_factory=dict)
    moved: Order = field(default_factory=dict)
    memories: Mapping[int, State] = field(default_factory=dict)
    fitted: State = field(default_factory=dict)
    suspensions: Suspensions = field(default_factory=Suspensions)
    ledger: Ledger = field(default_factory=Ledger)

    def checkpoint(self) -> Checkpoint:
        """What has to be saved; the rest follows from the journal."""
        kinds = {"model": self.weights, "velocity": self.velocity}
        kinds |= {"public": self.public, "moved": self.moved, "fitted": self.fitted}
        memories = {f"{MEMORY}/{device}": state for device, state in self.memories.items()}
        return Checkpoint(self.rounds, {**kinds, **memories})


def first_state(experiment: Experiment) -> ServerState:
    """Before the first round."""
    public = first_public(experiment.net.module) if experiment.downlink else {}
    return ServerState(0, experiment.initial_weights, public=public)


def start_state(experiment: Experiment, saved: SavedRun | None) -> ServerState:
    """Where rounds begin: where a saved run stopped, or before the first one."""
    if saved is None or saved.checkpoint is None:
        return first_state(experiment)
    return restored_state(experiment, saved.checkpoint, saved.records)


def restored_state(
    experiment: Experiment, point: Checkpoint, records: Sequence[RoundRecord]
) -> ServerState:
    """The state in a checkpoint, with what the journal says of the rounds before it."""
    return ServerState(
        rounds=point.rounds,
        weights=point["model"],
        velocity=point["velocity"],
        public=point["public"],
        moved=point["moved"],
        memories=point.memories(),
        fitted=point["fitted"],
        suspensions=suspensions_after(records, experiment.config.gate),
        ledger=ledger_of(records),
    )


# --- what the server tells each device ------------------------------------------------------------


class Purpose(enum.IntEnum):
    """What a device draws random numbers for; part of every seed, so never reuse a number."""

    SHUFFLE = 101
    QUANTIZE = 102


def draw_seed(seed: int, round_index: int, device: int, purpose: Purpose) -> int:
    """A 63-bit seed that no other (seed, round, device, purpose) shares."""
    words = np.random.SeedSequence([seed, round_index, device, int(purpose)]).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """The devices of a round, and what each can spend.

    `drawn` is what the draw would have chosen without suspensions; `silent` are devices that
    were chosen and did not say what they can afford. `fitted` is what samples
    are prepared by. `own` are the plans of devices that plan themselves, by their position.
    """

    cohort: Cohort
    drawn: Sequence[int] = ()
    silent: Sequence[int] = ()
    fitted: State = field(default_factory=dict)
    own: Mapping[int, Offer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A strategy made concrete for one device: its sub-model, how to upload, its weight."""

    position: int  # in the cohort
    device: int
    plan: WidthPlan
    shapes: Mapping[str, tuple[int, ...]]  # of what it uploads
    elements: int  # of what it uploads
    upload: Upload
    seed: int
    learning_rate: float
    weight: float
    download: int  # bytes of the sub-model, uncompressed

    def job(self, memory: State | None, moved: Order) -> Job:
        """What the device has to know, with what it remembered."""
        return Job(
            device=self.device,
            alpha=self.plan.alpha,
            upload=self.upload,
            seed=self.seed,
            learning_rate=self.learning_rate,
            memory=memory,
            moved=moved,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoundPlan:
    """A round as planned: who takes part, with which strategy, and what each is told.

    `model` is what sub-models are cut from; `step` leads to it from the last public model.
    """

    number: int
    offers: Offers
    strategies: Strategies
    assignments: Sequence[Assignment]
    model: State
    moved: Order
    step: Step | None = None


def open_round(
    experiment: Experiment, state: ServerState, offers: Offers
) -> tuple[ServerState, RoundPlan]:
    """Sort the channels (Sec. III-B.1), then plan what every device does (Sec. IV)."""
    number, net = state.rounds, experiment.net
    state = replace(state, fitted=offers.fitted or state.fitted)
    if experiment.method.sorts_channels:
        order = net.sorting_order(state.weights)
        state = replace(
            state,
            weights=net.permute(state.weights, order),
            velocity=net.permute(state.velocity, order) if state.velocity else state.velocity,
            moved={n: state.moved[n][new] if state.moved else new for n, new in order.items()},
        )
    else:
        order = {}
    step = None
    if experiment.downlink:
        step, public = experiment.downlink.make_step(state.weights, state.public, order, number)
        state = replace(state, public=public)
    devices, limits = offers.cohort.devices, experiment.limits
    strategies = experiment.method.plan(devices, experiment.config.workload, limits)
    strategies = with_offers(strategies, devices, experiment.config.workload, limits, offers.own)
    assignments = assign(experiment, offers.cohort, strategies, number)
    model = {**state.weights, **state.public}
    return state, RoundPlan(number, offers, strategies, assignments, model, state.moved, step)


def assign(
    experiment: Experiment, cohort: Cohort, strategies: Strategies, number: int
) -> list[Assignment]:
    """One assignment for every device that can afford to take part."""
    able = np.flatnonzero(strategies.feasible)
    if not len(able):
        return []
    method = experiment.method
    samples = cohort.devices.samples[able] if method.by_samples else np.ones(len(able))
    weights = method.weigh(strategies.alpha[able], strategies.quality[able], samples)
    return [
        _assign_one(experiment, cohort, strategies, number, (i, weight))
        for i, weight in zip(able.tolist(), weights.tolist(), strict=True)
    ]


def _assign_one(
    experiment: Experiment,
    cohort: Cohort,
    strategies: Strategies,
    number: int,
    who: tuple[int, float],
) -> Assignment:
    position, weight = who
    net, config, device = experiment.net, experiment.config, int(cohort.index[position])
    plan = net.plan(float(strategies.alpha[position]))
    shapes = {name: plan.shapes[name] for name in experiment.trained}
    elements = sum(map(math.prod, shapes.values()))
    # α·β·S bits, whatever share of the parameters the sub-model really has.
    share = float(strategies.beta[position])
    bits = plan.alpha * share * config.workload.size_bits
    upload = Upload(  # an uncompressed update may be a little longer than its α says
        beta=1.0 if share == 1 else min(1.0, bits / (32 * elements)),
        seed=draw_seed(config.run.seed, number, device, Purpose.QUANTIZE),
        binding=payload_binding(experiment.fingerprint, number, device, plan),
        blocks=experiment.blocks,
        codec=experiment.method.codec,
    )
    return Assignment(
        position=position,
        device=device,
        plan=plan,
        shapes=shapes,
        elements=elements,
        upload=upload,
        seed=draw_seed(config.run.seed, number, device, Purpose.SHUFFLE),
        learning_rate=config.training.rate_in(number, config.run.rounds),
        weight=weight,
        download=net.bytes_of(plan),
    )


def payload_binding(fingerprint: str, number: int, device: int, plan: WidthPlan) -> bytes:
    """What a payload belongs to: run, round, device and plan."""
    what = (fingerprint, number, device, sorted(plan.widths.items()))
    return hashlib.blake2s(repr(what).encode()).digest()


# --- what becomes of the replies ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of an assignment: its reply, its status, the update's size.

    `duplicates` counts further replies of the same device, `agreement` is how far the update points
    where the others' do.
    """

    assignment: Assignment
    reply: Reply
    status: Status
    cause: str = ""
    detail: str = ""
    size: float = 0.0
    duplicates: int = 0
    agreement: float | None = None


def close_round(
    experiment: Experiment,
    state: ServerState,
    plan: RoundPlan,
    replies: Iterable[Reply],
    *,
    min_replies: int = 1,
) -> tuple[ServerState, RoundRecord]:
    """Move the global model by the updates that count (Sec. III-D), and record the round."""
    method, rules = experiment.method, experiment.config.aggregation
    outcomes = receive(method, plan.assignments, replies)
    outcomes = exclude(experiment, state, _enough(outcomes, min_replies))
    updates = accepted(experiment, outcomes)
    if rules.combine == "mean":
        moves = weighted_means(state.weights, updates, rules.least)
    else:
        moves = ranked_means(state.weights, list(updates), rules)
    weights, velocity = apply_moves(state.weights, moves, experiment.optimizer, state.velocity)

    devices = describe(experiment, state, plan, outcomes)
    devices += _silent(plan.offers.silent)
    devices += state.suspensions.records(plan.offers.drawn, plan.number)
    record = RoundRecord(plan.number, None, devices, plan.step.size if plan.step else 0)
    state = replace(
        state,
        rounds=plan.number + 1,
        weights=weights,
        velocity=velocity,
        suspensions=state.suspensions.after(record, experiment.config.gate),
        ledger=state.ledger.after(record) if plan.step else state.ledger,
    )
    return state, record


def receive(
    method: Method, assignments: Sequence[Assignment], replies: Iterable[Reply]
) -> list[Outcome]:
    """The gate: check replies as they arrive against what each device was told.

    The first reply of a device counts, if any does; outcomes are in the order of the assignments.
    """
    assigned = {a.device: a for a in assignments}
    found: dict[int, Outcome] = {}
    for reply in replies:
        first = found.get(reply.device)
        if first is None:
            found[reply.device] = _check(method, assigned[reply.device], reply)
        elif first.duplicates < MOST_DUPLICATES:
            found[reply.device] = replace(first, duplicates=first.duplicates + 1)
    return [found[a.device] for a in assignments]


def _check(method: Method, assignment: Assignment, reply: Reply) -> Outcome:
    told: tuple[tuple[str, Status, str], ...] = (
        (reply.missing, Status.MISSING, ""),
        (reply.error, Status.FAILED, ""),
        (reply.unreadable, Status.REFUSED, "unreadable"),
    )
    for text, status, cause in told:
        if text:
            return Outcome(assignment, reply, status, cause, one_line(text))
    try:
        _check_length(assignment, reply.payload)
        check_codec(reply.payload, assignment.upload.codec)
        size = size_of(_decode(method, assignment, reply))
    except PayloadError as error:
        return Outcome(assignment, reply, Status.REFUSED, error.cause, one_line(str(error)))
    return Outcome(assignment, reply, Status.OK, size=size)


def _check_length(assignment: Assignment, payload: bytes) -> None:
    """No device may send more than was planned, frame included."""
    most = OVERHEAD + int(assignment.upload.beta * 4 * assignment.elements)
    if len(payload) > most:
        raise PayloadError(f"a payload of this plan has at most {most} bytes, not {len(payload)}")


def one_line(text: str) -> str:
    """Text from a device on one line of bounded length, without control characters."""
    line = " ".join(text[:LONGEST_DETAIL].split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def _decode(method: Method, assignment: Assignment, reply: Reply) -> Update:
    return method.decode(reply.payload, assignment.shapes, assignment.upload)


def _enough(outcomes: Sequence[Outcome], least: int) -> list[Outcome]:
    """With too few usable replies, none is used."""
    usable = sum(outcome.status is Status.OK for outcome in outcomes)
    if usable >= least:
        return list(outcomes)
    why = f"{usable} usable replies, at least {least} needed"
    return [
        replace(o, status=Status.UNUSED, detail=why) if o.status is Status.OK else o
        for o in outcomes
    ]


def accepted(experiment: Experiment, outcomes: Sequence[Outcome]) -> Iterator[Contribution]:
    """The updates that count, decoded again one at a time to bound memory."""
    # An excluded device still counts for the median: fewer honest ones would shift it.
    bound = clip_bound((o.size for o in outcomes), experiment.config.aggregation.clip)
    for outcome in outcomes:
        if outcome.status is Status.OK:
            decoded = _decode(experiment.method, outcome.assignment, outcome.reply)
            # An update of half the steps counts half.
            weight = outcome.assignment.weight * outcome.reply.done
            yield Contribution(outcome.assignment.plan, clipped(decoded, bound), weight)


def exclude(
    experiment: Experiment, state: ServerState, outcomes: Sequence[Outcome]
) -> list[Outcome]:
    """Exclude devices that point away from the others, if the rules ask for it.

    One round says little when updates have become small, so all rounds of a device count. With two
    updates nobody can say which is wrong.
    """
    least = experiment.config.aggregation.agree
    usable = [o for o in outcomes if o.status is Status.OK]
    if not least or len(usable) <= 2:
        return list(outcomes)
    cosines = agreements(state.weights, lambda: accepted(experiment, usable))
    usual = statistics.median(cosines)
    found = {o.assignment.device: cosine for o, cosine in zip(usable, cosines, strict=True)}
    return [
        _judge(o, found[o.assignment.device], usual, least, state.suspensions)
        if o.status is Status.OK
        else o
        for o in outcomes
    ]


def _judge(
    outcome: Outcome, cosine: float, usual: float, least: float, known: Suspensions
) -> Outcome:
    """An outcome with its agreement; excluded if all agreements of its device sum to too little."""
    before = known.agreement.get(outcome.assignment.device, Agreement())
    seen = before.with_round(cosine, usual)
    outcome = replace(outcome, agreement=cosine)
    if seen.usual <= 0 or seen.own >= least * seen.usual:
        return outcome  # where no updates agree, none can be told apart
    share = f"agrees with the others {seen.own / seen.usual:.2f} times as usual"
    return replace(outcome, status=Status.EXCLUDED, detail=share)


def calibrate(experiment: Experiment, state: ServerState) -> ServerState:
    """Measure BatchNorm's statistics on the server's data, if it has any and the model needs it."""
    if not experiment.calibration:
        return state
    net = experiment.net
    net.load(state.weights)
    recalibrate(net.module, experiment.calibration)
    return replace(state, weights=clone_state(net.module))


def with_score(record: RoundRecord, score: Score | None) -> RoundRecord:
    """A record with what an evaluation found."""
    return replace(record, metric=score.value, others=dict(score.others)) if score else record


def is_evaluated(run: Run, number: int) -> bool:
    """Whether a round ends with an evaluation; the last one always does."""
    return (number + 1) % run.evaluate_every == 0 or number + 1 == run.rounds


# --- what everyone did and paid -------------------------------------------------------------------


def describe(
    experiment: Experiment, state: ServerState, plan: RoundPlan, outcomes: Sequence[Outcome]
) -> tuple[DeviceRecord, ...]:
    """What every device of the cohort did and paid: bytes as encoded, FLOPs as cut."""
    by_position = {outcome.assignment.position: outcome for outcome in outcomes}
    records = []
    for i in range(len(plan.offers.cohort.index)):
        record = _infeasible(plan, i)
        if outcome := by_position.get(i):
            done = _performed(record, plan, outcome, _downloaded(state, plan, outcome))
            devices, workload = plan.offers.cohort.devices, experiment.config.workload
            record = charge(done, devices, i, workload)
        records.append(record)
    return tuple(records)


def _infeasible(plan: RoundPlan, i: int) -> DeviceRecord:
    """What is known of a device of the cohort before it does anything."""
    cohort, devices = plan.offers.cohort, plan.offers.cohort.devices
    return DeviceRecord(
        device=int(cohort.index[i]),
        status=Status.INFEASIBLE,
        cause=REASON_WORDS[int(plan.strategies.reason[i])],
        samples=int(devices.samples[i]),
        distance_m=float(cohort.distance_m[i]),
        rate_bps=float(devices.rate_bps[i]),
        budget_j=_disclosed(devices.energy_j[i]),
        budget_s=_disclosed(devices.latency_s[i]),
    )


def _disclosed(budget: float) -> float:
    """A budget as the journal holds it: 0 where there is none, or the device keeps it to itself."""
    return float(budget) if budget < cost.UNLIMITED else 0.0


def _performed(
    record: DeviceRecord, plan: RoundPlan, outcome: Outcome, bytes_down: int
) -> DeviceRecord:
    """The same of a device that was given an assignment."""
    assignment, reply, strategies = outcome.assignment, outcome.reply, plan.strategies
    i = assignment.position
    return replace(
        record,
        status=outcome.status,
        cause=outcome.cause,
        detail=outcome.detail,
        alpha=float(strategies.alpha[i]),
        beta=float(strategies.beta[i]),
        frequency_hz=float(strategies.frequency_hz[i]),
        gain=float(strategies.gain[i]),
        flops_ratio=assignment.plan.flops_ratio,
        weight=assignment.weight,
        bytes_up=len(reply.payload),
        bytes_down=bytes_down,
        wire_bytes_up=reply.wire_bytes_up,
        wire_bytes_down=reply.wire_bytes_down,
        busy_s=reply.busy_s,
        done=reply.done,
        measured=reply.measured,
        binds=tuple(word for flag, word in BIND_WORDS.items() if flag & int(strategies.binds[i])),
        duplicates=outcome.duplicates,
        agreement=outcome.agreement,
    )


def _downloaded(state: ServerState, plan: RoundPlan, outcome: Outcome) -> int:
    """Bytes that a device was sent: its sub-model, or the steps of the public model it missed."""
    if outcome.reply.bytes_down is not None:
        return outcome.reply.bytes_down
    if plan.step is None:
        return outcome.assignment.download
    whole = 4 * sum(tensor.numel() for tensor in state.public.values())
    return state.ledger.download(outcome.assignment.device, plan.step.size, whole)


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


def _silent(devices: Sequence[int]) -> tuple[DeviceRecord, ...]:
    """Records of devices that were chosen and never said what they can afford."""
    why = "it did not say what it can afford"
    return tuple(DeviceRecord(device, Status.MISSING, detail=why) for device in devices)
