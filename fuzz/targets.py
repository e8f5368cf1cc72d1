"""Every parser of what others wrote: valid inputs for it, and what must hold afterwards.

    CODEC        the payload of AnycostFL's codecs, by name; mutations know their sections
    NAME         the payload of every other method, by its name
    journal      two copies of rounds.jsonl, of every schema
    checkpoint   a safetensors file
    config       TOML, with keys of today and of earlier versions
    message      Flower's records, as they come from a device and from a server

A target makes a corrupted input from dice, and tells what the parser says to it. Any exception but
the parser's own ends the fuzzing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import string
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save

import mutations
from anycostfl import methods
from anycostfl.codec import CODECS, Upload
from anycostfl.codec.frame import _HEADER as HEADER
from anycostfl.config import RENAMED, load_preset, parse_config, to_toml
from anycostfl.errors import ConfigError, PayloadError
from anycostfl.experiment import build_experiment
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.records.checkpoint import (
    DAMAGE,
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from anycostfl.records.checkpoint import (
    _checksum as checksum,
)
from anycostfl.records.journal import NewerSchemaError, format_record, parse_journal, parse_record
from anycostfl.records.round import DeviceRecord, RoundRecord, Status, refusals, total
from anycostfl.server.downlink import Step, ledger_of
from anycostfl.server.suspensions import Gate, suspensions_after
from anycostfl.wire import messages
from anycostfl.wire.envelope import TENSOR, Blob, Envelope, MessageError
from mutations import (
    ACCEPTED,
    BINDING,
    PLAN,
    extend,
    flip,
    forge_header,
    noise,
    overwrite,
    seal,
    truncate,
)

SLOW = {  # how many times fewer cases these get
    "lowrank": 2, "heterofl": 2, "journal": 2, "checkpoint": 5, "config": 20,
    "message": 20,
}  # fmt: skip
Dice = random.Random


class FoundError(Exception):
    """An input that a parser does not survive."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One parser: corrupted inputs from dice, what the parser says to one, inputs as bytes."""

    corrupt: Callable[[Dice], Any]
    outcome: Callable[[Any], str]
    dump: Callable[[Any], bytes] = bytes
    load: Callable[[bytes], Any] = bytes

    def says(self, corrupted: Any) -> str:
        """What the parser says, `ACCEPTED` if it takes the input; one that breaks it is shown."""
        try:
            return self.outcome(corrupted)
        except BaseException as error:
            raise FoundError(repr(corrupted)[:4000]) from error


TEXT_BITS = (
    "nan", "-1", "1e999", "null", "[]", "{}", '""', "true", "0x10", '"\\u0000"', "[[", "}}", "\n",
    "=", "[gate]", "strikes = 0", "a.b.c = 1", '"""', "9" * 400, "1979-05-27", "\ud7ff", "'",
)  # fmt: skip


def corrupt_bytes(data: bytes, dice: Dice) -> bytes:
    """One to three blind mutations."""
    for _ in range(dice.randint(1, 3)):
        mutate = dice.choice((flip, overwrite, truncate, extend))
        data = mutate(data, dice) if len(data) > 8 else noise(data, dice)
    return data


def corrupt_text(text: str, dice: Dice) -> str:
    """Insert, replace, drop or swap pieces of a text, or damage its characters."""
    for _ in range(dice.randint(1, 3)):
        at, how = dice.randrange(len(text) + 1), dice.randrange(5)
        end = min(len(text), at + dice.choice((0, 1, 3, 20, 200)))
        if how == 0:
            text = text[:at] + dice.choice(TEXT_BITS) + text[at:]
        elif how == 1:
            text = text[:at] + dice.choice(TEXT_BITS) + text[end:]
        elif how == 2:
            text = text[:at] + text[end:]
        elif how == 3:
            text = text[:at] + text[at:end] * dice.choice((2, 2, 3, 50)) + text[end:]
        else:
            text = text[:at] + dice.choice(string.printable) + text[at + 1 :]
    return text


# --- payloads -------------------------------------------------------------------------------------


def codec_target(codec: str) -> Target:
    """One codec of AnycostFL, as fuzz/guided.py has it."""
    valid = mutations.valid_payloads(codec)
    return Target(
        lambda dice: mutations.corrupt(dice.choice(valid), dice)[1], outcome=mutations.outcome
    )


