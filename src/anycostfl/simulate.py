"""The round (Sec. III-A), top to bottom: sort, plan, shrink, train, compress, aggregate.

`play` is the paper's algorithm; `workers.py` does what devices do. Every random number comes from a
generator seeded by (seed, round, device, purpose), and payloads are aggregated in the order of the
cohort, so that neither the number of workers nor their order changes a result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from anycostfl import data, models
from anycostfl.aggregate import Contribution, aggregate
from anycostfl.config import Config, load_profile
from anycostfl.coupling import tensors_of
from anycostfl.errors import PayloadError
from anycostfl.fleet import Cohort, draw_cohort
from anycostfl.methods import Method, State, Upload
from anycostfl.shrink import ElasticModel, WidthPlan, recalibrate
from anycostfl.train import TrainOptions, bf16_pays
from anycostfl.types import Binds, DeviceRecord, Reason, RoundRecord, Strategies, Update
from anycostfl.workers import (
    DeviceSide,
    Executor,
    Job,
    Purpose,
    Reply,
    Shared,
    draw_seed,
    one_thread,
    open_executor,
)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything the next round needs: its number, the global state, what devices remember."""

    round: int
    state: Mapping[str, Tensor]
    memories: Mapping[int, State]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished round, and where to go on from it."""

    record: RoundRecord
    after: Snapshot


def run(config: Config, *, workers: int = 1) -> Iterator[RoundRecord]:
    """Simulate an experiment, one record per round."""
    for turn in play(config, workers=workers):
        yield turn.record


def play(
    config: Config, *, workers: int = 1, start: Snapshot | None = None
) -> Generator[Turn, None, None]:
    """The training procedure of the paper, round after round."""
    side = prepare(config)
    net, method = side.net, side.method
    profiles = {name: load_profile(name) for name in config.fleet.profiles}
    memories: dict[int, State] = {}
    if start is not None:
        net.load(start.state)
        memories = dict(start.memories)

    with one_thread(), open_executor(side, workers) as executor:
        for number in range(start.round if start else 0, config.run.rounds):
            if method.sorts_channels:
                order = net.sort_channels()
                memories = {i: net.permute(memory, order) for i, memory in memories.items()}

            cohort = draw_cohort(
                config.fleet,
                seed=config.run.seed,
                round_index=number,
                samples=side.sample_counts().numpy(),
                profiles=profiles,
            )
            strategies = method.plan(cohort.devices, config.workload, config.limits)
            assignments = assign(config, side, cohort, strategies, number)

            replies = executor.perform([a.job(memories) for a in assignments])
            outcomes: list[Outcome] = []
            accepted = receive(method, assignments, replies, outcomes)
            net.load(aggregate(tensors_of(net.module), accepted))
            memories |= {o.reply.device: o.reply.memory for o in outcomes if o.reply.memory}

            accuracy = evaluate(side, executor) if _is_due(config, number) else None
            record = RoundRecord(number, accuracy, describe(config, cohort, strategies, outcomes))
            state = {name: t.detach().clone() for name, t in tensors_of(net.module).items()}
            yield Turn(record, Snapshot(number + 1, state, dict(memories)))


def _is_due(config: Config, number: int) -> bool:
    """Whether a round ends with an evaluation; the last one always does."""
    return (number + 1) % config.run.evaluate_every == 0 or number + 1 == config.run.rounds


# --- before the first round ---------------------------------------------------------------------


def settle(config: Config) -> Config:
    """Decide what is left to the machine, so that a saved configuration says it all."""
    if config.training.precision != "auto":
        return config
    precision = "bf16" if bf16_pays() else "fp32"
    return replace(config, training=replace(config.training, precision=precision))


def load_data(config: Config) -> tuple[data.Dataset, data.Partition]:
    """The dataset, and the samples of every device."""
    dataset = data.load(config.data.name, config.data.path)
    random = np.random.default_rng([config.run.seed, PARTITION])
    labels, devices = dataset.train_labels.numpy(), config.fleet.devices
    if config.data.partition == "iid":
        return dataset, data.split_iid(labels, devices, random)
    return dataset, data.split_dirichlet(labels, devices, config.data.concentration, random)


def prepare(config: Config) -> DeviceSide:
    """Load the data, split it over the fleet, initialise the global model."""
    dataset, parts = load_data(config)
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        module = models.load(config.model.name).build()
    return DeviceSide(
        Shared(
            model=config.model.name,
            widths=config.model.widths,
            method=config.run.method,
            options=train_options(settle(config)),
            weights={name: tensor.detach() for name, tensor in tensors_of(module).items()},
            train_images=dataset.train_images,
            train_labels=dataset.train_labels,
            test_images=dataset.test_images,
            test_labels=dataset.test_labels,
            samples=torch.from_numpy(np.concatenate(parts)),
            ends=torch.tensor([len(part) for part in parts]).cumsum(0),
        )
    )


PARTITION = 201  # the purpose of the generator that splits the data


def train_options(config: Config) -> TrainOptions:
    """How devices train, from a settled configuration."""
    given = config.training
    return TrainOptions(
        learning_rate=given.learning_rate,
        batch=given.batch,
        epochs=config.workload.epochs,
        momentum=given.momentum,
        weight_decay=given.weight_decay,
        clip_norm=given.clip_norm,
        bf16=given.precision == "bf16",
        channels_last=given.channels_last,
    )


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

    def job(self, memories: Mapping[int, State]) -> Job:
        """What the device has to know."""
        memory = memories.get(self.device)
        return Job(self.device, self.plan.alpha, self.upload, self.seed, memory)


def assign(
    config: Config, side: DeviceSide, cohort: Cohort, strategies: Strategies, number: int
) -> list[Assignment]:
    """One assignment for every device that can afford to take part."""
    able = np.flatnonzero(strategies.feasible)
    if not len(able):
        return []
    alpha, beta = strategies.alpha[able], strategies.beta[able]
    weights = side.method.weigh(alpha, beta, cohort.devices.samples[able])
    return [
        _assign_one(config, side.net, strategies, number, (i, int(cohort.index[i]), weight))
        for i, weight in zip(able.tolist(), weights.tolist(), strict=True)
    ]


def _assign_one(
    config: Config,
    net: ElasticModel,
    strategies: Strategies,
    number: int,
    who: tuple[int, int, float],
) -> Assignment:
    position, device, weight = who
    plan = net.plan(float(strategies.alpha[position]))
    trained = (name for name, p in net.module.named_parameters() if p.requires_grad)
    shapes = {name: plan.shapes[name] for name in trained}
    # α·β·S bits, whatever share of the parameters the sub-model really has.
    bits = plan.alpha * float(strategies.beta[position]) * config.workload.size_bits
    upload = Upload(
        beta=min(1.0, bits / (32 * sum(map(math.prod, shapes.values())))),
        seed=draw_seed(config.run.seed, number, device, Purpose.QUANTIZE),
        binding=binding(config, number, device, plan),
        blocks=net.blocks(),
    )
    shuffle = draw_seed(config.run.seed, number, device, Purpose.SHUFFLE)
    return Assignment(position, device, plan, shapes, upload, shuffle, weight)


def binding(config: Config, number: int, device: int, plan: WidthPlan) -> bytes:
    """What a payload belongs to: run, round, device and plan."""
    what = (config.run.seed, config.run.method, number, device, sorted(plan.widths.items()))
    return hashlib.blake2s(repr(what).encode()).digest()


# --- what comes back ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of an assignment: its reply, and why it was refused if it was."""

    assignment: Assignment
    reply: Reply
    refusal: str


