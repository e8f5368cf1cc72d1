"""A run directory as the page needs it: columns of rounded numbers instead of the journal.

Every directory is taken as hostile: what is not understood is passed over with a remark, text is
cut to a sane length, and what is left are numbers, short strings and lists of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anycostfl.config import parse_config
from anycostfl.errors import ConfigError
from anycostfl.files import read_file
from anycostfl.planning.strategy import Binds
from anycostfl.records.round import DeviceRecord, RoundRecord, refusals
from anycostfl.records.run import CONFIG, ENVIRONMENT, JOURNAL, TIMING, WIDTHS, read_journal
from anycostfl.report.summary import summarise

Document = dict[str, Any]
"""What JSON can say."""

LONGEST_TEXT = 300  # characters of a status, a remark, a cell
LARGEST_FILE = 1 << 20  # bytes of anything but the journals

BINDS = Binds(255).words()


@dataclass(frozen=True, slots=True)
class Asked:
    """What of the configuration the page draws with; zeros where it could not be read."""

    summary: str = ""
    method: str = "?"
    rounds: int = 0
    target_accuracy: float = 1.0
    latency_s: float = 0.0
    devices: int = 0


def gather(folder: Path, *, growing: bool = False) -> Document:
    """Everything the page shows of one run; `growing` while the run goes on."""
    records, damage = read_journal(folder, growing=growing)
    remarks = list(damage)
    config = _text(folder / CONFIG, remarks)
    asked = _asked(config, remarks)
    return {
        "name": folder.resolve().name,
        "title": asked.summary,
        "planned": asked.rounds,
        "target": asked.target_accuracy,
        "latency_s": asked.latency_s,
        "fleet": asked.devices,
        "summary": _summary(asked, records),
        "config": config,
        "environment": _environment(folder / ENVIRONMENT, remarks),
        "wall_s": _wall_s(folder / TIMING, len(records)),
        "written": _written(folder / JOURNAL),
        "rounds": _round_columns(records),
        **_device_columns([d for r in records for d in r.devices]),
        "widths": _widths(folder / WIDTHS, remarks),
        "remarks": [remark[:LONGEST_TEXT] for remark in remarks],
    }


def _summary(asked: Asked, records: Sequence[RoundRecord]) -> Document:
    summary = summarise(asked.method, asked.target_accuracy, records)
    causes = {cause[:LONGEST_TEXT]: times for cause, times in refusals(records).items()}
    return {**_plain(summary), "refused_because": causes}


# --- the journal ----------------------------------------------------------------------------------


def _round_columns(records: Sequence[RoundRecord]) -> Document:
    """One value per round; compute and upload seconds are those of the slowest device."""
    slowest = [max(r.devices, key=lambda d: d.latency_s, default=None) for r in records]
    return {
        "cohort": [len(r.devices) for r in records],
        "accuracy": _rounded((r.accuracy for r in records), 6),
        "compute_s": _rounded((d.compute_s if d else 0.0 for d in slowest), 6),
        "upload_s": _rounded((d.upload_s if d else 0.0 for d in slowest), 6),
        "compute_j": _rounded((sum(d.compute_j for d in r.devices) for r in records), 6),
        "upload_j": _rounded((sum(d.upload_j for d in r.devices) for r in records), 6),
        "bytes_up": [r.bytes_up for r in records],
        "bytes_down": [r.bytes_down for r in records],
    }


def _device_columns(devices: Sequence[DeviceRecord]) -> Document:
    """One value per device and round, round after round; words are numbered."""
    statuses = sorted({d.explained[:LONGEST_TEXT] for d in devices})
    number = {status: i for i, status in enumerate(statuses)}
    bit = {word: 1 << i for i, word in enumerate(BINDS)}
    return {
        "statuses": statuses,
        "binds": BINDS,
        "devices": {
            "device": [d.device for d in devices],
            "status": [number[d.explained[:LONGEST_TEXT]] for d in devices],
            "alpha": _rounded((d.alpha for d in devices), 3),
            "beta": _rounded((d.beta for d in devices), 3),
            "frequency_mhz": _rounded((d.frequency_hz / 1e6 for d in devices), 3),
            "bytes_up": [d.bytes_up for d in devices],
            "compute_s": _rounded((d.compute_s for d in devices), 3),
            "upload_s": _rounded((d.upload_s for d in devices), 3),
            "compute_j": _rounded((d.compute_j for d in devices), 3),
            "upload_j": _rounded((d.upload_j for d in devices), 3),
            "latency_s": _rounded((d.latency_s for d in devices), 4),
            "energy_share": _rounded((_share(d.energy_j, d.budget_j) for d in devices), 4),
            "binds": [sum(bit.get(word, 0) for word in set(d.binds)) for d in devices],
        },
    }


def _share(spent: float, budget: float) -> float:
    return spent / budget if budget > 0 else math.nan


def _rounded(values: Iterable[float | None], digits: int) -> list[float | None]:
    """So many significant digits; None for what is missing or not finite."""
    exact = np.array([math.nan if v is None else v for v in values], np.float64)
    finite = np.isfinite(exact)
    size = np.where(finite & (exact != 0), np.abs(exact), 1.0)
    places = np.clip(digits - 1 - np.floor(np.log10(size)), -300, 300)
    # Two powers, for one below 1 would not be exact.
    up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    short = (np.rint(np.where(finite, exact, 0.0) * up / down) * down / up).tolist()
    return [
        (int(v) if v.is_integer() and abs(v) < 1e15 else v) if known else None
        for v, known in zip(short, finite.tolist(), strict=True)
    ]


# --- the other files ------------------------------------------------------------------------------


def _text(path: Path, remarks: list[str]) -> str:
    if path.is_symlink():  # to wherever: what it holds is not the run's, and the page may travel
        remarks.append(f"{path.name} is a link and was passed over")
        return ""
    try:
        content = read_file(path, LARGEST_FILE)
    except OSError as error:
        remarks.append(f"{path.name} cannot be read ({error.strerror or error})")
        return ""
    return content.decode("utf-8", "replace")


def _asked(config: str, remarks: list[str]) -> Asked:
    try:
        known = parse_config(config, CONFIG, foreign=True)
    except ConfigError as error:
        remarks.append(f"{CONFIG} is not understood, so targets and budgets are missing ({error})")
        return Asked()
    return Asked(
        summary=known.summary[:LONGEST_TEXT],
        method=known.run.method[:LONGEST_TEXT],
        rounds=known.run.rounds,
        target_accuracy=known.run.target_accuracy,
        latency_s=known.fleet.latency_s,
        devices=known.fleet.devices,
    )


def _json(path: Path, remarks: list[str]) -> Any:
    """The content of an optional JSON file; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(_text(path, remarks))
    except (ValueError, RecursionError) as error:
        remarks.append(f"{path.name} is damaged and was passed over ({error})")
        return None


