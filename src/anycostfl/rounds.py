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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from anycostfl.codec import Upload, check_codec
from anycostfl.codec.frame import OVERHEAD
from anycostfl.config import Run
from anycostfl.device import Job, Reply, nested_levels, share_done, steps_of
from anycostfl.errors import PayloadError, printable
from anycostfl.experiment import Experiment
from anycostfl.methods import Method
from anycostfl.metrics import MetricInfo, Score
from anycostfl.planning import cost
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.draw import Cohort
from anycostfl.planning.planner import with_offers
from anycostfl.planning.strategy import BIND_WORDS, REASON_WORDS, Offer, Strategies
from anycostfl.records.checkpoint import MEMORY, Checkpoint
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.records.run import SavedRun
from anycostfl.server.adaptive import adapt
from anycostfl.server.aggregate import (
    Contribution,
    Move,
    apply_moves,
    averaged,
    capped,
    clip_bound,
    clipped,
    size_of,
    weighted_means,
)
from anycostfl.server.downlink import Ledger, Step, first_public, ledger_of
from anycostfl.server.privacy import private_means, system_noise
from anycostfl.server.robust import agreements, ranked_means
from anycostfl.server.suspensions import Agreement, Suspensions, suspensions_after
from anycostfl.shrink import Order, WidthPlan, recalibrate
from anycostfl.state import State, Update, clone_state

MOST_DUPLICATES = 10  # further replies of a device in a round that are counted
CLOSED = "the round was closed without it"
LONGEST_DETAIL = 300  # characters
COLLAPSE = 0.5  # of what a model had gained: a larger loss is a collapse
FEWEST_METRICS = 5  # evaluations before a loss counts as a collapse: early ones say little


@dataclass(frozen=True, slots=True, eq=False)
class ServerState:
    """What the server knows between rounds.

    `weights` are the global model's, `velocity` the optimizer's, `public` the model as devices know
    it where the downlink is compressed, `second` an adaptive optimizer's second moment, `average`
    the model averaged over rounds, `moved` says from where each channel came since the first
    round. `memories` are what simulated devices remember; real ones keep them. `fitted` is what
    samples are prepared by (`data.prepare`), where the server learnt it from its devices.
    """

    rounds: int  # finished
    weights: State
    velocity: State = field(default_factory=dict)
    second: State = field(default_factory=dict)
    average: State = field(default_factory=dict)
    public: State = field(default_factory=dict)
    moved: Order = field(default_factory=dict)
    memories: Mapping[int, State] = field(default_factory=dict)
    fitted: State = field(default_factory=dict)
    suspensions: Suspensions = field(default_factory=Suspensions)
    ledger: Ledger = field(default_factory=Ledger)
    sizes: tuple[float, ...] = ()  # of updates of earlier rounds (`Robustness.history`)
    best: State = field(default_factory=dict)  # weights to go back to (`Robustness.rollback`)
    metrics: tuple[float, ...] = ()  # of all evaluations so far
    taken: Counter[int] = field(default_factory=Counter)  # how often each device took part

    def checkpoint(self) -> Checkpoint:
        """What has to be saved; the rest follows from the journal."""
        kinds = {"model": self.weights, "velocity": self.velocity}
        kinds |= {"second": self.second, "average": self.average}
        kinds |= {"public": self.public, "moved": self.moved, "fitted": self.fitted}
        kinds |= {"best": self.best}
        if self.sizes:
            kinds |= {"sizes": {"recent": torch.tensor(self.sizes, dtype=torch.float64)}}
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
        second=point["second"],
        average=point["average"],
        public=point["public"],
        moved=point["moved"],
        memories=point.memories(),
        fitted=point["fitted"],
        suspensions=suspensions_after(records, experiment.config.gate),
        ledger=ledger_of(records),
        sizes=_sizes_in(point),
        best=point["best"],
        metrics=tuple(r.metric for r in records if r.metric is not None),
        taken=Counter(d.device for r in records for d in r.devices if d.status is Status.OK),
    )