def receive(
    method: Method,
    assignments: Sequence[Assignment],
    replies: Iterator[Reply],
    outcomes: list[Outcome],
) -> Iterator[Contribution]:
    """Decode and check one reply after the other; refused ones are noted and left out."""
    for assignment, reply in zip(assignments, replies, strict=True):
        update, refusal = _decode(method, assignment, reply)
        outcomes.append(Outcome(assignment, reply, refusal))
        if update is not None:
            yield Contribution(assignment.plan, update, assignment.weight)


def _decode(method: Method, assignment: Assignment, reply: Reply) -> tuple[Update | None, str]:
    if reply.error:
        return None, reply.error
    try:
        return method.decode(reply.payload, assignment.shapes, assignment.upload.binding), ""
    except PayloadError as error:
        return None, str(error)


RECALIBRATION_IMAGES = 1024


def evaluate(side: DeviceSide, executor: Executor) -> float:
    """Accuracy of the global model on all test images, BatchNorm statistics measured first."""
    images = side.shared.train_images[:RECALIBRATION_IMAGES]
    recalibrate(side.net.module, [images[i : i + 128] for i in range(0, len(images), 128)])
    return executor.correct() / len(side.shared.test_labels)


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
    flops = config.workload.epochs * known.samples * config.workload.flops_per_sample
    cycles = flops * plan.flops_ratio / float(devices.flops_per_cycle[i])
    upload_s = 8 * len(payload) / known.rate_bps
    return replace(
        known,
        status=f"refused: {outcome.refusal}" if outcome.refusal else "ok",
        alpha=chosen.alpha,
        beta=chosen.beta,
        frequency_hz=chosen.frequency_hz,
        gain=chosen.gain,
        flops_ratio=plan.flops_ratio,
        weight=outcome.assignment.weight,
        bytes_up=len(payload),
        bytes_down=4 * sum(map(math.prod, plan.shapes.values())),
        compute_s=cycles / chosen.frequency_hz,
        upload_s=upload_s,
        compute_j=float(devices.energy_coefficient[i]) * chosen.frequency_hz**2 * cycles,
        upload_j=upload_s * float(devices.power_w[i]),
        binds=tuple(Binds(int(strategies.binds[i])).words()),
    )
