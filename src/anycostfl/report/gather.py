"""A run directory as the page needs it: columns of rounded numbers instead of the journal.

Run directories are untrusted input. What cannot be parsed is skipped with a remark, text is cut to
a maximum length, and what remains are numbers, short strings and lists of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anycostfl.config import parse_config
from anycostfl.errors import ConfigError
from anycostfl.files import read_file
from anycostfl.metrics import MetricInfo
from anycostfl.planning.strategy import Binds
from anycostfl.records.budgets import budget_uses
from anycostfl.records.round import DeviceRecord, RoundRecord, refusals, summarise
from anycostfl.records.run import CONFIG, ENVIRONMENT, JOURNAL, TIMING, WIDTHS, read_journal

Document = dict[str, Any]  # a JSON object

LONGEST_TEXT = 300  # characters of a status, a remark, a cell
LARGEST_FILE = 1 << 20  # bytes of anything but the journals

BINDS = Binds(511).words()


def gather(folder: Path, *, growing: bool = False) -> Document:
    """Everything the page shows of one run; `growing` while the run continues."""
    records, damage = read_journal(folder, growing=growing)
    remarks = [*damage, *(f"round {r.round + 1}: {r.remark}" for r in records if r.remark)]
    config = _text(folder / CONFIG, remarks)
    settings = _settings(config, remarks)
    info = MetricInfo(**settings["metric"])
    summary = summarise(settings["method"], info, settings["target"], records)
    causes = {cause[:LONGEST_TEXT]: times for cause, times in refusals(records).items()}
    return {
        "name": folder.resolve().name,
        **settings,
        "summary": {**_table_row(summary), "refused_because": causes},
        "others": _others(records),
        "config": config,
        "environment": _json(folder / ENVIRONMENT, _environment, remarks) or {},
        "wall_s": _wall_s(folder / TIMING, len(records)),
        "written": (folder / JOURNAL).stat().st_mtime if (folder / JOURNAL).exists() else None,
        "rounds": _round_columns(records),
        "budgets": _budgets(records),
        **_device_columns([d for r in records for d in r.devices], settings["latency_s"]),
        "widths": _json(folder / WIDTHS, _widths, remarks) or [],
        "remarks": [remark[:LONGEST_TEXT] for remark in remarks],
    }


def _others(records: Sequence[RoundRecord]) -> dict[str, float | None]:
    """Further metrics after the last evaluation."""
    latest = next((r.others for r in reversed(records) if r.metric is not None), {})
    values = _rounded(latest.values(), 6)
    return {name[:LONGEST_TEXT]: value for name, value in zip(latest, values, strict=True)}


# --- the journal ----------------------------------------------------------------------------------


def _round_columns(records: Sequence[RoundRecord]) -> Document:
    """One value per round; compute and upload seconds are those of the slowest device."""
    slowest = [max(r.devices, key=lambda d: d.latency_s, default=None) for r in records]
    return {
        "cohort": [len(r.devices) for r in records],
        "metric": _rounded((r.metric for r in records), 6),
        "compute_s": _rounded((d.compute_s if d else 0.0 for d in slowest), 6),
        "upload_s": _rounded((d.upload_s if d else 0.0 for d in slowest), 6),
        "compute_j": _rounded((sum(d.compute_j for d in r.devices) for r in records), 6),
        "upload_j": _rounded((sum(d.upload_j for d in r.devices) for r in records), 6),
        "bytes_up": [r.bytes_up for r in records],
        "bytes_down": [r.bytes_down for r in records],
    }


def _device_columns(devices: Sequence[DeviceRecord], latency_s: float) -> Document:
    """One value per device and round, round after round; statuses and binds are numbered.

    Devices whose record names no budget of time had the fleet's, as in older journals.
    """
    statuses = sorted({d.explained[:LONGEST_TEXT] for d in devices})
    number = {status: i for i, status in enumerate(statuses)}
    bit = {word: 1 << i for i, word in enumerate(BINDS)}
    energy = (d.energy_j / d.budget_j if d.budget_j > 0 else None for d in devices)
    budgets = (d.budget_s or latency_s for d in devices)
    times = (
        d.latency_s / most if most > 0 else None for d, most in zip(devices, budgets, strict=True)
    )
    fields = ("alpha", "beta", "compute_s", "upload_s", "compute_j", "upload_j")
    return {
        "statuses": statuses,
        "binds": BINDS,
        "devices": {
            "device": [d.device for d in devices],
            "status": [number[d.explained[:LONGEST_TEXT]] for d in devices],
            **{field: _rounded((getattr(d, field) for d in devices), 3) for field in fields},
            "frequency_mhz": _rounded((d.frequency_hz / 1e6 for d in devices), 3),
            "bytes_up": [d.bytes_up for d in devices],
            "latency_s": _rounded((d.latency_s for d in devices), 4),
            "time_share": _rounded(times, 4),
            "energy_share": _rounded(energy, 4),
            "binds": [sum(bit.get(word, 0) for word in set(d.binds)) for d in devices],
        },
    }


def _rounded(values: Iterable[float | None], digits: int) -> list[float | None]:
    """Numbers with this many significant digits; None for what is missing or not finite."""
    rounded = (math.nan if value is None else float(f"{value:.{digits}g}") for value in values)
    finite = (value if math.isfinite(value) else None for value in rounded)
    # Whole numbers are shorter without their point.
    return [int(v) if v is not None and v.is_integer() and abs(v) < 1e15 else v for v in finite]


def _budgets(records: Sequence[RoundRecord]) -> list[Document]:
    """How real devices kept their budgets: shares of them, planned and measured."""
    rows = [asdict(use) for use in budget_uses(records)]
    shares = ("planned", "measured", "worst")
    return [
        row | dict(zip(shares, _rounded((row[k] for k in shares), 4), strict=True)) for row in rows
    ]


# --- the other files ------------------------------------------------------------------------------


def _text(path: Path, remarks: list[str]) -> str:
    if path.is_symlink():  # its target is not part of the run, and the page may be passed on
        remarks.append(f"{path.name} is a link and was skipped")
        return ""
    try:
        return read_file(path, LARGEST_FILE).decode("utf-8", "replace")
    except OSError as error:
        remarks.append(f"{path.name} cannot be read ({error.strerror or error})")
        return ""


def _settings(config: str, remarks: list[str]) -> Document:
    """The parts of the configuration that the page needs."""
    try:
        known = parse_config(config, CONFIG, foreign=True)
    except ConfigError as error:
        remarks.append(f"{CONFIG} cannot be parsed, so targets and budgets are missing ({error})")
        unknown = {"title": "", "method": "?", "planned": 0, "target": None, "latency_s": 0}
        return {**unknown, "fleet": 0, "metric": asdict(MetricInfo())}
    return {
        "title": known.summary[:LONGEST_TEXT],
        "method": known.run.method[:LONGEST_TEXT],
        "planned": known.run.rounds,
        "target": known.run.target,
        "metric": _metric(known.metric),
        "latency_s": known.fleet.latency_s,
        "fleet": known.fleet.devices,
    }


def _metric(info: MetricInfo) -> Document:
    """How the metric is shown."""
    return {**asdict(info), "name": info.name[:LONGEST_TEXT], "unit": info.unit[:LONGEST_TEXT]}


def _json(path: Path, parse: Callable[[Any], Any], remarks: list[str]) -> Any:
    """The parsed content of an optional JSON file; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return parse(json.loads(_text(path, remarks)))
    except (ValueError, RecursionError) as error:
        remarks.append(f"{path.name} is damaged and was skipped ({error})")
        return None