def _sizes_in(point: Checkpoint) -> tuple[float, ...]:
    """The sizes in a checkpoint, which may be a stranger's."""
    kept = point["sizes"].get("recent", torch.zeros(0)).double().flatten().tolist()
    return tuple(size for size in kept if 0 < size < math.inf)


# --- what the server tells each device ------------------------------------------------------------


class Purpose(enum.IntEnum):
    """What a device draws random numbers for; part of every seed, so never reuse a number."""

    SHUFFLE = 101
    QUANTIZE = 102
    NOISE = 103


def draw_seed(seed: int, round_index: int, device: int, purpose: Purpose) -> int:
    """A 63-bit seed that no other (seed, round, device, purpose) shares."""
    words = np.random.SeedSequence([seed, round_index, device, int(purpose)]).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])


@dataclass(frozen=True, slots=True)
class LateReply:
    """A reply to a round that was closed without it, and its bytes."""

    device: int
    round: int
    wire_bytes_up: int = 0

    def record(self) -> DeviceRecord:
        """As the next round's record holds it."""
        why = f"its reply to round {self.round + 1} came after that was closed"
        return DeviceRecord(
            self.device, Status.UNUSED, "late", why, wire_bytes_up=self.wire_bytes_up
        )


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """The devices of a round, and what each can spend.

    `drawn` is what the draw would have chosen without suspensions; `silent` are devices that
    were chosen and did not say what they can afford. `fitted` is what samples
    are prepared by, `late` are replies to earlier rounds that have come since. `own` are the plans
    of devices that plan themselves, by their position.
    """

    cohort: Cohort
    drawn: Sequence[int] = ()
    silent: Sequence[int] = ()
    fitted: State = field(default_factory=dict)
    late: Sequence[LateReply] = ()
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
    work: float = 1.0  # factor on the local steps
    flops_ratio: float = 1.0  # of a local step, to one of the full model
    steps: int = 1  # local ones

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
            work=self.work,
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
    number = state.rounds
    state = replace(state, fitted=offers.fitted or state.fitted)
    order = channel_order(experiment, state)
    if order:
        state = permuted(experiment, state, order)
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


def channel_order(experiment: Experiment, state: ServerState) -> Order:
    """How channels move before a round: by importance, on by one, or not at all."""
    method = experiment.method
    if not (method.sorts_channels or method.rolls_channels):
        return {}
    order = experiment.net.sorting_order(state.weights)
    if method.rolls_channels:
        order = {n: torch.arange(len(o)).roll(-1 if state.rounds else 0) for n, o in order.items()}
    return order


def permuted(experiment: Experiment, state: ServerState, order: Order) -> ServerState:
    """The state with everything in global coordinates moved along."""
    net = experiment.net

    def along(part: State) -> State:
        return net.permute(part, order) if part else part

    return replace(
        state,
        weights=net.permute(state.weights, order),
        velocity=along(state.velocity),
        second=along(state.second),
        average=along(state.average),
        best=along(state.best),
        moved={n: state.moved[n][new] if state.moved else new for n, new in order.items()},
    )


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
    weights = capped(weights, experiment.config.aggregation.max_weight or 0.0)
    if experiment.config.privacy.mode == "central":
        weights = np.full(len(able), 1.0 / len(able))
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
        work=float(strategies.work[position]),
        flops_ratio=flops_ratio(experiment, plan),
        steps=steps_of(
            int(cohort.devices.samples[position]),
            config.training.batch,
            config.workload.epochs,
            float(strategies.work[position]),
        ),
    )


