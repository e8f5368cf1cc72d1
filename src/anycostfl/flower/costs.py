"""What a device has learnt about its costs: updated after every round, kept in a file, offered.

The estimate itself is `planning.estimator`. Here are what a round took as a device sees it, the
file that survives a restart, and the plan that a device makes for itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.errors import AnycostError
from anycostfl.files import atomic_write, read_file
from anycostfl.flower.policy import PolicyError
from anycostfl.methods import Method
from anycostfl.planning import estimator
from anycostfl.planning.cost import UNLIMITED, Devices
from anycostfl.planning.estimator import Estimate, Line, Measurement, Peaks, Share, Terms
from anycostfl.planning.strategy import Limits, Offer, Strategies

SCHEMA = 1
LARGEST_FILE = 1 << 18  # bytes
MOST_WORKLOADS = 8  # that a file remembers; the latest come last
FINEST = 64  # the smallest β tried first is at most that much below the largest
PASSES = 2  # of planning, so that the spread is that of what is planned
WITHIN = 1.05  # of an offer: the server rounds
AT_FIRST = 0.8  # of rounds are planned to be in time without ending early
RESERVED = 0.95  # of uploads take no longer than what is kept for them when training ends early


@dataclass(frozen=True, slots=True)
class Pending:
    """A round whose upload has not been measured yet; NaN is not measured."""

    round: int
    alpha: float
    uploaded: float
    download_s: float
    compute_s: float  # as long as all planned steps would have taken
    joules: float
    until_upload_s: float  # what it really took up to there

    def measurement(self, upload_s: float) -> Measurement:
        """The round as the estimator takes it."""
        parts = self.download_s, self.compute_s, upload_s
        values = self.alpha, self.uploaded, *parts, self.joules, self.until_upload_s + upload_s
        return Measurement(*(np.array([value]) for value in values))


@dataclass(frozen=True, slots=True)
class Costs:
    """All that a device has learnt of one workload.

    `idle` counts the rounds that it sat out since its last one, up to round `asked`.
    """

    estimate: Estimate
    peaks: Peaks = field(default_factory=Peaks)
    pending: Pending | None = None
    finish_s: float = 0.0  # from the end of training to the upload, in the last round
    idle: int = 0
    asked: int = -1
    frequency_hz: float = 0.0  # offered for the coming round
    alpha: float = 0.0  # likewise
    uploads: float = 0.0  # αβ, likewise; 0 as long as nothing was offered

    def check(self, alpha: float, uploads: float) -> None:
        """Raise a PolicyError if a task is more than this device offered to do."""
        if self.uploads and (alpha > WITHIN * self.alpha or uploads > WITHIN * self.uploads):
            raise PolicyError(
                f"this task has α {alpha:.3g} and uploads {uploads:.3g} of the model; this device "
                f"offered {self.alpha:.3g} and {self.uploads:.3g}"
            )

    def completed(self, upload_s: float, confidence: float) -> Costs:
        """With what is known once the upload of the last round is over."""
        if self.pending is None:
            return self
        seen = self.pending.measurement(upload_s)
        after = estimator.observe(self.estimate, seen, confidence)
        return replace(self, estimate=after, pending=None)

    def sat_out(self, number: int, *, feasible: bool) -> Costs:
        """After planning a round; a round that is planned twice counts once.

        A try that is not expected to be in time does not end the count: the next one comes later.
        """
        is_try = bool(estimator.is_probe(self.idle))
        idle = 0 if feasible and not is_try else self.idle + (number != self.asked)
        return replace(self, idle=idle, asked=number)


def smallest_share(limits: Limits) -> Share:
    """The least α, and the αβ that is tried first: between the least and the most."""
    least = max(limits.beta_min, limits.beta_max / FINEST)
    return limits.alpha_min, limits.alpha_min * math.sqrt(least * limits.beta_max)


def plan_own(
    costs: Costs,
    known: Devices,
    terms: Terms,
    how: tuple[Method, Limits],
    confidence: float,
) -> tuple[Devices, Strategies]:
    """The device as it is planned for, and its plan."""
    (method, limits), estimate = how, costs.completed(math.nan, confidence).estimate
    point = estimate.compute.at, estimate.upload.at
    probe = estimator.is_probe(costs.idle)
    budget, passes = float(known.memory_bytes[0]), PASSES if method.plans_alone else 1
    for _ in range(passes):
        row = estimator.resources(estimate, known, terms, point, probe)
        if budget < UNLIMITED:
            row = estimator.with_memory(row, costs.peaks, budget, limits.alpha_min)
        plan = method.plan(row, terms.workload, limits)
        alpha = np.maximum(plan.alpha, terms.smallest[0])
        point = alpha, np.maximum(alpha * plan.beta, terms.smallest[1])
    return row, plan


def without_budgets(known: Devices) -> Devices:
    """What a device that plans itself says of its costs: nothing of what it can afford."""
    nothing = np.full_like(known.samples, UNLIMITED)
    return replace(known, latency_s=nothing, energy_j=nothing, memory_bytes=nothing)


def offer_of(plan: Strategies, method: Method) -> Offer | None:
    """What the device offers where its plan follows from itself alone."""
    return Offer.of(plan) if method.plans_alone else None


# --- on disk --------------------------------------------------------------------------------------


class DamagedCostsError(AnycostError):
    """What was learnt cannot be read."""


def workload_key(*words: object) -> str:
    """A short name of what costs belong to: model, method, training, samples, threads."""
    return hashlib.blake2s(repr(words).encode(), digest_size=12).hexdigest()


def to_text(costs: Costs) -> str:
    """Costs as JSON."""
    return json.dumps(_plain(costs))


def _plain(value: Any) -> Any:
    """Dataclasses as tables, arrays as lists, NaN as null."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "__dataclass_fields__"):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    return value


