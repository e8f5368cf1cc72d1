"""A run directory: what was asked, where it ran, what happened, and where to go on.

    config.toml          the resolved configuration; `anycostfl run config.toml` repeats the run
    environment.json     versions, machine, command, checksums of own methods, models and data
    rounds.jsonl         one round per line, the same bytes whenever the run is repeated
    rounds.copy.jsonl    the same once more, for lines that get damaged
    timing.jsonl         wall seconds per round, which are not
    checkpoint-N.safetensors   the global state, its velocity and all memories after N rounds
    widths.json          accuracy and cost of sub-models, if they were measured
    report.html          a page that shows all this, written by `anycostfl.report`
    lock                 held by whoever plays the run; inside: who that is

A checkpoint is written beside its place and renamed into it, after the journal has reached the
disk. So at any moment, even during a power cut, the newest checkpoint is whole and the journal
holds at least its rounds; `open_run` cuts the journal back to them. A checkpoint carries a checksum
of its tensors; a damaged one is passed over for the one before and set aside, so that it does not
count as one of the two that are kept. No clock decides anything here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anycostfl.files import (
    InUseError,
    StorageError,
    append_line,
    only_one,
    read_file,
    sync,
    write_whole,
    writing_to,
)
from anycostfl.registry import own_files
from anycostfl.state import State
from anycostfl.types import DeviceRecord, RoundRecord

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
STATES = {"model": "state", "velocity": "velocity", "public": "public", "moved": "moved"}
JOURNAL, COPY, TIMING = "rounds.jsonl", "rounds.copy.jsonl", "timing.jsonl"
WIDTHS, PAGE = "widths.json", "report.html"
ELSEWHERE = "Choose another --out"
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state after so many rounds.

    `memories` are what simulated devices remember, `public` is the model as devices know it,
    `moved` how channels have moved since the first round.
    """

    rounds: int
    state: State
    memories: Mapping[int, State] = field(default_factory=dict)
    velocity: State = field(default_factory=dict)
    public: State = field(default_factory=dict)
    moved: State = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class SavedRun:
    """What a run directory holds."""

    config: str
    records: tuple[RoundRecord, ...]
    checkpoint: Checkpoint | None
    remarks: tuple[str, ...]


class RunWriter:
    """Writes one run directory, round by round."""

    def __init__(self, folder: Path, rounds: int = 0) -> None:
        self.folder = folder
        self._rounds = rounds  # in the journal
        self._last = time.monotonic()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others away; whoever went on with the run since it was opened has it now."""
        with only_one(self.folder):
            if len(_lines(self.folder / JOURNAL, whole=True)) != self._rounds:
                raise InUseError(f"another process went on with {self.folder} meanwhile; try again")
            yield

    @classmethod
    def create(cls, folder: Path, config: str, files: Mapping[str, str] | None = None) -> RunWriter:
        """Start a new run directory; one that holds a run already is left alone.

        `files` are checksums of what the run reads besides its configuration.
        """
        _check_free(folder)
        with writing_to(folder, ELSEWHERE):
            folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder, ELSEWHERE), writing_to(folder, ELSEWHERE):
            _check_free(folder)  # of two that begin at once, one
            write_whole(
                folder / ENVIRONMENT, json.dumps(environment(files or {}), indent=2).encode()
            )
            write_whole(folder / JOURNAL, b"")
            write_whole(folder / COPY, b"")
            write_whole(folder / CONFIG, config.encode())
        return cls(folder)

    def reconfigure(self, config: str) -> None:
        """Replace the configuration: the same run, to go on for longer."""
        with writing_to(self.folder):
            write_whole(self.folder / CONFIG, config.encode())

    def append(self, record: RoundRecord) -> None:
        """Add a round to the journal, unless it could not be read back."""
        try:
            _check_round(record)
        except ValueError as error:
            raise StorageError(f"round {record.round} cannot be written down: {error}") from error
        now = time.monotonic()
        timing = {"round": record.round, "seconds": round(now - self._last, 4)}
        self._last = now
        with writing_to(self.folder):
            line = json.dumps(dataclasses.asdict(record))
            append_line(self.folder / JOURNAL, line)
            append_line(self.folder / COPY, line)
            append_line(self.folder / TIMING, json.dumps(timing))
        self._rounds += 1

    def checkpoint(self, point: Checkpoint) -> None:
        """Save the state after so many rounds, then forget older ones."""
        rounds = point.rounds
        kinds = {kind: getattr(point, name) for kind, name in STATES.items()}
        kinds |= {f"memory/{device}": memory for device, memory in point.memories.items()}
        tensors = {f"{kind}/{n}": t for kind, state in kinds.items() for n, t in state.items()}
        path = self.folder / f"checkpoint-{rounds}.safetensors"
        part = path.with_suffix(".part")
        with writing_to(self.folder, intact="the last checkpoint is intact"):
            sync(self.folder / JOURNAL)
            try:
                copies = _unshared(tensors)
                about = json.dumps({"rounds": rounds, "crc32": _checksum(copies)})
                save_file(copies, part, {"checkpoint": about})
                sync(part)
                os.replace(part, path)
            except (OSError, SafetensorError) as error:
                part.unlink(missing_ok=True)
                raise OSError(str(error)) from error
            sync(self.folder)
            for old in checkpoints(self.folder)[KEPT_CHECKPOINTS:]:
                old.unlink()


def _check_free(folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise StorageError(
            f"{folder} holds a run already; choose another --out, or --resume {folder}"
        )


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, newest first."""
    found = (path for path in folder.glob("checkpoint-*.safetensors") if path.is_file())
    numbered = [(rounds, path) for path in found if (rounds := _rounds_of(path)) is not None]
    return [path for _, path in sorted(numbered, reverse=True)]


