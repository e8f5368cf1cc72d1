"""Every parser that reads what others wrote: valid inputs for it, and what must hold afterwards.

    CODEC        the payload of AnycostFL's codecs, by name; mutations know their sections
    NAME         the payload of every other method, by its name
    journal      two copies of rounds.jsonl
    checkpoint   a safetensors file
    config       TOML
    message      Flower's records, as they come from a device and from a server

A target makes a spoilt input from dice, and says what the parser says to one. Any exception but the
parser's own ends the fuzzing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import string
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mutations
from anycostfl import methods
from anycostfl.codec import CODECS, Upload
from anycostfl.codec.frame import _HEADER as HEADER
from anycostfl.config import load_preset, parse_config, to_toml
from anycostfl.errors import ConfigError, PayloadError
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.records.checkpoint import DAMAGE, Checkpoint, read_checkpoint
from anycostfl.records.journal import parse_journal
from anycostfl.records.round import DeviceRecord, RoundRecord
from anycostfl.records.run import RunWriter
from anycostfl.server.downlink import Step
from anycostfl.server.suspensions import Gate, bench_of
from mutations import (
    BINDING,
    PLAN,
    TAKEN,
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
    """One parser: a spoilt input from dice, what the parser says to an input, inputs as bytes."""

    spoil: Callable[[Dice], Any]
    outcome: Callable[[Any], str]
    dump: Callable[[Any], bytes] = bytes
    load: Callable[[bytes], Any] = bytes

    def says(self, spoilt: Any) -> str:
        """What the parser says, `TAKEN` if it takes the input; one that breaks it is shown."""
        try:
            return self.outcome(spoilt)
        except BaseException as error:
            raise FoundError(repr(spoilt)[:4000]) from error


TEXT_BITS = (
    "nan", "-1", "1e999", "null", "[]", "{}", '""', "true", "0x10", '"\\u0000"', "[[", "}}", "\n",
    "=", "[gate]", "strikes = 0", "a.b.c = 1", '"""', "9" * 400, "1979-05-27", "\ud7ff", "'",
)  # fmt: skip


def spoil_bytes(data: bytes, dice: Dice) -> bytes:
    """One to three blind mutations."""
    for _ in range(dice.randint(1, 3)):
        mutate = dice.choice((flip, overwrite, truncate, extend))
        data = mutate(data, dice) if len(data) > 8 else noise(data, dice)
    return data


def spoil_text(text: str, dice: Dice) -> str:
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
        lambda dice: mutations.spoil(dice.choice(valid), dice)[1], outcome=mutations.outcome
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
        return TAKEN

    def spoil(dice: Dice) -> bytes:
        payload = dice.choice(valid)
        mutate = dice.choice((flip, overwrite, truncate, extend, forge_header, noise, in_body))
        spoilt = mutate(payload, dice)
        return seal(spoilt) if dice.random() < 0.7 else spoilt

    return Target(spoil, outcome)


def in_body(payload: bytes, dice: Dice) -> bytes:
    """Change bytes behind the header only."""
    head, body = payload[: HEADER.size], payload[HEADER.size :]
    return head + (overwrite(body, dice) if dice.random() < 0.5 else flip(body, dice))


# --- files ----------------------------------------------------------------------------------------


def journal_target() -> Target:
    """Two copies of a journal, of which one or both are spoilt."""
    device = DeviceRecord(
        3, "refused: damaged: x", 20, 1.0, 1e6, 0.1, binds=("energy",), surplus=("duplicate: x",)
    )
    rounds = [RoundRecord(n, 0.5 if n else None, (device, device)) for n in range(3)]
    lines = [json.dumps(dataclasses.asdict(r)) for r in rounds]
    whole = "\n".join(lines)

    def outcome(copies: tuple[bytes, bytes]) -> str:
        remarks: list[str] = []
        records = list(parse_journal([copy.splitlines() for copy in copies], remarks))
        if [r.round for r in records] != list(range(len(records))):
            raise AssertionError("rounds out of order")
        for record in records:
            for told in record.devices:
                told.status.startswith("ok")
                hash((told, float(told.latency_s + told.energy_j)))
        bench_of(records, Gate())
        return remarks[0] if remarks else TAKEN

    def spoil(dice: Dice) -> tuple[bytes, bytes]:
        if dice.random() < 0.7:
            first = spoil_text(whole, dice).encode("utf-8", "replace")
        else:
            first = spoil_bytes(whole.encode(), dice)
        return first, dice.choice((b"", whole.encode(), first))

    def dump(copies: tuple[bytes, bytes]) -> bytes:
        return len(copies[0]).to_bytes(4, "little") + copies[0] + copies[1]

    def load(data: bytes) -> tuple[bytes, bytes]:
        middle = 4 + int.from_bytes(data[:4], "little")
        return data[4:middle], data[middle:]

    return Target(spoil, outcome, dump, load)