def method_target(name: str) -> Target:
    """The payload of one method."""
    method = methods.load(name)
    draw = torch.Generator().manual_seed(0)
    normal = {n: torch.randn(s, generator=draw) for n, s in PLAN.items()}
    kinds = [
        normal,
        {n: x.pow(7) for n, x in normal.items()},
        {n: 0 * x for n, x in normal.items()},
    ]
    valid = [
        method.encode(update, Upload(beta, seed, BINDING))
        for seed, update in enumerate(kinds)
        for beta in (0.15, 0.3, 1.0)
    ]

    def outcome(payload: bytes) -> str:
        try:
            update = method.decode(payload, PLAN, Upload(1.0, 0, BINDING))
        except PayloadError as error:
            return str(error)
        for key, shape in PLAN.items():
            value, mask = update.values[key], update.masks[key]
            if not (value.shape == mask.shape == shape) or not bool(torch.isfinite(value).all()):
                raise AssertionError(key)
        return ACCEPTED

    def corrupt(dice: Dice) -> bytes:
        payload = dice.choice(valid)
        mutate = dice.choice((flip, overwrite, truncate, extend, forge_header, noise, in_body))
        corrupted = mutate(payload, dice)
        return seal(corrupted) if dice.random() < 0.7 else corrupted

    return Target(corrupt, outcome)


def in_body(payload: bytes, dice: Dice) -> bytes:
    """Change bytes behind the header only."""
    head, body = payload[: HEADER.size], payload[HEADER.size :]
    return head + (overwrite(body, dice) if dice.random() < 0.5 else flip(body, dice))


# --- files ----------------------------------------------------------------------------------------

OLD_DEVICE = {
    "device": 3, "status": "refused: damaged: x", "samples": 20, "distance_m": 1.0, "rate_bps": 1e6,
    "budget_j": 0.1, "bytes_up": 7, "binds": ["energy"], "surplus": ["duplicate: x"],
    "agreement": None,
}  # fmt: skip
"""A device in a journal of schema 1."""


def as_schema_2(line: str) -> str:
    """A line of a journal as schema 2 had it."""
    table = json.loads(line)
    kept = {key: value for key, value in table.items() if key not in ("metric", "others")}
    return json.dumps({**kept, "schema": 2, "accuracy": table["metric"]})


def journal_target() -> Target:
    """Two copies of a journal, of which one or both are corrupted."""
    device = DeviceRecord(
        3, Status.REFUSED, "damaged", "x", 20, 1.0, 1e6, 0.1, binds=("energy",), duplicates=1
    )
    both = (device, device)
    late = dataclasses.replace(device, status=Status.UNUSED, cause="late", duplicates=0)
    records = [
        RoundRecord(n, 0.5 if n else None, (*both, late), 0, {"mae": 2.5}, 1.5, "rolled back")
        for n in range(3)
    ]
    new = [format_record(record) for record in records]
    second = [as_schema_2(line) for line in new]
    idle = {"device": 4, "status": "sat out: energy"}
    old = [
        json.dumps({"round": n, "accuracy": None, "devices": [OLD_DEVICE, idle]}) for n in range(3)
    ]
    valid = ["\n".join(lines) for lines in (new, second, old, [old[0], second[1], new[2]])]

    def outcome(copies: tuple[bytes, bytes]) -> str:
        remarks: list[str] = []
        lines = [copy.splitlines() for copy in copies]
        try:
            records = parse_journal(lines, remarks, ("journal", "copy"))
        except NewerSchemaError as error:
            return str(error)
        if [r.round for r in records] != list(range(len(records))):
            raise AssertionError("rounds out of order")
        for record in records:  # what is resumed is written again, in the schema of today
            line = format_record(record)
            if format_record(parse_record(line)) != line:
                raise AssertionError("written and read again it is another")
            others = [(name, float(value)) for name, value in record.others.items()]
            hash((record.round, record.metric, record.step_bytes, *others))
            hash((record.devices, *(device.explained for device in record.devices)))
        suspensions_after(records, Gate())
        ledger_of(records)
        total(records)
        refusals(records)
        return remarks[0] if remarks else ACCEPTED

    def corrupt(dice: Dice) -> tuple[bytes, bytes]:
        text = dice.choice(valid)
        if dice.random() < 0.7:
            first = corrupt_text(text, dice).encode("utf-8", "replace")
        else:
            first = corrupt_bytes(text.encode(), dice)
        return first, dice.choice((b"", text.encode(), first))

    def dump(copies: tuple[bytes, bytes]) -> bytes:
        return len(copies[0]).to_bytes(4, "little") + copies[0] + copies[1]

    def load(data: bytes) -> tuple[bytes, bytes]:
        middle = 4 + int.from_bytes(data[:4], "little")
        return data[4:middle], data[middle:]

    return Target(corrupt, outcome, dump, load)


KINDS = (
    "model/w", "velocity/w", "public/w", "moved/conv", "memory/7/w", "memory/-1/w", "memory/x/w",
    "sizes/recent", "best/w", "sizes", "memory//w", "memory/7", "memory", "memory/", "memoryx/w",
    "w", "", "/", "/w", "model/",
)  # fmt: skip
ROUNDS: tuple[Any, ...] = (0, 1, -1, 2**70, 1.0, True, None, "1", [], {})


