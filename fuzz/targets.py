"""Every parser that reads what others wrote: valid inputs for it, and what must hold afterwards.

    CODEC        the payload of AnycostFL's codecs, by name; mutations know their sections
    NAME         the payload of every other method, by its name
    journal      two copies of rounds.jsonl
    checkpoint   a safetensors file
    config       TOML
    message      Flower's records, as they come from a device and from a server

A target is a function from dice to one case: it makes a spoilt input and feeds it to the parser. It
says whether the input was taken; any exception but the parser's own ends the fuzzing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mutations
from anycostfl import methods
from anycostfl.codec import CODECS
from anycostfl.codec.frame import _HEADER as HEADER
from anycostfl.config import load_preset, parse_config, to_toml
from anycostfl.errors import ConfigError, PayloadError
from anycostfl.methods import Upload
from anycostfl.records import DAMAGE, Checkpoint, RunWriter, parse_journal, read_checkpoint
from anycostfl.types import DeviceRecord, Devices, RoundRecord, make_devices
from mutations import BINDING, PLAN, extend, flip, forge_header, noise, overwrite, seal, truncate

SLOW = ("config", "message")
Dice = random.Random
Case = Callable[[Dice], tuple[str, bool]]
"""One case: what was done, and whether the parser took it."""

TEXT_BITS = (
    "nan", "-1", "1e999", "null", "[]", "{}", '""', "true", "0x10", '"\\u0000"', "[[", "}}", "\n",
    "=", "[gate]", "strikes = 0", "a.b.c = 1", '"""', "9" * 400, "1979-05-27", "\ud7ff", "'",
)  # fmt: skip


def spoil_bytes(data: bytes, dice: Dice) -> tuple[str, bytes]:
    """One to three blind mutations."""
    names = []
    for _ in range(dice.randint(1, 3)):
        mutate = dice.choice((flip, overwrite, truncate, extend))
        names.append(mutate.__name__)
        data = mutate(data, dice) if len(data) > 8 else noise(data, dice)
    return names[0], data


def spoil_text(text: str, dice: Dice) -> tuple[str, str]:
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
    return ("insert", "replace", "drop", "repeat", "character")[how], text


# --- payloads -------------------------------------------------------------------------------------


def codec_case(codec: str) -> Case:
    """One codec of AnycostFL, as fuzz/guided.py has it."""
    valid = mutations.valid_payloads(codec)

    def case(dice: Dice) -> tuple[str, bool]:
        name, spoilt = mutations.spoil(dice.choice(valid), dice)
        return name, checked(mutations.survives, spoilt)

    return case


def method_case(name: str) -> Case:
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

    def survives(payload: bytes) -> bool:
        try:
            update = method.decode(payload, PLAN, BINDING)
        except PayloadError:
            return False
        for key, shape in PLAN.items():
            value, mask = update.values[key], update.masks[key]
            if not (value.shape == mask.shape == shape) or not bool(torch.isfinite(value).all()):
                raise AssertionError(key)
        return True

    def case(dice: Dice) -> tuple[str, bool]:
        payload = dice.choice(valid)
        mutate = dice.choice((flip, overwrite, truncate, extend, forge_header, noise, in_body))
        spoilt = mutate(payload, dice)
        sealed = dice.random() < 0.7
        spoilt = seal(spoilt) if sealed else spoilt
        return mutate.__name__ + (" sealed" if sealed else ""), checked(survives, spoilt)

    return case


def in_body(payload: bytes, dice: Dice) -> bytes:
    """Change bytes behind the header only."""
    head, body = payload[: HEADER.size], payload[HEADER.size :]
    return head + (overwrite(body, dice) if dice.random() < 0.5 else flip(body, dice))


# --- files ----------------------------------------------------------------------------------------


def journal_case() -> Case:
    """Two copies of a journal, of which one or both are spoilt."""
    device = DeviceRecord(
        3, "refused: damaged: x", 20, 1.0, 1e6, 0.1, binds=("energy",), surplus=("duplicate: x",)
    )
    rounds = [RoundRecord(n, 0.5 if n else None, (device, device)) for n in range(3)]
    lines = [json.dumps(dataclasses.asdict(r)) for r in rounds]
    whole = "\n".join(lines)

    def survives(copies: Sequence[bytes]) -> bool:
        remarks: list[str] = []
        records = list(parse_journal([copy.splitlines() for copy in copies], remarks))
        if [r.round for r in records] != list(range(len(records))):
            raise AssertionError("rounds out of order")
        for record in records:
            for told in record.devices:
                told.status.startswith("ok")
                hash((told, float(told.latency_s + told.energy_j)))
        return not remarks

    def case(dice: Dice) -> tuple[str, bool]:
        spoilt = spoil_text(whole, dice) if dice.random() < 0.7 else None
        name, one = spoilt if spoilt else ("bytes", "")
        first = one.encode("utf-8", "replace") if spoilt else spoil_bytes(whole.encode(), dice)[1]
        second = dice.choice((b"", whole.encode(), first))
        return name, checked(survives, (first, second))

    return case