def flops_ratio(experiment: Experiment, plan: WidthPlan) -> float:
    """FLOPs of a local step, relative to the full model; the mean over nested widths."""
    levels = nested_levels(experiment.method.levels, plan.alpha)
    parts = [experiment.net.plan(level).flops_ratio for level in levels]
    return statistics.fmean([*parts, plan.flops_ratio]) if parts else plan.flops_ratio


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
    updates = accepted(experiment, outcomes, state.sizes)
    if experiment.config.privacy.mode == "central":
        moves = _private_means(experiment, state, outcomes, plan.number)
    elif rules.combine == "mean":
        moves = weighted_means(state.weights, updates, rules.least)
    else:
        moves = ranked_means(state.weights, list(updates), rules)
    before, remark = state, ""
    state = moved_by(experiment, state, moves)
    if rules.rollback and not is_finite(state.weights):
        # Weights as they were; what the optimizer carried may be the cause.
        state = replace(before, velocity={}, second={})
        remark = "not finite: the round changes nothing"

    devices = describe(experiment, state, plan, outcomes)
    devices += _silent(plan.offers.silent)
    devices += state.suspensions.records(plan.offers.drawn, plan.number)
    devices += tuple(late.record() for late in plan.offers.late)
    step_bytes = plan.step.size if plan.step else 0
    record = RoundRecord(plan.number, None, devices, step_bytes, remark=remark)
    taken, privacy = state.taken.copy(), experiment.config.privacy
    taken.update(d.device for d in devices if d.status is Status.OK)
    if privacy.mode != "none":
        record = replace(record, epsilon=privacy.spent(max(taken.values(), default=0)))
    state = replace(
        state,
        rounds=plan.number + 1,
        suspensions=state.suspensions.after(record, experiment.config.gate),
        ledger=state.ledger.after(record) if plan.step else state.ledger,
        sizes=_remembered(experiment, state.sizes, outcomes),
        taken=taken,
    )
    return state, record


def _remembered(
    experiment: Experiment, earlier: tuple[float, ...], outcomes: Sequence[Outcome]
) -> tuple[float, ...]:
    """The sizes of updates of the latest rounds; those that were not used say something, too."""
    kept = (experiment.config.aggregation.history or 0) * experiment.config.fleet.cohort
    return (*earlier, *(o.size for o in outcomes if o.size > 0))[-kept:] if kept else ()


def _private_means(
    experiment: Experiment, state: ServerState, outcomes: Sequence[Outcome], number: int
) -> Mapping[str, Move]:
    """The updates' sum with noise: the noise bounds what one device can do, too."""
    config = experiment.config
    random = torch.Generator().manual_seed(draw_seed(config.run.seed, number, 0, Purpose.NOISE))
    return private_means(
        {name: state.weights[name] for name in experiment.trained},
        accepted(experiment, outcomes, clip=0.0),
        config.privacy,
        config.fleet.cohort,
        system_noise() if config.privacy.secret else random,
    )


def moved_by(experiment: Experiment, state: ServerState, moves: Mapping[str, Move]) -> ServerState:
    """The state after the server optimizer's step."""
    optimizer, second = experiment.optimizer, state.second
    if optimizer.kind in ("adam", "yogi"):
        beta, first = optimizer.momentum or 0.0, state.velocity
        moves, velocity, second = adapt(optimizer.kind, beta, moves, first, second)
        weights, _ = apply_moves(state.weights, moves, replace(optimizer, momentum=0.0), {})
    else:
        weights, velocity = apply_moves(state.weights, moves, optimizer, state.velocity)
    average = state.average
    if decay := optimizer.average:
        average = averaged(average, weights, experiment.trained, decay)
    return replace(state, weights=weights, velocity=velocity, second=second, average=average)


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
        (reply.missing, Status.MISSING, "closed" if reply.missing == CLOSED else ""),
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
    return printable(" ".join(text[:LONGEST_DETAIL].split()))


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


def accepted(
    experiment: Experiment,
    outcomes: Sequence[Outcome],
    earlier: Sequence[float] = (),
    *,
    clip: float | None = None,
) -> Iterator[Contribution]:
    """The updates that count, decoded again one at a time to bound memory.

    `earlier` are sizes of updates of earlier rounds; `clip`, if given, takes the rules' place.
    """
    clip = experiment.config.aggregation.clip if clip is None else clip
    # An excluded device still counts for the median: fewer honest ones would shift it.
    bound = clip_bound((o.size for o in outcomes), clip, earlier)
    factors = factors_of(experiment, outcomes)
    for outcome in outcomes:
        if outcome.status is Status.OK:
            decoded = clipped(_decode(experiment.method, outcome.assignment, outcome.reply), bound)
            # An update of half the steps counts half, unless the method rescales by steps.
            weight, factor = outcome.assignment.weight * outcome.reply.done, 1.0
            if factors:
                weight, factor = outcome.assignment.weight, factors[outcome.assignment.device]
            if factor != 1:
                scaled = {n: factor * v for n, v in decoded.values.items()}
                decoded = replace(decoded, values=scaled)
            yield Contribution(outcome.assignment.plan, decoded, weight)