def checkpoint_target() -> Target:
    """A checkpoint of a tiny model: corrupted bytes or header, or forged with a right checksum."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    weights = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3), "h": torch.ones(2).half()}
    zeros, moved = {"w": torch.zeros(3, 4)}, {"conv": torch.arange(4)}
    kinds = {"model": weights, "velocity": zeros, "public": zeros, "moved": moved}
    write_checkpoint(folder, Checkpoint(1, {**kinds, "memory/7": {"w": torch.ones(2)}}))
    valid, path = (folder / "checkpoint-1.safetensors").read_bytes(), folder / "corrupted"
    length = int.from_bytes(valid[:8], "little")

    def outcome(data: bytes) -> str:
        path.write_bytes(data)
        try:
            found = read_checkpoint(path)
        except DAMAGE as error:
            return str(error)
        if type(found.rounds) is not int or found.rounds < 0:
            raise AssertionError("rounds")
        if not all(isinstance(device, int) for device in found.memories()):
            raise AssertionError("memories")
        return ACCEPTED

    def forge(dice: Dice) -> bytes:
        names = dice.sample(KINDS, dice.randint(0, 4))
        tensors = {name: torch.arange(dice.randrange(3)) for name in names}
        about = {"rounds": dice.choice(ROUNDS), "crc32": checksum(tensors)}
        return save(tensors, {"checkpoint": json.dumps(about)})

    def corrupt(dice: Dice) -> bytes:
        how = dice.random()
        if how < 0.2:
            return forge(dice)
        if how < 0.6:
            return corrupt_bytes(valid, dice)
        text = corrupt_text(valid[8 : 8 + length].decode(), dice).encode("utf-8", "replace")
        size = len(text) if dice.random() < 0.8 else dice.randrange(1 << 62)
        return size.to_bytes(8, "little") + text + valid[8 + length :]

    return Target(corrupt, outcome)


def config_target() -> Target:
    """The demo preset as TOML, as it is written today and with the keys of earlier versions."""
    today = to_toml(load_preset("demo"))
    valid = (today, today, earlier_keys(today))

    def outcome(text: str) -> str:
        try:
            config = parse_config(text, "fuzz")
        except ConfigError as error:
            return str(error)
        if parse_config(to_toml(config), "again") != config:
            raise AssertionError("written and read again it is another")
        return ACCEPTED

    def corrupt(dice: Dice) -> str:
        return corrupt_text(dice.choice(valid), dice)

    return Target(corrupt, outcome, str.encode, bytes.decode)


def earlier_keys(text: str) -> str:
    """A configuration with every key that has been renamed under its old name."""
    table = tomllib.loads(text)
    for old, new in RENAMED.items():
        (*home, key), (*old_home, old_key) = new.split("."), old.split(".")
        source = table.get(home[0], {}) if home else table
        if key in source:
            (table[old_home[0]] if old_home else table)[old_key] = source.pop(key)
    return tomli_w.dumps(table)


# --- messages -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message: which kind its receiver takes it for, and Flower's records."""

    kind: str
    records: Any


VALUES: tuple[Any, ...] = (
    0, -1, 2**63, -(2**63), 2**70, 0.0, -1.0, float("nan"), float("inf"), 1e308, "", "x" * 99,
    b"", b"\0" * 9, True, [], [1, 2], [1.5], ["a"], [b"a"], [True],
)  # fmt: skip
DTYPES = ("float32", "int64", "uint8", "bool", "object", "Tensor", "nn", "float8_e5m2", "")
NAMES = (
    "protocol", "experiment", "round", "training", "fleet", "data", "task", "result", "rejection",
    "capabilities", "download", "evaluation", "payload", "weights", "moved", "public", "steps",
    "sums",
)  # fmt: skip


def valid_messages() -> Mapping[str, Envelope]:
    """A message of every kind."""
    about = messages.ExperimentInfo.of(build_experiment(load_preset("demo")))
    fitted = messages.pack_fitted({"mean": torch.tensor([0.5]), "std": torch.tensor([0.2])})
    info = messages.RoundInfo(dataclasses.replace(about, fitted=fitted), 1)
    row = dict.fromkeys((item.name for item in dataclasses.fields(Devices)), 1.0)
    sums = {"count": torch.ones(1).double(), "sum": torch.zeros(1).double()}
    known = messages.Capabilities(3, 1, 10.0, make_devices(**row), b"digest", sums)
    order = {"conv": torch.arange(4)}
    steps = (Step(0, order, bytes(30)), Step(1, {}, b""))
    task = messages.TrainTask(
        info=info,
        device=3,
        alpha=0.5,
        widths={"conv": 4},
        upload=Upload(0.1, 1, BINDING),
        seed=5,
        learning_rate=0.1,
        weights=bytes(40),
        moved=order,
        download=messages.Download({"w": torch.ones(3)}, steps, b"digest"),
    )
    return {
        "info": info.pack(),
        "capabilities": known.pack(),
        "task": task.pack(),
        "result": messages.Result(bytes(50), "", 0.5, known).pack(),
        "evaluate": messages.EvaluateTask(info, {"w": torch.ones(3)}).pack(),
        "evaluation": messages.Evaluation(9, (torch.tensor([7.0, 9.0]).double(),)).pack(),
    }