def checkpoint_case() -> Case:
    """A checkpoint of a tiny model; half of the mutations hit the header, which is JSON."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    writer = RunWriter.create(folder / "run", "")
    state = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3), "h": torch.ones(2).half()}
    zeros = {"w": torch.zeros(3, 4)}
    writer.checkpoint(Checkpoint(1, state, {7: {"w": torch.ones(2)}}, zeros, zeros))
    path = folder / "run" / "checkpoint-1.safetensors"
    valid, spoilt_path = path.read_bytes(), folder / "spoilt.safetensors"
    length = int.from_bytes(valid[:8], "little")

    def survives(data: bytes) -> bool:
        spoilt_path.write_bytes(data)
        try:
            found = read_checkpoint(spoilt_path)
        except DAMAGE:
            return False
        if found.rounds < 0 or not isinstance(found.rounds, int):
            raise AssertionError("rounds")
        return True

    def case(dice: Dice) -> tuple[str, bool]:
        if dice.random() < 0.5:
            name, data = spoil_bytes(valid, dice)
        else:
            name, head = spoil_text(valid[8 : 8 + length].decode(), dice)
            text = head.encode("utf-8", "replace")
            size = len(text) if dice.random() < 0.8 else dice.randrange(1 << 62)
            data = size.to_bytes(8, "little") + text + valid[8 + length :]
        return name, checked(survives, data)

    return case


def config_case() -> Case:
    """The demo preset as TOML."""
    valid = to_toml(load_preset("demo"))

    def survives(text: str) -> bool:
        try:
            config = parse_config(text, "fuzz")
        except ConfigError:
            return False
        if parse_config(to_toml(config), "again") != config:
            raise AssertionError("written and read again it is another")
        return True

    def case(dice: Dice) -> tuple[str, bool]:
        name, text = spoil_text(valid, dice)
        return name, checked(survives, text)

    return case


# --- messages -------------------------------------------------------------------------------------


def message_case() -> Case:
    """Records with parts dropped, swapped and retyped, read as all kinds of message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: PLC0415 - optional

    from anycostfl.flower import messages  # noqa: PLC0415 - optional

    logging.getLogger("flwr").setLevel(logging.ERROR)
    row = dict.fromkeys((f.name for f in dataclasses.fields(Devices)), 1.0)
    offer = messages.Offer(3, 1, 10.0, make_devices(**row))
    ask = messages.Ask("summary = 'x'", 1)
    order = {"conv": torch.arange(4)}
    task = messages.Task(ask, 3, 0.5, {"conv": 4}, Upload(0.1, 1, BINDING), 5, bytes(40), order)
    result = messages.Result(bytes(50), "", 0.5, True, offer)
    valid = [task.pack, result.pack, ask.pack, lambda: RecordDict({"offer": offer.pack()})]
    values: tuple[Any, ...] = (
        0, -1, 2**63, -(2**63), 2**70, 0.0, -1.0, float("nan"), float("inf"), 1e308, "", "x" * 99,
        b"", b"\0" * 9, True, [], [1, 2], [1.5], ["a"], [b"a"], [True],
    )  # fmt: skip
    dtypes = ("float32", "int64", "uint8", "bool", "object", "Tensor", "nn", "float8_e5m2", "")

    def spoil(records: Any, dice: Dice) -> str:
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
            records[dice.choice(("ask", "task", "result", "offer", "order", "w"))] = ConfigRecord(
                {"a": 1}
            )
        return ("drop record", "drop field", "retype", "array", "empty", "foreign")[how]

    readers: tuple[Callable[[Any], object], ...] = (
        messages.read_task,
        messages.read_result,
        messages.read_ask,
        messages.read_offer,
        partial(messages.read_state, key="order"),
    )

    def survives(records: Any) -> bool:
        taken = 0
        for read in readers:
            try:
                read(records)
                taken += 1
            except messages.MessageError:
                continue
        return taken > 1  # the state reads as empty wherever there is none

    def case(dice: Dice) -> tuple[str, bool]:
        records = dice.choice(valid)()  # type: ignore[no-untyped-call]  # Flower is untyped
        for _ in range(dice.randint(1, 4)):
            try:
                name = spoil(records, dice)
            except (TypeError, ValueError):  # Flower itself does not let such a record be made
                name = "not a record"
        return name, checked(survives, records)

    return case


# --- all of them ----------------------------------------------------------------------------------


class Found(Exception):  # noqa: N818 - reads as what happened
    """An input that a parser does not survive."""


def checked(survives: Callable[[Any], bool], spoilt: Any) -> bool:
    """Whether the input is taken; one that breaks something is shown."""
    try:
        return survives(spoilt)
    except BaseException as error:
        raise Found(repr(spoilt)[:4000]) from error


def targets() -> Mapping[str, Callable[[], Case]]:
    """How to make the cases of each parser."""
    others = [name for name in methods.names() if name != "anycostfl"]
    return {
        **{codec: partial(codec_case, codec) for codec in CODECS},
        **{name: partial(method_case, name) for name in others},
        "journal": journal_case,
        "checkpoint": checkpoint_case,
        "config": config_case,
        "message": message_case,
    }
