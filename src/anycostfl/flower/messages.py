"""What server and device say to each other, as records that Flower can carry.

    ask      → offer     which device are you, what can you afford in this round?
    task     → result    your sub-model and how to upload; the payload, and the offer for next time
    refusal              you cannot take part, and why

Tensors travel as raw bytes: a sub-model as one array, a payload as one array. Nothing is pickled.
Whatever does not read as its record is a `MessageError`, which says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

from anycostfl.checks import Interval
from anycostfl.downlink import Step
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.methods import Upload
from anycostfl.shrink import ElasticModel, WidthPlan
from anycostfl.state import State
from anycostfl.types import Devices, Scale, make_devices

Scalar = TypeVar("Scalar", int, float, str, bytes, bool)

PAYLOAD = "anycostfl/payload"
TENSOR = "anycostfl/tensor"
WEIGHTS = "anycostfl/weights"


class MessageError(AnycostError, ValueError):
    """A message that does not say what it should."""


class DeviceRejectedError(AnycostError):
    """The server does not take this device's offers; says why."""


# --- the server asks, the device answers ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """The experiment, the round that is about to begin, and what images are scaled by.

    `config` is what decides the rounds, as TOML: it stays the same when a run is made longer.
    """

    config: str
    round: int
    scale: Scale | None = None

    def pack(self) -> RecordDict:
        """As records."""
        table = ConfigRecord({"config": self.config, "round": self.round})
        if self.scale:
            table["mean"], table["std"] = list(self.scale.mean), list(self.scale.std)
        return RecordDict({"ask": table})


def read_ask(records: RecordDict) -> Ask:
    """The question in a message, unless it is a refusal."""
    if refusal := records.config_records.get("refusal"):
        raise DeviceRejectedError(f"the server refuses this device: {_value(refusal, 'why', str)}")
    table = _table(records, "ask")
    return Ask(_value(table, "config", str), _value(table, "round", int), _read_scale(table))


def _read_scale(table: ConfigRecord) -> Scale | None:
    """The scale in a question, if it has one."""
    if "mean" not in table and "std" not in table:
        return None
    mean, std = (
        tuple(v for v in value if isinstance(v, float) and math.isfinite(v))
        if isinstance(value := table.get(key), list)
        else ()
        for key in ("mean", "std")
    )
    if not mean or len(mean) != len(std) or min(std) <= 0:
        raise MessageError(f"a scale of mean {mean} and std {std}")
    return Scale(mean, std)


def pack_refusal(why: str) -> RecordDict:
    """What is sent to a device that cannot take part."""
    return RecordDict({"refusal": ConfigRecord({"why": why})})


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Who a device is and what it has to spend in a round: one row of `Devices`.

    `holds` marks the public model that it holds, if any (`broadcast`).
    """

    device: int
    round: int
    distance_m: float
    means: Devices
    holds: bytes = b""

    def pack(self) -> ConfigRecord:
        """As one record."""
        row = {item.name: float(getattr(self.means, item.name)[0]) for item in fields(Devices)}
        who = {"device": self.device, "round": self.round, "distance_m": self.distance_m}
        return ConfigRecord({**who, "holds": self.holds, **row})


QUANTITY = Interval(1e-30, 1e18)
QUANTITIES = {
    "samples": Interval(1, 1e12),
    "overhead": Interval(0, 1e18),
    "distance_m": Interval(0, 1e18),
}
"""What an offer may say: wider than any device, narrow enough to plan with and to write down."""


def read_offer(records: RecordDict) -> Offer:
    """The offer in a message, if every number of it is one that a device could have."""
    table = _table(records, "offer")
    row = {item.name: _quantity(table, item.name) for item in fields(Devices)}
    distance_m = _quantity(table, "distance_m")
    try:
        means = make_devices(**row)
    except ConfigError as error:
        raise MessageError(f"an offer that cannot be: {'; '.join(error.problems)}") from error
    return Offer(
        device=_value(table, "device", int),
        round=_value(table, "round", int),
        distance_m=distance_m,
        means=means,
        holds=_value(table, "holds", bytes),
    )


