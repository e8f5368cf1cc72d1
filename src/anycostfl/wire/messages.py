"""The messages between server and device: what each side must know, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from anycostfl.checks import Interval
from anycostfl.codec import Upload
from anycostfl.config import Data
from anycostfl.config.loading import checked
from anycostfl.data import Scale
from anycostfl.device import Training
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import Experiment
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.planning.draw import FleetSpec
from anycostfl.server.downlink import Step
from anycostfl.shrink import ElasticModel, WidthPlan
from anycostfl.state import State
from anycostfl.wire.envelope import (
    Envelope,
    MessageError,
    Table,
    blobs_of,
    bytes_blob,
    list_of,
    raw_bytes,
    tensor_of,
    value_of,
)
from anycostfl.wire.protocol import check_protocol, protocol_envelope

Record = TypeVar("Record")

LONGEST_S = 1e9  # that a task may have taken
PAYLOAD, WEIGHTS = "anycostfl/payload", "anycostfl/weights"
TOO_OLD = "the server speaks protocol 2, this device 1: upgrade anycostfl on this device"


class DeviceRejectedError(AnycostError):
    """The server does not take this device; says why."""


# --- the experiment and the round -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExperimentInfo:
    """What a device must know of an experiment.

    `fleet`, `data` and the seed are for devices that act as a member of the simulated fleet or
    train on their part of a common dataset; a device with its own profile and data needs neither.
    `scale` is what images are normalised by.
    """

    fingerprint: str
    model: str
    widths: str
    method: str
    feedback: bool
    downlink: bool
    seed: int
    epochs: int
    training: Training
    fleet: FleetSpec
    data: Data
    scale: Scale | None = None

    @classmethod
    def of(cls, experiment: Experiment) -> ExperimentInfo:
        """What devices are told of this experiment."""
        config = experiment.config
        return cls(
            fingerprint=experiment.fingerprint,
            model=config.model.name,
            widths=config.model.widths,
            method=config.run.method,
            feedback=experiment.method.feedback,
            downlink=experiment.downlink is not None,
            seed=config.run.seed,
            epochs=config.workload.epochs,
            training=config.training,
            fleet=config.fleet,
            data=config.data,
            scale=experiment.scale,
        )


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """The experiment, and the round that is about to begin."""

    experiment: ExperimentInfo
    round: int

    def pack(self) -> Envelope:
        """As an envelope; devices of protocol 1 read a rejection in it."""
        told = self.experiment
        plain = ("fingerprint", "model", "widths", "method", "feedback", "downlink", "seed")
        table = {name: getattr(told, name) for name in (*plain, "epochs")}
        if told.scale:
            table |= {"mean": list(told.scale.mean), "std": list(told.scale.std)}
        sections = {name: _plain(getattr(told, name)) for name in ("training", "fleet", "data")}
        rejection = {"refusal": {"why": TOO_OLD}}
        tables = {"experiment": table, "round": {"number": self.round}, **sections, **rejection}
        return protocol_envelope() | Envelope(tables)


def read_info(envelope: Envelope) -> RoundInfo:
    """The experiment and round in a message, unless it is a rejection."""
    if rejection := envelope.tables.get("rejection"):
        raise DeviceRejectedError(
            f"the server rejects this device: {value_of(rejection, 'why', str)}"
        )
    check_protocol(envelope, peer="server", me="device")
    table = envelope.table("experiment")
    told = ExperimentInfo(
        fingerprint=value_of(table, "fingerprint", str),
        model=value_of(table, "model", str),
        widths=value_of(table, "widths", str),
        method=value_of(table, "method", str),
        feedback=value_of(table, "feedback", bool),
        downlink=value_of(table, "downlink", bool),
        seed=value_of(table, "seed", int),
        epochs=value_of(table, "epochs", int),
        training=_section(Training, envelope.table("training")),
        fleet=_section(FleetSpec, envelope.table("fleet")),
        data=_section(Data, envelope.table("data")),
        scale=_read_scale(table),
    )
    if told.seed < 0 or told.epochs < 1:
        raise MessageError(f"seed {told.seed} and {told.epochs} epochs; must be >= 0 and >= 1")
    return RoundInfo(told, value_of(envelope.table("round"), "number", int))


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are set, as a table can hold them."""
    known = {key: value for key, value in asdict(record).items() if value is not None}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in known.items()}