def from_text(text: str | bytes) -> Costs:
    """Costs from JSON; `DamagedCostsError` if these are none."""
    try:
        return _costs(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedCostsError(f"what was learnt cannot be read: {error}") from error


def _costs(table: Mapping[str, Any]) -> Costs:
    parts = table["estimate"]
    read: dict[str, Any] = {
        item.name: _line(parts[item.name])
        if "Line" in str(item.type)
        else _array(parts[item.name], (1,))
        for item in fields(Estimate)
    }
    peaks, pending = table["peaks"], table["pending"]
    tried = [(_number(width, 1.0), _number(peak)) for width, peak in peaks["tried"]]
    known = None
    if pending is not None:
        values = {name: _number_or_nan(value) for name, value in pending.items()}
        known = Pending(**{**values, "round": int(pending["round"])})  # type: ignore[arg-type]
    return Costs(
        estimate=Estimate(**read),
        peaks=Peaks(
            _number(peaks["base"]),
            tuple(tried[: round(1 / estimator.MEMORY_STEP)]),
            _number(peaks["surplus"]),
        ),
        pending=known,
        finish_s=_number(table["finish_s"]),
        idle=int(_number(table["idle"])),
        asked=int(table["asked"]),
        frequency_hz=_number(table["frequency_hz"]),
        alpha=_number(table["alpha"], 1.0),
        uploads=_number(table["uploads"], 1.0),
    )


def _line(table: Mapping[str, Any]) -> Line:
    """A line of a device; only its second hypothesis may be missing."""
    size = len(estimator.OFFSETS)
    shapes = {"offsets": (size,), "levels": (1, size), "weights": (1, size)}
    made = {
        item.name: _array(table[item.name], shapes.get(item.name, (1,)))
        for item in fields(Line)
        if item.name != "other"
    }
    positive = ("offsets", "variance", "noise", "at")
    if any(np.any(made[name] < 0) for name in positive) or np.any(made["offsets"] == 0):
        raise ValueError("a line with a negative variance")
    other = _number_or_nan(table["other"][0])
    return Line(**made, other=np.array([other]))


def _array(value: Any, shape: tuple[int, ...]) -> FloatArray:
    made = np.array(value, np.float64)
    if made.shape != shape or not np.all(np.isfinite(made)) or np.any(np.abs(made) > UNLIMITED):
        raise ValueError(f"given {value!r:.60}, must be {shape} finite numbers")
    return made


def _number(value: Any, most: float = UNLIMITED) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"given {value!r:.60}, must be a number from 0 to {most:g}")
    return float(value)


def _number_or_nan(value: Any) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or not abs(value) <= UNLIMITED:
        raise ValueError(f"given {value!r:.60}, must be a number")
    return float(value)


def load_costs(path: Path, key: str) -> Costs | None:
    """What a file knows of a workload; `DamagedCostsError` if it cannot be read."""
    if not path.exists():
        return None
    found = _tables(path).get(key)
    return None if found is None else from_text(json.dumps(found))


def save_costs(path: Path, key: str, costs: Costs) -> None:
    """Keep what was learnt of a workload, and of the latest others."""
    try:
        tables = _tables(path) if path.exists() else {}
    except DamagedCostsError:
        tables = {}
    tables.pop(key, None)
    kept = dict([*tables.items()][1 - MOST_WORKLOADS :]) | {key: _plain(costs)}
    atomic_write(path, json.dumps({"schema": SCHEMA, "workloads": kept}).encode())


def _tables(path: Path) -> dict[str, Any]:
    """What a file holds of every workload."""
    damaged = partial(DamagedCostsError, f"{path} cannot be read as learnt costs")
    try:
        content = json.loads(read_file(path, LARGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged() from error
    tables = content.get("workloads") if isinstance(content, dict) else None
    if not isinstance(tables, dict) or content.get("schema") != SCHEMA:
        raise damaged()
    return tables
