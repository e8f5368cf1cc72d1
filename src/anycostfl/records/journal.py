"""The journal: one round per line as JSON, the same bytes whenever the run is repeated.

Every line carries the version of its schema. Version 1 had no such key and told a device's status
as one text ("refused: damaged: …"); up to version 2 the metric was always `accuracy`. Both are read
as if they had been written today. What only real devices have is left out of other lines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from anycostfl.files import StorageError
from anycostfl.records.round import DeviceRecord, Measured, RoundRecord, Status

SCHEMA = 3
LATEST = 1000  # a larger number is damage, not a newer version
LARGEST = 1 << 62  # of a whole number
LONGEST_LINE = 1 << 24  # bytes: a round of about 20,000 devices

OLD_STATUSES = {"sat out": "infeasible", "benched": "suspended", "left out": "excluded"}
"""How version 1 named what is called otherwise since."""
ONLY_REAL: Mapping[str, object] = {"done": 1.0, "measured": None}
"""Fields that only real devices have, and what they are elsewhere."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What `parse_record` raises if a line is no round of this version or an older one."""


class NewerSchemaError(StorageError):
    """A journal of a newer version, which must not be taken for damage."""


def format_record(record: RoundRecord) -> str:
    """A round as one line; ValueError if it could not be read back."""
    _check(record)
    table = {"schema": SCHEMA, **dataclasses.asdict(record)}
    for name in ("remark", "epsilon"):  # nearly always
        if not table[name]:
            del table[name]
    for device in table["devices"]:
        for name, usual in ONLY_REAL.items():
            if device[name] == usual:
                del device[name]
    return json.dumps(table)


def parse_record(line: bytes | str) -> RoundRecord:
    """The round in a line; one of `UNREADABLE` if there is none."""
    table = json.loads(line)
    schema = table.get("schema", 1) if isinstance(table, dict) else 1
    if type(schema) is int and SCHEMA < schema <= LATEST:
        raise NewerSchemaError(
            f"a round was written with schema {schema}; this program reads 1 to {SCHEMA}: upgrade "
            "anycostfl"
        )
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ValueError(f"schema {schema!r:.40}; this program reads 1 to {SCHEMA}")
    read = _old_device if schema == 1 else _device
    record = RoundRecord(
        round=table["round"],
        metric=table["accuracy"] if schema < 3 else table["metric"],
        devices=tuple(read(device) for device in table["devices"]),
        step_bytes=table.get("step_bytes", 0),
        others=table.get("others", {}),
        remark=table.get("remark", ""),
        epsilon=table.get("epsilon"),
    )
    _check(record)
    return record


def _device(table: Mapping[str, Any]) -> DeviceRecord:
    measured = table.get("measured")
    known = {**table, "status": Status(table["status"]), "binds": tuple(table.get("binds", ()))}
    return DeviceRecord(**{**known, "measured": None if measured is None else Measured(**measured)})


def _old_device(table: Mapping[str, Any]) -> DeviceRecord:
    """A device of version 1: the cause stands in the status where there is one."""
    known = {key: value for key, value in table.items() if key != "surplus"}
    word, _, rest = str(table["status"]).partition(": ")
    cause, detail = "", rest
    if word == "refused":
        cause, _, detail = rest.partition(": ")
    elif word == "sat out":
        cause, detail = rest.removesuffix(" together"), ""
    known |= {"status": OLD_STATUSES.get(word, word), "cause": cause, "detail": detail}
    return _device({**known, "duplicates": len(table.get("surplus", ()))})


def parse_journal(
    copies: Sequence[Iterable[bytes]], remarks: list[str], names: tuple[str, str]
) -> list[RoundRecord]:
    """Rounds 0, 1, 2 … up to the end or the first line that is intact in no copy.

    Nothing is read beyond that line: what follows may be of any length.
    """
    records: list[RoundRecord] = []
    restored: list[int] = []
    for number, lines in enumerate(zip_longest(*copies)):
        problems: list[Exception] = []
        for line in lines:
            try:
                records.append(_parse_line(line, number))
                break
            except (NewerSchemaError, *UNREADABLE) as error:
                problems.append(error)
        else:
            if newer := next((p for p in problems if isinstance(p, NewerSchemaError)), None):
                raise newer
            remarks.append(f"{names[0]} is damaged from line {number + 1} on ({problems[0]})")
            break
        if problems:
            restored.append(number + 1)
    if restored:
        also = f" and {len(restored) - 1} more" if restored[1:] else ""
        remarks.append(f"{names[0]} is damaged in line {restored[0]}{also}; {names[1]} was used")
    return records


def _parse_line(line: bytes | None, number: int) -> RoundRecord:
    if line is None:
        raise ValueError("it ends there")
    if len(line) > LONGEST_LINE:
        raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
    record = parse_record(line)
    if record.round != number:
        raise ValueError(f"it holds round {record.round}")
    return record


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str": str,
    "Status": Status,
    "tuple[str, ...]": tuple,
    "tuple[DeviceRecord, ...]": tuple,
    "Mapping[str, float]": dict,
    "Measured | None": (Measured, type(None)),
    "bool | None": (bool, type(None)),
    "int | None": (int, type(None)),
}
_FIELDS = {
    kind: [(item.name, _KINDS[str(item.type)]) for item in dataclasses.fields(kind)]
    for kind in (RoundRecord, DeviceRecord, Measured)
}


def _check(record: RoundRecord) -> None:
    """Refuse a value that is not of its field's type, or a number no journal can hold."""
    measured = (d.measured for d in record.devices if d.measured is not None)
    parts: tuple[Any, ...] = (record, *record.devices, *measured)
    for part in parts:
        for name, kind in _FIELDS[type(part)]:
            _check_value(name, getattr(part, name), kind)
        if isinstance(part, DeviceRecord) and not all(isinstance(w, str) for w in part.binds):
            raise ValueError("binds are not words")
    for name, value in record.others.items():
        _check_value(name, value, (int, float))


def _check_value(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or (isinstance(value, int) and abs(value) > LARGEST):
        raise ValueError(f"{name} is {str(value)[:40]!r}")