def _section(kind: type[Record], table: Table) -> Record:
    """A dataclass from a table; keys that only a newer server knows are ignored."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]  # always a dataclass
    try:
        return checked(kind, {k: v for k, v in table.items() if k in names}, "the server", [])
    except ConfigError as error:
        raise MessageError(str(error)) from error


def _read_scale(table: Table) -> Scale | None:
    if "mean" not in table and "std" not in table:
        return None
    mean, std = list_of(table, "mean", float), list_of(table, "std", float)
    finite = all(map(math.isfinite, (*mean, *std)))
    if not finite or not mean or len(mean) != len(std) or min(std) <= 0:
        raise MessageError(f"a scale of mean {mean} and std {std}")
    return Scale(tuple(mean), tuple(std))


def pack_rejection(why: str) -> Envelope:
    """What is sent to a device that cannot take part; `refusal` is protocol 1's word."""
    return Envelope({"rejection": {"why": why}, "refusal": {"why": why}})


# --- what a device can spend ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Capabilities:
    """Which device this is and what it can spend in a round: one row of `Devices`.

    `model_digest` identifies the public model that it holds, if any (`flower.broadcast`).
    """

    device: int
    round: int
    distance_m: float
    resources: Devices
    model_digest: bytes = b""

    def pack(self) -> Envelope:
        """As an envelope."""
        row = {item.name: float(getattr(self.resources, item.name)[0]) for item in fields(Devices)}
        table = {
            "device": self.device,
            "round": self.round,
            "distance_m": self.distance_m,
            "model_digest": self.model_digest,
            **row,
        }
        return protocol_envelope() | Envelope({"capabilities": table})


QUANTITY = Interval(1e-30, 1e18)
QUANTITIES = {
    "samples": Interval(1, 1e9),
    "overhead": Interval(0, 1e18),
    "distance_m": Interval(0, 1e18),
}
"""What a device may claim: wider than any device, narrow enough to plan with and to journal."""


def read_capabilities(envelope: Envelope) -> Capabilities:
    """What a device says of itself, if every number is one that a device could have."""
    check_protocol(envelope, peer="device", me="server")
    table = envelope.table("capabilities")
    row = {item.name: _quantity(table, item.name) for item in fields(Devices)}
    try:
        resources = make_devices(**row)
    except ConfigError as error:
        raise MessageError(f"impossible capabilities: {'; '.join(error.problems)}") from error
    return Capabilities(
        device=value_of(table, "device", int),
        round=value_of(table, "round", int),
        distance_m=_quantity(table, "distance_m"),
        resources=resources,
        model_digest=value_of(table, "model_digest", bytes),
    )


def _quantity(table: Table, name: str) -> float:
    value, allowed = value_of(table, name, float), QUANTITIES.get(name, QUANTITY)
    if not allowed.contains(value):
        raise MessageError(f"{name}: given {value:g}, must be {allowed}")
    return value


# --- a task and its result ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Download:
    """What brings a device's public model up to date: the whole of it, or the steps it missed.

    `base` identifies the public model that the steps start from.
    """

    whole: State = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    base: bytes = b""

    @property
    def size(self) -> int:
        """Bytes, without the records around them."""
        whole = sum(tensor.numel() * tensor.element_size() for tensor in self.whole.values())
        return whole + sum(step.size for step in self.steps)

    def pack(self) -> Envelope:
        """As an envelope."""
        arrays = {}
        for i, step in enumerate(self.steps):
            arrays[f"{i}/payload"] = bytes_blob(step.payload, PAYLOAD)
            places = {f"{i}/order/{n}": order.to(torch.int32) for n, order in step.order.items()}
            arrays |= blobs_of(places)
        table = {"rounds": [step.round for step in self.steps], "base": self.base}
        return Envelope({"download": table}, {"public": blobs_of(self.whole), "steps": arrays})