def _environment(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        return {}
    return {str(key)[:LONGEST_TEXT]: _words(value) for key, value in found.items()}


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())[:LONGEST_TEXT]
    if isinstance(value, list):
        return " ".join(map(_words, value))[:LONGEST_TEXT]
    return str(value)[:LONGEST_TEXT]


def _widths(found: Any) -> list[Document]:
    """Measured sub-models, narrowest first: α, the metric and anything else that was measured."""
    rows = found if isinstance(found, list) else [found]
    for row in rows:
        known = row if isinstance(row, dict) else {}
        if "accuracy" in known:  # as earlier versions called it
            known["metric"] = known.pop("accuracy")
        if not (_is_number(known.get("alpha")) and _is_number(known.get("metric"))):
            raise ValueError("a row lacks α or the metric")
    return [_table_row(row) for row in sorted(rows, key=lambda row: float(row["alpha"]))]


def _table_row(row: Document) -> Document:
    """Values that a table cell can show."""
    return {
        str(key)[:LONGEST_TEXT]: value if value is None or _is_number(value) else _words(value)
        for key, value in row.items()
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def _wall_s(path: Path, rounds: int) -> float | None:
    """Wall time of all rounds; None if it is unknown."""
    try:
        lines = read_file(path, LARGEST_FILE).splitlines()
        seconds = {item["round"]: float(item["seconds"]) for item in map(json.loads, lines)}
        total = sum(seconds[number] for number in range(rounds))
    except (OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None
    return total if math.isfinite(total) else None
