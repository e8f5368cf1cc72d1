"""The messages between server and device: what each side must know, and nothing else.

Every message carries the protocol of its sender and the oldest one that the sender still
understands. A new key that others may ignore changes neither; anything else raises `PROTOCOL`, and
`OLDEST` too where messages of before can no longer be served.

    1   the server's whole configuration as TOML; messages carried no version
    2   images and labels; `scale` in the experiment
    3   tasks of any kind; what samples are prepared by, learning rates of rounds, sums of metrics;
        workload and limits, offers of devices that plan themselves, what a round took on a device
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from anycostfl.checks import AtLeastZero, Count, Interval, Positive
from anycostfl.codec import Upload
from anycostfl.config.loading import checked
from anycostfl.data.split import Data
from anycostfl.device import Training
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import Experiment
from anycostfl.planning.cost import Devices, Workload, make_devices
from anycostfl.planning.draw import FleetSpec
from anycostfl.planning.strategy import Limits, Offer
from anycostfl.records.round import Measured
from anycostfl.server.downlink import Step
from anycostfl.shrink import ElasticModel, WidthPlan
from anycostfl.state import State, tensors_of
from anycostfl.wire.envelope import (
    Envelope,
    MessageError,
    Table,
    blobs_of,
    bytes_blob,
    list_of,
    raw_bytes,
    read_record,
    table_of,
    tensor_of,
    value_of,
)

PROTOCOL = 3
OLDEST = 3
LONGEST_S = 1e9  # that a task may have taken
PAYLOAD, WEIGHTS = "anycostfl/payload", "anycostfl/weights"
MOST_SUMS = 1 << 20  # numbers that a device may say of its samples
TOO_OLD = "the server speaks protocol 3, this device 1: upgrade anycostfl on this device"


class DeviceRejectedError(AnycostError):
    """The server does not take this device; says why."""


def protocol_envelope() -> Envelope:
    """What every message says of its sender."""
    return Envelope({"protocol": {"version": PROTOCOL, "oldest": OLDEST}})


def check_protocol(envelope: Envelope, *, peer: str, me: str) -> None:
    """Raise a MessageError that says which side to upgrade, if the two do not fit."""
    table = envelope.tables.get("protocol", {"version": 1, "oldest": 1})
    version, oldest = value_of(table, "version", int), value_of(table, "oldest", int)
    if version < OLDEST:
        raise MessageError(
            f"the {peer} speaks protocol {version}, this {me} needs {OLDEST} or newer: upgrade "
            f"anycostfl on the {peer}"
        )
    if oldest > PROTOCOL:
        raise MessageError(
            f"the {peer} needs protocol {oldest} or newer, this {me} speaks {PROTOCOL}: upgrade "
            f"anycostfl on this {me}"
        )


# --- the experiment and the round -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExperimentInfo:
    """What a device must know of an experiment.

    `fleet`, `data` and the seed are for devices that act as a member of the simulated fleet or
    train on their part of a common dataset; a device with its own profile and data needs neither.
    """

    fingerprint: str
    model: str
    widths: str
    method: str
    feedback: bool
    downlink: bool
    seed: Annotated[int, AtLeastZero]
    epochs: Count
    training: Training
    fleet: FleetSpec
    data: Data
    workload: Workload
    limits: Limits
    fitted: bytes = b""  # what samples are prepared by (safetensors); empty as long as unknown

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
            workload=config.workload,
            limits=experiment.limits,
            fitted=pack_fitted(experiment.fitted),
        )

    def prepared_by(self) -> State:
        """What samples are prepared by; nothing as long as the server does not know it."""
        try:
            fitted = safetensors.torch.load(self.fitted) if self.fitted else {}
            is_finite = all(tensor.isfinite().all() for tensor in fitted.values())
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise MessageError(f"what samples are prepared by cannot be read: {error}") from error
        if not is_finite:
            raise MessageError("what samples are prepared by is not finite")
        return fitted


def pack_fitted(fitted: State) -> bytes:
    """What samples are prepared by, as bytes."""
    return safetensors.torch.save(dict(fitted)) if fitted else b""


SECTIONS: Mapping[str, type[Any]] = {
    "training": Training,
    "fleet": FleetSpec,
    "data": Data,
    "workload": Workload,
    "limits": Limits,
}
"""Fields that are tables of their own."""


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """The experiment, and the round that is about to begin."""

    experiment: ExperimentInfo
    round: int

    def pack(self) -> Envelope:
        """As an envelope; devices of protocol 1 read a rejection in it."""
        told = self.experiment
        table = table_of(told, *SECTIONS)
        sections = {name: table_of(getattr(told, name)) for name in SECTIONS}
        rejection = {"refusal": {"why": TOO_OLD}}
        tables = {"experiment": table, "round": {"number": self.round}, **sections, **rejection}
        return protocol_envelope() | Envelope(tables)


def read_info(envelope: Envelope) -> RoundInfo:
    """The experiment and round in a message, unless it is a rejection."""
    if rejection := envelope.tables.get("rejection"):
        why = value_of(rejection, "why", str)
        raise DeviceRejectedError(f"the server rejects this device: {why}")
    check_protocol(envelope, peer="server", me="device")
    table = envelope.table("experiment")
    sections = {name: _section(kind, envelope.table(name)) for name, kind in SECTIONS.items()}
    told = read_record(ExperimentInfo, table, **sections)
    return RoundInfo(told, value_of(envelope.table("round"), "number", int))


def _section(kind: type[Any], table: Mapping[str, Any]) -> Any:
    """A dataclass from a table; keys that only a newer server knows are ignored."""
    known = {item.name: table[item.name] for item in fields(kind) if item.name in table}
    try:
        return checked(kind, known, "the server", [])
    except ConfigError as error:
        raise MessageError(str(error)) from error


def pack_rejection(why: str) -> Envelope:
    """What is sent to a device that cannot take part; `refusal` is protocol 1's word."""
    return Envelope({"rejection": {"why": why}, "refusal": {"why": why}})