def checkpoint_target() -> Target:
    """A checkpoint of a tiny model; half of the mutations hit the header, which is JSON."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    writer = RunWriter.create(folder / "run", "")
    state = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3), "h": torch.ones(2).half()}
    zeros = {"w": torch.zeros(3, 4)}
    writer.checkpoint(Checkpoint(1, state, {7: {"w": torch.ones(2)}}, zeros, zeros))
    path = folder / "run" / "checkpoint-1.safetensors"
    valid, spoilt_path = path.read_bytes(), folder / "spoilt.safetensors"
    length = int.from_bytes(valid[:8], "little")

    def outcome(data: bytes) -> str:
        spoilt_path.write_bytes(data)
        try:
            found = read_checkpoint(spoilt_path)
        except DAMAGE as error:
            return str(error)
        if found.rounds < 0 or not isinstance(found.rounds, int):
            raise AssertionError("rounds")
        return TAKEN

    def spoil(dice: Dice) -> bytes:
        if dice.random() < 0.5:
            return spoil_bytes(valid, dice)
        text = spoil_text(valid[8 : 8 + length].decode(), dice).encode("utf-8", "replace")
        size = len(text) if dice.random() < 0.8 else dice.randrange(1 << 62)
        return size.to_bytes(8, "little") + text + valid[8 + length :]

    return Target(spoil, outcome)


def config_target() -> Target:
    """The demo preset as TOML."""
    valid = to_toml(load_preset("demo"))

    def outcome(text: str) -> str:
        try:
            config = parse_config(text, "fuzz")
        except ConfigError as error:
            return str(error)
        if parse_config(to_toml(config), "again") != config:
            raise AssertionError("written and read again it is another")
        return TAKEN

    return Target(lambda dice: spoil_text(valid, dice), outcome, str.encode, bytes.decode)


# --- messages -------------------------------------------------------------------------------------


def message_target() -> Target:
    """Records with parts dropped, swapped and retyped, read as all kinds of message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: PLC0415 - optional
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto  # noqa: PLC0415
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict  # noqa: PLC0415

    from anycostfl.flower import messages  # noqa: PLC0415 - optional

    logging.getLogger("flwr").setLevel(logging.ERROR)
    row = dict.fromkeys((f.name for f in dataclasses.fields(Devices)), 1.0)
    offer = messages.Offer(3, 1, 10.0, make_devices(**row))
    ask = messages.Ask("summary = 'x'", 1)
    order = {"conv": torch.arange(4)}
    steps = (Step(0, order, bytes(30)), Step(1, {}, b""))
    download = messages.Download({"w": torch.ones(3)}, steps, b"mark")
    how = Upload(0.1, 1, BINDING)
    task = messages.Task(ask, 3, 0.5, {"conv": 4}, how, 5, bytes(40), order, download)
    result = messages.Result(bytes(50), "", 0.5, offer)
    valid = [task.pack, result.pack, ask.pack, lambda: RecordDict({"offer": offer.pack()})]
    values: tuple[Any, ...] = (
        0, -1, 2**63, -(2**63), 2**70, 0.0, -1.0, float("nan"), float("inf"), 1e308, "", "x" * 99,
        b"", b"\0" * 9, True, [], [1, 2], [1.5], ["a"], [b"a"], [True],
    )  # fmt: skip
    dtypes = ("float32", "int64", "uint8", "bool", "object", "Tensor", "nn", "float8_e5m2", "")

    def spoil_once(records: Any, dice: Dice) -> None:
        names = list(records)
        how, key = dice.randrange(6), dice.choice(names) if names else "x"
        record = records.get(key)
        if how == 0 and names:
            del records[key]
        elif how == 1 and isinstance(record, ConfigRecord) and len(record):
            del record[dice.choice(list(record))]
        elif how == 2 and isinstance(record, ConfigRecord):
            record[dice.choice([*record, "device", "y"])] = dice.choice(values)
        elif how == 3 and isinstance(record, ArrayRecord):
            shape = tuple(dice.choice((0, 1, 5, 2**40, -1)) for _ in range(dice.randrange(4)))
            kinds = (messages.TENSOR, messages.PAYLOAD, messages.WEIGHTS, "numpy.ndarray", "")
            record[dice.choice([*record, "z"])] = Array(
                dtype=dice.choice(dtypes), shape=shape, stype=dice.choice(kinds),
                data=dice.randbytes(dice.choice((0, 1, 8, 20, 40, 50))),
            )  # fmt: skip
        elif how == 4:
            records[key] = dice.choice((ConfigRecord({}), ArrayRecord({})))
        else:
            records[dice.choice(("ask", "task", "result", "offer", "order", "steps", "w"))] = (
                ConfigRecord({"a": 1})
            )

    readers: tuple[Callable[[Any], object], ...] = (
        messages.read_task,
        messages.read_result,
        messages.read_ask,
        messages.read_offer,
        partial(messages.read_state, key="order"),
    )

    def outcome(records: Any) -> str:
        words = []
        for read in readers:
            try:
                read(records)
            except messages.MessageError as error:
                words.append(str(error))
        # The state reads as empty wherever there is none.
        return TAKEN if len(words) < len(readers) - 1 else words[-1]

    def spoil(dice: Dice) -> Any:
        records = dice.choice(valid)()  # type: ignore[no-untyped-call]  # Flower is untyped
        for _ in range(dice.randint(1, 4)):
            with suppress(TypeError, ValueError):  # Flower itself does not let such a record be
                spoil_once(records, dice)
        return records

    def dump(records: Any) -> bytes:
        return bytes(recorddict_to_proto(records).SerializeToString())

    def load(data: bytes) -> Any:
        return recorddict_from_proto(ProtoRecordDict.FromString(data))

    return Target(spoil, outcome, dump, load)


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