def factors_of(experiment: Experiment, outcomes: Sequence[Outcome]) -> dict[int, float]:
    """By device, what its update is multiplied by where local steps differ; none if they count."""
    usable = [o for o in outcomes if o.status is Status.OK]
    if experiment.method.rescale is None or not usable:
        return {}
    weights = np.array([o.assignment.weight for o in usable])
    steps = np.array([max(1.0, round(o.assignment.steps * o.reply.done)) for o in usable])
    momentum = experiment.config.training.momentum
    factors = experiment.method.rescale(weights, steps, momentum)
    return {o.assignment.device: f for o, f in zip(usable, factors.tolist(), strict=True)}


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
    cosines = agreements(state.weights, lambda: accepted(experiment, usable, state.sizes))
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
    net.load(deployed(state))
    recalibrate(net.module, experiment.calibration)
    found = clone_state(net.module)
    if state.average:  # its statistics, beside the weights that training continues from
        found |= {name: state.weights[name] for name in state.average}
    return replace(state, weights=found)


def deployed(state: ServerState) -> State:
    """The model that is evaluated and exported: the average over rounds, if there is one."""
    return {**state.weights, **state.average}


def with_score(record: RoundRecord, score: Score | None) -> RoundRecord:
    """A record with what an evaluation found."""
    return replace(record, metric=score.value, others=dict(score.others)) if score else record


def is_finite(weights: State) -> bool:
    """Whether every number of a model is one."""
    return all(bool(w.isfinite().all()) for w in weights.values() if w.is_floating_point())


def keep_best(
    experiment: Experiment, state: ServerState, record: RoundRecord
) -> tuple[ServerState, RoundRecord]:
    """Keep the best model so far, and go back to it where the model has collapsed.

    Only the server's own evaluation counts: what devices say of a model may be a lie.
    """
    if not experiment.config.aggregation.rollback or not experiment.test or record.metric is None:
        return state, record
    info, value = experiment.config.metric, record.metric
    top = info.best([m for m in state.metrics if math.isfinite(m)])
    if state.best and top is not None and has_collapsed(info, state.metrics, value):
        remark = f"the model collapsed to {info.show(value)}: back to {info.show(top)}"
        metrics = (*state.metrics, top)
        state = replace(
            state, weights=state.best, velocity={}, second={}, average={}, metrics=metrics
        )
        return state, replace(record, metric=top, others={}, remark=remark)
    state = replace(state, metrics=(*state.metrics, value))
    if top is None or info.reaches(value, top):
        state = replace(state, best=deployed(state))
    return state, record


def has_collapsed(info: MetricInfo, earlier: Sequence[float], value: float) -> bool:
    """Whether a metric has lost more than half of what the best one gained over the first."""
    known = [m for m in earlier if math.isfinite(m)]
    best = info.best(known)
    if not math.isfinite(value):
        return True
    if best is None or len(known) < FEWEST_METRICS or info.reaches(value, best):
        return False
    return abs(best - value) > COLLAPSE * abs(best - known[0]) > 0


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
            devices, workload = plan.offers.cohort.devices, experiment.config.workload
            bytes_down = _downloaded(state, plan, outcome)
            done = _performed(record, plan, outcome, bytes_down, workload.epochs)
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
    record: DeviceRecord, plan: RoundPlan, outcome: Outcome, bytes_down: int, epochs: int
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
        flops_ratio=assignment.flops_ratio,
        work=share_done(record.samples, epochs, assignment.work) * reply.done,
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
    cycles = cost.sub_model_cycles(here, workload, record.flops_ratio, record.work)
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