def open_run(
    folder: Path, check: Callable[[SavedRun], None] = lambda _: None
) -> tuple[SavedRun, RunWriter]:
    """Read a run to go on with it: the journal is cut back to the newest whole checkpoint.

    What `check` objects to, by raising, is left as it is. Lines that cannot be read are kept aside.
    """
    if not (folder / CONFIG).is_file():
        raise StorageError(f"{folder} holds no run: it has no {CONFIG}")
    with only_one(folder):
        saved = read_run(folder)
        check(saved)
        rounds = saved.checkpoint.rounds if saved.checkpoint else 0
        kept = saved.records[:rounds]
        lines = "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in kept)
        with writing_to(folder):
            if len(_lines(folder / JOURNAL, whole=True)) > len(saved.records):
                write_whole(folder / f"{JOURNAL}.damaged", read_file(folder / JOURNAL))
            write_whole(folder / COPY, lines.encode())
            write_whole(folder / JOURNAL, lines.encode())
            for left in folder.glob("*.part"):
                left.unlink()
            for path in checkpoints(folder):
                if (_rounds_of(path) or 0) > rounds:
                    path.replace(path.with_suffix(".damaged"))
    return dataclasses.replace(saved, records=kept), RunWriter(folder, rounds)


def read_run(folder: Path) -> SavedRun:
    """Everything a run directory holds; damage is passed over and remarked upon."""
    records, damage = read_journal(folder)
    remarks = list(damage)
    checkpoint = None
    for path in checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path)
        except DAMAGE as error:
            remarks.append(f"{path.name} is damaged and was passed over ({error})")
            continue
        if checkpoint.rounds <= len(records):
            break
        remarks.append(f"{path.name} is ahead of the journal and was passed over")
        checkpoint = None
    return SavedRun(read_config(folder), records, checkpoint, tuple(remarks))


def read_config(folder: Path) -> str:
    """What was asked of a run, as TOML text."""
    try:
        return _read(folder / CONFIG).decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"cannot read {folder / CONFIG}: {error}") from error


def read_journal(
    folder: Path, *, growing: bool = False
) -> tuple[tuple[RoundRecord, ...], tuple[str, ...]]:
    """The rounds of a run up to the first line that is whole in neither copy; remarks on damage.

    Of a journal that is still growing, a last line without its end is no damage: it is on its way.
    """
    if not (folder / CONFIG).is_file():
        raise StorageError(f"{folder} holds no run: it has no {CONFIG}")
    copies = [_lines(folder / JOURNAL, whole=growing)]
    if not growing:
        copies.append(_lines(folder / COPY, whole=True))
    remarks: list[str] = []
    return tuple(parse_journal(copies, remarks)), tuple(remarks)


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _lines(path: Path, *, whole: bool) -> list[bytes]:
    """The lines of a file; without the last if it must be whole and has no end."""
    content = _read(path) if path.exists() else b""
    return (content[: content.rfind(b"\n") + 1] if whole else content).splitlines()


def parse_journal(copies: Sequence[Sequence[bytes]], remarks: list[str]) -> Iterator[RoundRecord]:
    """Rounds 0, 1, 2 … up to the end or the first line that is whole in no copy."""
    saved: list[int] = []
    for number in range(max(map(len, copies))):
        problems: list[str] = []
        found = (_parse_line(lines, number, problems) for lines in copies)
        record = next((record for record in found if record is not None), None)
        if record is None:
            remarks.append(f"{JOURNAL} is damaged from line {number + 1} on ({problems[0]})")
            break
        if problems:
            saved.append(number + 1)
        yield record
    if saved:
        also = f" and {len(saved) - 1} more" if saved[1:] else ""
        remarks.append(f"{JOURNAL} is damaged in line {saved[0]}{also}; {COPY} was used")