def _quantity(table: ConfigRecord, name: str) -> float:
    value, allowed = _value(table, name, float), QUANTITIES.get(name, QUANTITY)
    if not allowed.contains(value):
        raise MessageError(f"{name}: given {value:g}, allowed {allowed}")
    return value


# --- the server gives a task, the device returns a result -----------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Download:
    """What brings a device's public model up to date: the whole of it, or the steps it missed.

    `base` marks the public model that the steps start from.
    """

    whole: State = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    base: bytes = b""

    @property
    def size(self) -> int:
        """Bytes, without the records around them."""
        whole = sum(tensor.numel() * tensor.element_size() for tensor in self.whole.values())
        return whole + sum(step.size for step in self.steps)

    def pack(self) -> dict[str, ConfigRecord | ArrayRecord]:
        """As records."""
        arrays: dict[str, Array] = {}
        for i, step in enumerate(self.steps):
            arrays[f"{i}/payload"] = _bytes_array(step.payload, PAYLOAD)
            places = {name: order.to(torch.int32) for name, order in step.order.items()}
            arrays |= {f"{i}/order/{name}": _array(order) for name, order in places.items()}
        return {
            "public": pack_state(self.whole),
            "steps": ArrayRecord(arrays),
            "rounds": ConfigRecord(
                {"rounds": [step.round for step in self.steps], "base": self.base}
            ),
        }