READERS: Mapping[str, Callable[[Envelope], object]] = {
    "info": lambda envelope: messages.read_info(envelope).experiment.prepared_by(),
    "capabilities": messages.read_capabilities,
    "task": messages.read_task,
    "result": messages.read_result,
    "evaluate": messages.read_evaluate_task,
    "evaluation": messages.read_evaluation,
    "state": lambda envelope: envelope.state("moved"),
}


def message_target() -> Target:
    """Records with parts dropped, swapped and retyped; every reader must survive every message."""
    from flwr.app import RecordDict  # noqa: PLC0415 - optional

    from anycostfl.flower.messages import to_envelope, to_records  # noqa: PLC0415 - optional

    logging.getLogger("flwr").setLevel(logging.ERROR)
    valid = valid_messages()

    def outcome(received: Received) -> str:
        envelope, said = to_envelope(received.records), {}
        for kind, read in READERS.items():
            try:
                read(envelope)
            except (MessageError, messages.DeviceRejectedError) as error:
                said[kind] = str(error)
        return said.get(received.kind, ACCEPTED)

    def corrupt(dice: Dice) -> Received:
        kind = dice.choice(list(valid))
        records = to_records(valid[kind])
        for _ in range(dice.randint(1, 4)):
            with suppress(TypeError, ValueError):  # Flower does not allow such a record
                corrupt_records(records, dice)
        return Received(kind, records)

    def dump(received: Received) -> bytes:
        envelope = to_envelope(received.records)
        what = {"kind": received.kind, **dataclasses.asdict(envelope)}
        return json.dumps(what, default=lambda data: {"hex": data.hex()}).encode()

    def load(data: bytes) -> Received:
        what = json.loads(data, object_hook=as_bytes)
        arrays = {
            name: {key: Blob(**{**b, "shape": tuple(b["shape"])}) for key, b in blobs.items()}
            for name, blobs in what["arrays"].items()
        }
        records: RecordDict = to_records(Envelope(what["tables"], arrays))
        return Received(what["kind"], records)

    return Target(corrupt, outcome, dump, load)


def as_bytes(table: dict[str, Any]) -> Any:
    """Bytes as the corpus holds them."""
    return bytes.fromhex(table["hex"]) if table.keys() == {"hex"} else table


def corrupt_records(records: Any, dice: Dice) -> None:
    """Drop, add or replace a record, or a value in one."""
    from flwr.app import Array, ArrayRecord, ConfigRecord  # noqa: PLC0415 - optional

    how, key = dice.randrange(6), dice.choice([*records, "x"])
    record = records.get(key)
    if how == 0 and key in records:
        del records[key]
    elif how == 1 and isinstance(record, ConfigRecord) and len(record):
        del record[dice.choice(list(record))]
    elif how == 2 and isinstance(record, ConfigRecord):
        record[dice.choice([*record, "device", "y"])] = dice.choice(VALUES)
    elif how == 3 and isinstance(record, ArrayRecord):
        shape = tuple(dice.choice((0, 1, 5, 2**40, -1)) for _ in range(dice.randrange(4)))
        kinds = (TENSOR, messages.PAYLOAD, messages.WEIGHTS, "numpy.ndarray", "")
        record[dice.choice([*record, "z", "0/order/", "0/payload"])] = Array(
            dtype=dice.choice(DTYPES), shape=shape, stype=dice.choice(kinds),
            data=dice.randbytes(dice.choice((0, 1, 8, 20, 40, 50))),
        )  # fmt: skip
    elif how == 4:
        records[key] = dice.choice((ConfigRecord({}), ArrayRecord({})))
    else:
        records[dice.choice(NAMES)] = ConfigRecord({"why": "x", "version": dice.choice((1, 2, 3))})


# --- all of them ----------------------------------------------------------------------------------


def targets() -> Mapping[str, Callable[[], Target]]:
    """How to make the target of each parser."""
    others = [name for name in methods.names() if name != "anycostfl"]
    return {
        **{codec: partial(codec_target, codec) for codec in CODECS},
        **{name: partial(method_target, name) for name in others},
        "journal": journal_target,
        "checkpoint": checkpoint_target,
        "config": config_target,
        "message": message_target,
    }