def _parse_line(lines: Sequence[bytes], number: int, problems: list[str]) -> RoundRecord | None:
    """The round of that number, or None after adding to the problems."""
    try:
        record = _as_record(json.loads(lines[number]))
    except IndexError:
        problems.append("it ends there")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problems.append(str(error))
    else:
        if record.round == number:
            return record
        problems.append(f"round {record.round} stands there")
    return None


def _as_record(table: Mapping[str, Any]) -> RoundRecord:
    lists = ("binds", "surplus")
    devices = tuple(
        DeviceRecord(**{**d, **{name: tuple(d.get(name, ())) for name in lists}})
        for d in table["devices"]
    )
    step = table.get("step_bytes", 0)
    record = RoundRecord(table["round"], table["accuracy"], devices, step)
    _check_round(record)
    return record


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str": str,
    "tuple[str, ...]": tuple,
    "tuple[DeviceRecord, ...]": tuple,
}
_FIELDS = {
    kind: [(item.name, _KINDS[str(item.type)]) for item in dataclasses.fields(kind)]
    for kind in (RoundRecord, DeviceRecord)
}


def _check_round(record: RoundRecord) -> None:
    _check_kinds(record)
    for device in record.devices:
        _check_kinds(device)


def _check_kinds(record: RoundRecord | DeviceRecord) -> None:
    """Refuse a value that is not of its field's type, or a number no record can hold."""
    for name, kind in _FIELDS[type(record)]:
        value = getattr(record, name)
        if not isinstance(value, kind) or (isinstance(value, int) and abs(value) > 1 << 62):
            raise ValueError(f"{name} is {str(value)[:40]!r}")
    if isinstance(record, DeviceRecord):
        words = (*record.binds, *record.surplus)
        if not all(isinstance(word, str) for word in words):
            raise ValueError("binds or surplus are not words")


DAMAGE = (SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError)
"""What reading a checkpoint ends with if it is not one."""


def read_checkpoint(path: Path) -> Checkpoint:
    """The state in a file; one of `DAMAGE` if that is not what it holds."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["checkpoint"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    if about["crc32"] != _checksum(tensors):
        raise ValueError("its checksum does not match")
    whole: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATES}
    memories: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind in whole:
            whole[kind][name] = tensor
        else:
            device, _, name = name.partition("/")
            memories.setdefault(int(device), {})[name] = tensor
    rounds = about["rounds"]
    if type(rounds) is not int or rounds < 0:
        raise ValueError(f"it says {rounds!r} rounds")
    states = {name: whole[kind] for kind, name in STATES.items()}
    return Checkpoint(rounds, memories=memories, **states)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of names and bytes, in the order of the names."""
    crc = 0
    for name in sorted(tensors):
        content = tensors[name].contiguous().flatten().view(torch.uint8).numpy()
        crc = zlib.crc32(content.tobytes(), crc)
        crc = zlib.crc32(name.encode(), crc)
    return f"{crc:08x}"


def _rounds_of(path: Path) -> int | None:
    found = re.fullmatch(r"checkpoint-(\d+)\.safetensors", path.name)
    return int(found[1]) if found else None


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, for safetensors refuses tensors that share memory (tied weights)."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def environment(files: Mapping[str, str]) -> dict[str, object]:
    """What a result may depend on."""
    packages = ("anycostfl", "torch", "numpy", "numba", "safetensors")
    return {
        "versions": {package: metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "command": sys.argv,
        "own_files": {**own_files(), **files},
    }


def read_own_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of the user's own files when a run began, as far as it is known."""
    try:
        kept = json.loads(read_file(folder / ENVIRONMENT)).get("own_files", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return kept if isinstance(kept, dict) else {}


@dataclass(frozen=True, slots=True)
class Bill:
    """What rounds have cost."""

    latency_s: float
    energy_j: float
    bytes_up: int
    bytes_down: int


def bill_of(records: Sequence[RoundRecord]) -> Bill:
    """What these rounds have cost."""
    return Bill(
        latency_s=sum(r.latency_s for r in records),
        energy_j=sum(r.energy_j for r in records),
        bytes_up=sum(r.bytes_up for r in records),
        bytes_down=sum(r.bytes_down for r in records),
    )


def rounds_to(target: float, records: Sequence[RoundRecord]) -> int | None:
    """After how many rounds an accuracy was first seen; None if it was not."""
    return next((i for i, r in enumerate(records, 1) if (r.accuracy or 0.0) >= target), None)


def refusals(records: Sequence[RoundRecord]) -> dict[str, int]:
    """How many replies were refused, by cause in one word; the most frequent first."""
    devices = [device for record in records for device in record.devices]
    told = [d.status.removeprefix("refused: ") for d in devices if d.kind == "refused"]
    told += [why for d in devices for why in d.surplus]
    return dict(Counter(why.partition(":")[0] for why in told).most_common())