def read_download(records: RecordDict) -> Download:
    """The download in a message."""
    table = _table(records, "rounds")
    rounds = table.get("rounds")
    if not isinstance(rounds, list):
        raise MessageError("a download that does not say which rounds its steps belong to")
    arrays: Mapping[str, Array] = records.array_records.get("steps") or {}
    steps = []
    for i, number in enumerate(rounds):
        begin = f"{i}/order/"
        order = {
            name.removeprefix(begin): _as_tensor(array).long()
            for name, array in arrays.items()
            if name.startswith(begin)
        }
        if not isinstance(number, int):
            raise MessageError(f"a step of round {number!r}")
        steps.append(Step(number, order, _bytes_of(records, "steps", f"{i}/payload", PAYLOAD)))
    return Download(read_state(records, "public"), tuple(steps), _value(table, "base", bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What one device has to do in a round.

    Its sub-model comes as `weights`, or is cut from the public model that the `download` brings up
    to date. `moved` says how the global channels have moved since the first round, in whose order a
    device remembers what it has left over; empty where that does not matter.
    """

    ask: Ask
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

    def pack(self) -> RecordDict:
        """As records; blocks are left out, for the device knows its model."""
        upload = {
            f"upload.{item.name}": getattr(self.upload, item.name)
            for item in fields(Upload)
            if item.name != "blocks"
        }
        table = ConfigRecord(
            {
                "device": self.device,
                "alpha": self.alpha,
                "groups": list(self.widths),
                "widths": list(self.widths.values()),
                "seed": self.seed,
                **upload,
            }
        )
        return RecordDict(
            {
                **self.ask.pack(),
                "task": table,
                "weights": ArrayRecord({"weights": _bytes_array(self.weights, WEIGHTS)}),
                "moved": pack_state(self.moved),
                **self.download.pack(),
            }
        )


def read_task(records: RecordDict) -> Task:
    """The task in a message."""
    table = _table(records, "task")
    groups, widths = table.get("groups"), table.get("widths")
    if not isinstance(groups, list) or not isinstance(widths, list) or len(groups) != len(widths):
        raise MessageError("a task without one width for every group")
    plan = {str(g): w for g, w in zip(groups, widths, strict=True) if isinstance(w, int)}
    upload = {item.name: table.get(f"upload.{item.name}") for item in fields(Upload)}
    del upload["blocks"]
    if None in upload.values():
        raise MessageError("a task that does not say how to upload")
    return Task(
        ask=read_ask(records),
        device=_value(table, "device", int),
        alpha=_value(table, "alpha", float),
        widths=plan,
        upload=Upload(**upload),  # type: ignore[arg-type]  # packed from the same fields
        seed=_value(table, "seed", int),
        weights=_bytes_of(records, "weights", "weights", WEIGHTS),
        moved=read_state(records, "moved"),
        download=read_download(records),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a device made of its task.

    `error` says why there is no payload; `busy_s` is how long it worked; `offer` is what it can
    afford in the next round.
    """

    payload: bytes
    error: str
    busy_s: float
    offer: Offer

    def pack(self) -> RecordDict:
        """As records."""
        table = ConfigRecord({"error": self.error, "busy_s": self.busy_s})
        return RecordDict(
            {
                "result": table,
                "payload": ArrayRecord({"payload": _bytes_array(self.payload, PAYLOAD)}),
                "offer": self.offer.pack(),
            }
        )


def read_result(records: RecordDict) -> Result:
    """The result in a message."""
    table = _table(records, "result")
    return Result(
        payload=_bytes_of(records, "payload", "payload", PAYLOAD),
        error=_value(table, "error", str),
        busy_s=_value(table, "busy_s", float),
        offer=read_offer(records),
    )


def wire_bytes(message: Message) -> int:
    """What a message takes on the wire, without the headers of HTTP and TLS."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


# --- tensors as bytes -----------------------------------------------------------------------------


def pack_weights(net: ElasticModel, state: Mapping[str, Tensor], plan: WidthPlan) -> bytes:
    """Only what a sub-model holds of a global state, one tensor after the other."""
    parts = net.take(state, plan)
    return b"".join(raw_bytes(parts[name]) for name in net.own_names())


def unpack_weights(
    net: ElasticModel, like: Mapping[str, Tensor], plan: WidthPlan, weights: bytes
) -> dict[str, Tensor]:
    """The tensors of a sub-model; `like` gives the types."""
    names = net.own_names()
    sizes = [math.prod(plan.shapes[n]) * like[n].element_size() for n in names]
    if len(weights) != sum(sizes):
        raise MessageError(
            f"a sub-model of this plan has {sum(sizes)} bytes, {len(weights)} came: do server and "
            "device run the same version?"
        )
    state, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        data = bytearray(memoryview(weights)[start : start + size])
        state[name] = _tensor(data, like[name].dtype, plan.shapes[name])
        start += size
    return state


def pack_state(state: State) -> ArrayRecord:
    """Named tensors, one array each."""
    return ArrayRecord({name: _array(tensor) for name, tensor in state.items()})


def read_state(records: RecordDict, key: str) -> dict[str, Tensor]:
    """Named tensors as `pack_state` wrote them; none if there is no such record."""
    arrays = records.array_records.get(key)
    return {name: _as_tensor(array) for name, array in arrays.items()} if arrays else {}


def _array(tensor: Tensor) -> Array:
    kind = str(tensor.dtype).removeprefix("torch.")
    return Array(dtype=kind, shape=tuple(tensor.shape), stype=TENSOR, data=raw_bytes(tensor))


def _as_tensor(array: Array) -> Tensor:
    kind = getattr(torch, array.dtype, None)
    if array.stype != TENSOR or not isinstance(kind, torch.dtype):
        raise MessageError(f"an array of kind {array.stype!r} and type {array.dtype!r}")
    whole = all(n >= 0 for n in array.shape)
    if not whole or len(array.data) != math.prod(array.shape) * kind.itemsize:
        raise MessageError(f"an array of shape {array.shape} with {len(array.data)} bytes")
    return _tensor(bytearray(array.data), kind, array.shape)


def raw_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor, one after the other."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def _tensor(data: bytearray, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.zeros(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


# --- records, read with care ----------------------------------------------------------------------


def _bytes_array(data: bytes, kind: str) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype=kind, data=data)


def _bytes_of(records: RecordDict, record: str, name: str, kind: str) -> bytes:
    arrays = records.array_records.get(record)
    array = arrays.get(name) if arrays else None
    if array is None or array.stype != kind:
        raise MessageError(f"a message without {kind}")
    return bytes(array.data)


def _table(records: RecordDict, key: str) -> ConfigRecord:
    table = records.config_records.get(key)
    if table is None:
        raise MessageError(f"a message without {key}")
    return table


def _value(table: ConfigRecord, key: str, kind: type[Scalar]) -> Scalar:
    value = table.get(key)
    if type(value) is not kind:
        raise MessageError(f"{key}: given {value!r}, allowed {kind.__name__}")
    return value