# --- what a device can spend ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Capabilities:
    """Which device this is and what it can spend in a round: one row of `Devices`.

    `sums` are of its samples (`data.prepare`), as long as the server does not know all of them. A
    device that plans itself makes an offer, and its resources name no budgets.
    """

    device: int
    round: int
    distance_m: float
    resources: Devices
    model_digest: bytes = b""  # of the public model that it holds, if any
    sums: State = field(default_factory=dict)
    offer: Offer | None = None

    def pack(self) -> Envelope:
        """As an envelope."""
        row = {item.name: float(getattr(self.resources, item.name)[0]) for item in fields(Devices)}
        table = table_of(self, "resources", "sums", "offer") | row
        offer = {"offer": table_of(self.offer)} if self.offer else {}
        return protocol_envelope() | Envelope(
            {"capabilities": table, **offer}, {"sums": blobs_of(self.sums)}
        )


QUANTITY = Interval(1e-30, 1e18)
MEASURABLE = Interval(-300.0, 1e18)  # seconds, joules, bytes, hertz, °C
QUANTITIES = {
    "samples": Interval(1, 1e9),
    "overhead": Interval(0, 1e18),
    "memory_fixed_bytes": Interval(0, 1e18),
    "memory_width_bytes": Interval(0, 1e18),
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
    distance_m = _quantity(table, "distance_m")
    return read_record(
        Capabilities,
        table,
        distance_m=distance_m,
        resources=resources,
        sums=_read_sums(envelope),
        offer=_read_offer(envelope),
    )


def _read_offer(envelope: Envelope) -> Offer | None:
    """What a device that plans itself offers: what it may be is checked against limits later."""
    if (table := envelope.tables.get("offer")) is None:
        return None
    return read_record(Offer, table)


def _read_sums(envelope: Envelope) -> State:
    """The sums in a message: finite numbers, and not too many."""
    sums = envelope.state("sums")
    fine = all(s.dtype is torch.float64 and s.isfinite().all() for s in sums.values())
    if not fine or sum(s.numel() for s in sums.values()) > MOST_SUMS:
        raise MessageError("sums that are not finite numbers, or too many of them")
    return sums


def _quantity(table: Table, name: str) -> float:
    value, allowed = value_of(table, name, float), QUANTITIES.get(name, QUANTITY)
    if not allowed.contains(value):
        raise MessageError(f"{name}: given {value:g}, must be {allowed}")
    return value


# --- a task and its result ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Download:
    """What brings a device's public model up to date: the whole of it, or the steps it missed."""

    whole: State = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    base: bytes = b""  # the digest of the public model that the steps start from

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
    steps = []
    for i, number in enumerate(list_of(table, "rounds", int)):
        places = envelope.state("steps", f"{i}/order/")
        order = {name: place.long() for name, place in places.items()}
        steps.append(Step(number, order, envelope.bytes_of("steps", f"{i}/payload", PAYLOAD)))
    return Download(envelope.state("public"), tuple(steps), value_of(table, "base", bytes))


def model_digest(public: State) -> bytes:
    """A digest of a public model; empty without one."""
    digest = hashlib.blake2s(digest_size=16)
    for name in sorted(public):
        digest.update(name.encode())
        digest.update(raw_bytes(public[name]))
    return digest.digest() if public else b""


class Chain:
    """The public model, and the steps that led to it: what each device has missed of the downlink.

    A device identifies its public model by a digest, not by a round's number: after a server went
    back to a checkpoint, a round of the same number may have another public model. Steps live in
    memory only; a device that holds something else is sent the whole model. Steps come with the
    digest of what they start from, for a device may have been restarted since: it then fails its
    task, and its next message says what it holds now.
    """

    def __init__(self, public: State) -> None:
        self._public = public
        self._digests = [model_digest(public)]  # before the first step, then after each
        self._steps: list[Step] = []

    def add(self, step: Step, public: State) -> None:
        """Add a step; steps that would take more than the whole model are dropped."""
        self._public = public
        self._steps.append(step)
        self._digests.append(model_digest(public))
        while len(self._steps) > 1 and sum(s.size for s in self._steps) >= self._whole():
            del self._steps[0], self._digests[0]

    def since(self, digest: bytes) -> Download:
        """What brings a device up to date that holds the public model of this digest."""
        if digest and digest in self._digests:
            ago = self._digests[::-1].index(digest)  # a step may change nothing: the latest counts
            missed = tuple(self._steps[len(self._steps) - ago :])
            if sum(step.size for step in missed) < self._whole():
                return Download(steps=missed, base=digest)
        return Download(whole=self._public)

    def _whole(self) -> int:
        return Download(whole=self._public).size


@dataclass(frozen=True, slots=True, eq=False)
class TrainTask:
    """What one device has to do in a round.

    `moved` says how the global channels have moved since the first round, in whose order a device
    keeps its residual; empty where that does not matter.
    """

    info: RoundInfo
    device: int
    alpha: float
    widths: Mapping[str, int]
    upload: Upload
    seed: int
    learning_rate: Positive
    weights: bytes  # its sub-model, unless that is cut from the public model
    moved: State
    download: Download = field(default_factory=Download)  # brings the public model up to date
    work: Positive = 1.0  # factor on the local steps

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
            "learning_rate": self.learning_rate,
            "work": self.work,
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


def read_task(envelope: Envelope) -> TrainTask:
    """The task in a message."""
    info = read_info(envelope)
    table = envelope.table("task")
    groups, widths = list_of(table, "groups", str), list_of(table, "widths", int)
    if len(groups) != len(widths):
        raise MessageError("a task without one width for every group")
    return read_record(
        TrainTask,
        {"work": 1.0, **table},  # older servers know no other
        info=info,
        widths=dict(zip(groups, widths, strict=True)),
        upload=read_record(Upload, {**table, "seed": table.get("upload_seed")}, blocks={}),
        weights=envelope.bytes_of("weights", "weights", WEIGHTS),
        moved=envelope.state("moved"),
        download=read_download(envelope),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a device made of its task."""

    payload: bytes
    error: str  # why there is no payload
    busy_s: Annotated[float, Interval(0.0, LONGEST_S)]  # how long it worked
    next: Capabilities  # what it can spend in the next round
    done: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 1.0  # share of the planned steps
    measured: Measured = field(default_factory=Measured)

    def pack(self) -> Envelope:
        """As an envelope."""
        arrays = {"payload": {"payload": bytes_blob(self.payload, PAYLOAD)}}
        table, measured = table_of(self, "payload", "next", "measured"), table_of(self.measured)
        return self.next.pack() | Envelope({"result": table, "measured": measured}, arrays)


def read_result(envelope: Envelope) -> Result:
    """The result in a message."""
    capabilities = read_capabilities(envelope)
    payload = envelope.bytes_of("payload", "payload", PAYLOAD)
    return read_record(
        Result,
        envelope.table("result"),
        payload=payload,
        next=capabilities,
        measured=_read_measured(envelope.table("measured")),
    )


def _read_measured(table: Table) -> Measured:
    """What a device measured: numbers that a round can have, or nothing."""
    kinds: dict[str, Any] = {"throttled": bool, "earlier_round": int}
    found: dict[str, Any] = {}
    for item in fields(Measured):
        if table.get(item.name) is None:
            continue
        value: Any = value_of(table, item.name, kinds.get(item.name, float))
        if not isinstance(value, bool) and not MEASURABLE.contains(value):
            raise MessageError(f"{item.name}: given {value!r:.80}, must be {MEASURABLE}")
        found[item.name] = value
    return Measured(**found)


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
    """The sums of every metric over a device's test samples; they add up over devices."""

    samples: Annotated[int, QUANTITIES["samples"]]
    sums: tuple[Tensor, ...]  # one vector for each metric

    def pack(self) -> Envelope:
        """As an envelope."""
        table = {"samples": self.samples, "metrics": len(self.sums)}
        sums = {str(i): vector for i, vector in enumerate(self.sums)}
        return protocol_envelope() | Envelope({"evaluation": table}, {"sums": blobs_of(sums)})


def read_evaluation(envelope: Envelope) -> Evaluation:
    """The evaluation in a message, if its numbers are possible."""
    check_protocol(envelope, peer="device", me="server")
    sums, table = _read_sums(envelope), envelope.table("evaluation")
    is_whole = 0 < len(sums) == value_of(table, "metrics", int)
    names = [str(i) for i in range(len(sums))]
    if not is_whole or names != list(sums) or any(vector.dim() != 1 for vector in sums.values()):
        raise MessageError("an evaluation without one vector of sums for every metric")
    return read_record(Evaluation, table, sums=tuple(sums.values()))


# --- sub-models as bytes --------------------------------------------------------------------------


def pack_weights(net: ElasticModel, state: State, plan: WidthPlan) -> bytes:
    """Only what a sub-model holds of a global state, one tensor after the other."""
    parts = net.take(state, plan)
    return b"".join(raw_bytes(parts[name]) for name in net.own_names())


def unpack_weights(net: ElasticModel, plan: WidthPlan, weights: bytes) -> dict[str, Tensor]:
    """The tensors of a sub-model."""
    names, like = net.own_names(), tensors_of(net.module)
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