def _environment(path: Path, remarks: list[str]) -> dict[str, str]:
    """Names and values in words."""
    found = _json(path, remarks)
    if not isinstance(found, dict):
        return {}
    try:
        return {str(key)[:LONGEST_TEXT]: _words(value) for key, value in found.items()}
    except RecursionError:
        remarks.append(f"{path.name} is damaged and was passed over: it is nested too deeply")
        return {}


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())[:LONGEST_TEXT]
    if isinstance(value, list):
        return " ".join(map(_words, value))[:LONGEST_TEXT]
    return str(value)[:LONGEST_TEXT]


def _widths(path: Path, remarks: list[str]) -> list[Document]:
    """Rows of measured sub-models, narrowest first: α, accuracy and whatever else was measured."""
    found = _json(path, remarks)
    if found is None:
        return []
    rows = found if isinstance(found, list) else [found]
    if not all(
        isinstance(row, dict) and {"alpha", "accuracy"} <= {k for k in row if _is_number(row[k])}
        for row in rows
    ):
        remarks.append(f"{path.name} is damaged and was passed over: a row lacks α or accuracy")
        return []
    try:
        return [_plain(row) for row in sorted(rows, key=lambda row: float(row["alpha"]))]
    except RecursionError:
        remarks.append(f"{path.name} is damaged and was passed over: it is nested too deeply")
        return []


def _plain(row: Document) -> Document:
    """Only what a table cell can show."""
    return {
        str(key)[:LONGEST_TEXT]: value if value is None or _is_number(value) else _words(value)
        for key, value in row.items()
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def _wall_s(path: Path, rounds: int) -> float | None:
    """How long the rounds really took; None where that is not known."""
    try:
        lines = read_file(path, LARGEST_FILE).splitlines()
        seconds = {item["round"]: float(item["seconds"]) for item in map(json.loads, lines)}
        total = sum(seconds[number] for number in range(rounds))
    except (OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None
    return total if math.isfinite(total) else None


def _written(path: Path) -> float | None:
    """When the last round was written down, in seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
