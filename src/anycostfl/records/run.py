"""A run directory: what was asked, where it ran, what happened, and where to resume.

    config.toml          the resolved configuration; `anycostfl run config.toml` repeats the run
    environment.json     versions, machine, command, checksums of custom methods, models and data
    rounds.jsonl         one round per line, the same bytes whenever the run is repeated
    rounds.copy.jsonl    a copy of it, for lines that get damaged
    timing.jsonl         wall seconds per round and phase, which differ
    checkpoint-N.safetensors   the server's state and all memories after N rounds
    widths.json          accuracy and cost of sub-models, if they were measured
    report.html          a page that shows all this, written by `anycostfl.report`
    lock                 held by the process that runs it; inside: which one

A checkpoint is written after the journal has reached the disk. So at any moment, even during a
power cut, the newest checkpoint is intact and the journal holds at least its rounds; `open_run`
cuts the journal back to them. A damaged checkpoint is skipped for the one before and set aside, so
that it does not count as one of the two that are kept. No clock decides anything here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from anycostfl.files import (
    InUseError,
    StorageError,
    append_line,
    atomic_write,
    exclusive_lock,
    open_nofollow,
    read_file,
    sync,
    writing_to,
)
from anycostfl.records.checkpoint import (
    DAMAGE,
    Checkpoint,
    checkpoints,
    read_checkpoint,
    rounds_in,
    write_checkpoint,
)
from anycostfl.records.journal import LONGEST_LINE, format_record, parse_journal
from anycostfl.records.round import RoundRecord
from anycostfl.registry import own_files

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
JOURNAL, COPY, TIMING = "rounds.jsonl", "rounds.copy.jsonl", "timing.jsonl"
WIDTHS, PAGE = "widths.json", "report.html"
LONGEST_CONFIG = 1 << 20  # bytes of config.toml, and of environment.json
ELSEWHERE = "Choose another --out"


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
    def exclusive(self) -> Iterator[None]:
        """Keep other processes away; one that resumed the run since it was opened has it now."""
        with exclusive_lock(self.folder):
            if _count_lines(self.folder / JOURNAL) != self._rounds:
                raise InUseError(f"another process resumed {self.folder} meanwhile; try again")
            yield

    @classmethod
    def create(cls, folder: Path, config: str, files: Mapping[str, str] | None = None) -> RunWriter:
        """Start a new run directory; one that holds a run already is left alone.

        `files` are checksums of what the run reads besides its configuration.
        """
        with writing_to(folder, ELSEWHERE):
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder, ELSEWHERE), writing_to(folder, ELSEWHERE):
            if (folder / CONFIG).exists():
                raise StorageError(
                    f"{folder} holds a run already; choose another --out, or --resume {folder}"
                )
            described = json.dumps(environment(files or {}), indent=2)
            atomic_write(folder / ENVIRONMENT, described.encode())
            atomic_write(folder / JOURNAL, b"")
            atomic_write(folder / COPY, b"")
            atomic_write(folder / CONFIG, config.encode())
        return cls(folder)

    def reconfigure(self, config: str) -> None:
        """Replace the configuration: the same run, extended, unless another process has it now."""
        with self.exclusive(), writing_to(self.folder):
            atomic_write(self.folder / CONFIG, config.encode())

    def append(self, record: RoundRecord, seconds: Mapping[str, object] | None = None) -> None:
        """Add a round to the journal, unless it could not be read back; `seconds` by phase."""
        try:
            line = format_record(record)
        except ValueError as error:
            raise StorageError(f"round {record.round} cannot be journalled: {error}") from error
        now = time.monotonic()
        timing = {"round": record.round, "seconds": round(now - self._last, 4), **(seconds or {})}
        self._last = now
        with writing_to(self.folder):
            append_line(self.folder / JOURNAL, line)
            append_line(self.folder / COPY, line)
            append_line(self.folder / TIMING, json.dumps(timing))
        self._rounds += 1

    def checkpoint(self, point: Checkpoint) -> None:
        """Save a checkpoint once the journal has reached the disk."""
        with writing_to(self.folder, intact="the last checkpoint is intact"):
            sync(self.folder / JOURNAL)
            write_checkpoint(self.folder, point)


def open_run(
    folder: Path, check: Callable[[SavedRun], None] = lambda _: None
) -> tuple[SavedRun, RunWriter]:
    """Read a run to resume it: the journal is cut back to the newest intact checkpoint.

    If `check` raises, the directory is left as it is. Lines that cannot be read are set aside.
    """
    with exclusive_lock(_run_in(folder)):
        saved = read_run(folder)
        check(saved)
        rounds = saved.checkpoint.rounds if saved.checkpoint else 0
        kept = saved.records[:rounds]
        lines = "".join(format_record(record) + "\n" for record in kept)
        with writing_to(folder):
            atomic_write(folder / COPY, lines.encode())
            if _count_lines(folder / JOURNAL) > len(saved.records):
                (folder / JOURNAL).replace(folder / f"{JOURNAL}.damaged")
            atomic_write(folder / JOURNAL, lines.encode())
            for left in folder.glob("*.part"):
                left.unlink()
            for path in checkpoints(folder):
                if rounds_in(path) > rounds:
                    path.replace(path.with_suffix(".damaged"))
    return dataclasses.replace(saved, records=kept), RunWriter(folder, rounds)


def read_run(folder: Path) -> SavedRun:
    """Everything a run directory holds; damage is skipped and remarked upon."""
    records, damage = read_journal(folder)
    remarks, checkpoint = list(damage), None
    for path in checkpoints(folder):
        try:
            point = read_checkpoint(path)
        except DAMAGE as error:
            remarks.append(f"{path.name} is damaged and was skipped ({error})")
            continue
        if point.rounds <= len(records):
            checkpoint = point
            break
        remarks.append(f"{path.name} is ahead of the journal and was skipped")
    return SavedRun(read_config(folder), records, checkpoint, tuple(remarks))


def read_config(folder: Path) -> str:
    """What was asked of a run, as TOML text."""
    try:
        return _read(folder / CONFIG, LONGEST_CONFIG).decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"cannot read {folder / CONFIG}: {error}") from error


def read_journal(
    folder: Path, *, growing: bool = False
) -> tuple[tuple[RoundRecord, ...], tuple[str, ...]]:
    """The rounds of a run up to the first line that is intact in neither copy; remarks on damage.

    In a journal that is still growing, a last line without its end is no damage: it is being
    written.
    """
    copies = [_lines(_run_in(folder) / JOURNAL, whole=growing)]
    if not growing:
        copies.append(_lines(folder / COPY, whole=True))
    remarks: list[str] = []
    try:
        return tuple(parse_journal(copies, remarks, (JOURNAL, COPY))), tuple(remarks)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read the journal of {folder}: {error}") from error


def _run_in(folder: Path) -> Path:
    """The folder itself, if it holds a run."""
    if not (folder / CONFIG).is_file():
        raise StorageError(f"{folder} holds no run: it has no {CONFIG}")
    return folder


def _read(path: Path, most: int) -> bytes:
    try:
        content = read_file(path, most + 1)
        if len(content) > most:
            raise StorageError(f"{path} has more than {most} bytes, which no run writes")
        return content
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _lines(path: Path, *, whole: bool) -> Iterator[bytes]:
    """The lines of a file one by one, each cut a byte beyond what a round may take.

    Without the last if it must be whole and has no end.
    """
    if not path.exists():
        return
    with open(path, "rb", opener=open_nofollow) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if line.endswith(b"\n") or not whole or len(line) > LONGEST_LINE:
                yield line.removesuffix(b"\n")


def _count_lines(path: Path) -> int:
    """How many lines of a file have an end."""
    if not path.exists():
        return 0
    with open(path, "rb", opener=open_nofollow) as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))


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
        kept = json.loads(read_file(folder / ENVIRONMENT, LONGEST_CONFIG)).get("own_files", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return kept if isinstance(kept, dict) else {}