def read_download(envelope: Envelope) -> Download:
    """The download in a message."""
    table = envelope.table("download")
    places = {
        name: order for name, order in envelope.arrays.get("steps", {}).items() if "/order/" in name
    }
    orders = Envelope({}, {"orders": places}).state("orders")
    steps = []
    for i, number in enumerate(list_of(table, "rounds", int)):
        begin = f"{i}/order/"
        order = {n.removeprefix(begin): o.long() for n, o in orders.items() if n.startswith(begin)}
        payload = envelope.bytes_of("steps", f"{i}/payload", PAYLOAD)
        steps.append(Step(number, order, payload))
    return Download(envelope.state("public"), tuple(steps), value_of(table, "base", bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What one device has to do in a round.

    Its sub-model comes as `weights`, or is cut from the public model that the `download` brings up
    to date. `moved` says how the global channels have moved since the first round, in whose order a
    device keeps its residual; empty where that does not matter.
    """

    info: RoundInfo
    device: int
    alpha: float
    widths: Mapping[str, int]
    upload: Upload
    seed: int
    weights: bytes
    moved: State
    download: Download = field(default_factory=Download)

    @property
    def size(self) -> int:
        """Bytes of the model on their way down, without the records around them."""
        return len(self.weights) + self.download.size

    def pack(self) -> Envelope:
        """As an envelope; blocks are left out, for the device knows its model."""
        table = {
            "device": self.device,
            "alpha": self.alpha,
            "groups": list(self.widths),
            "widths": list(self.widths.values()),
            "seed": self.seed,
            "beta": self.upload.beta,
            "upload_seed": self.upload.seed,
            "binding": self.upload.binding,
            "codec": self.upload.codec,
        }
        arrays = {
            "weights": {"weights": bytes_blob(self.weights, WEIGHTS)},
            "moved": blobs_of(self.moved),
        }
        return self.info.pack() | Envelope({"task": table}, arrays) | self.download.pack()


def read_task(envelope: Envelope) -> Task:
    """The task in a message."""
    info = read_info(envelope)
    table = envelope.table("task")
    groups, widths = list_of(table, "groups", str), list_of(table, "widths", int)
    if len(groups) != len(widths):
        raise MessageError("a task without one width for every group")
    return Task(
        info=info,
        device=value_of(table, "device", int),
        alpha=value_of(table, "alpha", float),
        widths=dict(zip(groups, widths, strict=True)),
        upload=Upload(
            beta=value_of(table, "beta", float),
            seed=value_of(table, "upload_seed", int),
            binding=value_of(table, "binding", bytes),
            codec=value_of(table, "codec", str),
        ),
        seed=value_of(table, "seed", int),
        weights=envelope.bytes_of("weights", "weights", WEIGHTS),
        moved=envelope.state("moved"),
        download=read_download(envelope),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a device made of its task.

    `error` says why there is no payload; `busy_s` is how long it worked; `next` is what it can
    spend in the next round.
    """

    payload: bytes
    error: str
    busy_s: float
    next: Capabilities

    def pack(self) -> Envelope:
        """As an envelope."""
        table = {"error": self.error, "busy_s": self.busy_s}
        arrays = {"payload": {"payload": bytes_blob(self.payload, PAYLOAD)}}
        return self.next.pack() | Envelope({"result": table}, arrays)


def read_result(envelope: Envelope) -> Result:
    """The result in a message."""
    capabilities = read_capabilities(envelope)
    table = envelope.table("result")
    busy_s = value_of(table, "busy_s", float)
    if not 0 <= busy_s <= LONGEST_S:
        raise MessageError(f"busy_s: given {busy_s:g}, must be 0 to {LONGEST_S:g}")
    return Result(
        payload=envelope.bytes_of("payload", "payload", PAYLOAD),
        error=value_of(table, "error", str),
        busy_s=busy_s,
        next=capabilities,
    )


# --- evaluation on devices ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class EvaluateTask:
    """The whole model, to be evaluated on the device's own test samples."""

    info: RoundInfo
    weights: State

    def pack(self) -> Envelope:
        """As an envelope."""
        return self.info.pack() | Envelope({}, {"model": blobs_of(self.weights)})


def read_evaluate_task(envelope: Envelope) -> EvaluateTask:
    """The model in a message."""
    return EvaluateTask(read_info(envelope), envelope.state("model"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The number of correct predictions among a device's test samples; sums over devices add up."""

    correct: int
    samples: int

    def pack(self) -> Envelope:
        """As an envelope."""
        table = {"correct": self.correct, "samples": self.samples}
        return protocol_envelope() | Envelope({"evaluation": table})


def read_evaluation(envelope: Envelope) -> Evaluation:
    """The evaluation in a message, if its numbers are possible."""
    check_protocol(envelope, peer="device", me="server")
    table = envelope.table("evaluation")
    correct, samples = value_of(table, "correct", int), value_of(table, "samples", int)
    if not 0 <= correct <= samples <= QUANTITIES["samples"].high:
        raise MessageError(f"{correct} correct predictions among {samples} samples")
    return Evaluation(correct, samples)


# --- sub-models as bytes --------------------------------------------------------------------------


def pack_weights(net: ElasticModel, state: State, plan: WidthPlan) -> bytes:
    """Only what a sub-model holds of a global state, one tensor after the other."""
    parts = net.take(state, plan)
    return b"".join(raw_bytes(parts[name]) for name in net.own_names())


def unpack_weights(
    net: ElasticModel, like: State, plan: WidthPlan, weights: bytes
) -> dict[str, Tensor]:
    """The tensors of a sub-model; `like` gives the types."""
    names = net.own_names()
    sizes = [math.prod(plan.shapes[n]) * like[n].element_size() for n in names]
    if len(weights) != sum(sizes):
        raise MessageError(
            f"a sub-model of this plan has {sum(sizes)} bytes, {len(weights)} came: do server and "
            "device have the same model?"
        )
    state, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        data = bytearray(memoryview(weights)[start : start + size])
        state[name] = tensor_of(data, like[name].dtype, plan.shapes[name])
        start += size
    return state
