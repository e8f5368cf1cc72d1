"""What a width costs on a device, and the widest one within a limit."""

from __future__ import annotations

import bisect
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anycostfl.data.samples import Tree
from anycostfl.errors import ConfigError, InfeasibleBudgetError
from anycostfl.export.formats import FORMATS, deployed_for, feed_of, open_onnx, write
from anycostfl.export.trained import TrainedModel, cut, least_alpha, metric_of
from anycostfl.files import atomic_write, writing_to
from anycostfl.records.run import WIDTHS
from anycostfl.shrink import SubModel


@dataclass(frozen=True, slots=True)
class Width:
    """Metric and cost of one width of a trained model in one precision.

    `flops` are those of one forward pass of one sample, `bytes` is the size of the file,
    `latency_ms` that of one sample in onnxruntime on one thread of this machine, and `difference`
    the largest of a number from PyTorch's, on a few samples.
    """

    alpha: float
    metric: float | None
    parameters: int
    flops: float
    bytes: int
    latency_ms: float | None
    precision: str = "fp32"
    difference: float | None = None


def width_of_file(
    trained: TrainedModel,
    sub: SubModel,
    path: Path,
    *,
    metric: float | None = None,
    latency_ms: float | None = None,
) -> Width:
    """The cost of a written width, and what else is known of it."""
    parameters = sum(p.numel() for p in sub.module.parameters())
    flops = trained.net.coupling.flops(sub.plan.widths, training=False)
    return Width(sub.plan.alpha, metric, parameters, flops, path.stat().st_size, latency_ms)


CONSECUTIVE_RUNS = 5  # of one file before the next; the first, which warms caches, does not count


def precision_of(format_name: str) -> str:
    """The precision of weights in a file of that format."""
    return "int8" if format_name == "int8" else "fp32"


def measure_latency_ms(
    paths: Sequence[Path],
    example: Tree,
    *,
    repeats: int = 60,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median milliseconds of ONNX files on one sample, a few runs of each in turn."""
    sessions = [open_onnx(path) for path in paths]
    feed = feed_of(sessions[0], example)
    seen: list[list[float]] = [[] for _ in paths]
    for _ in range(1 + repeats // (CONSECUTIVE_RUNS - 1)):
        for session, times in zip(sessions, seen, strict=True):
            for run in range(CONSECUTIVE_RUNS):
                start = clock()
                session.run(None, feed)
                if run > 0:
                    times.append(1e3 * (clock() - start))
    return [statistics.median(times[CONSECUTIVE_RUNS - 1 :]) for times in seen]


class OnnxFile(nn.Module):
    """An ONNX file as a module, so that metrics are measured on the file itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._session = open_onnx(path)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of the file."""
        tree = named or (inputs[0] if len(inputs) == 1 else inputs)
        found = self._session.run(None, feed_of(self._session, tree))
        outputs = [torch.from_numpy(array) for array in found]
        return outputs[0] if len(outputs) == 1 else outputs


def measure_widths(
    trained: TrainedModel,
    alphas: Sequence[float],
    on_start: Callable[[float], None],
    formats: Sequence[str] = ("onnx", "int8"),
    *,
    prepare: bool = True,
) -> list[Width]:
    """Metric, size, latency and error of every width in every precision.

    The metric is that of the file, run by onnxruntime on the test samples. `on_start` is called
    with each α.
    """
    found: list[Width] = []
    with tempfile.TemporaryDirectory() as folder:
        paths: list[Path] = []
        for alpha in alphas:
            on_start(alpha)
            sub = cut(trained, alpha)
            deployed = deployed_for(trained, sub, "onnx", prepare=prepare)
            for name in formats:
                path = Path(folder, f"{len(paths)}.onnx")
                difference = write(trained, sub, path, name, prepare=prepare)
                metric = metric_of(trained, OnnxFile(path), deployed.test())
                width = width_of_file(trained, sub, path, metric=metric)
                precision = precision_of(name)
                found.append(replace(width, precision=precision, difference=difference))
                paths.append(path)
        latencies = measure_latency_ms(paths, deployed.inputs(1))
    return [replace(w, latency_ms=ms) for w, ms in zip(found, latencies, strict=True)]


def save_widths(folder: Path, widths: Sequence[Width]) -> Path:
    """Write measured widths into the run directory, for its report."""
    path = folder / WIDTHS
    with writing_to(path, "Free some space"):
        atomic_write(path, (json.dumps([asdict(w) for w in widths], indent=1) + "\n").encode())
    return path


# --- the widest that fits -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """The maximum of one field of `Width`, in a unit of `scale`."""

    field: str
    amount: float
    unit: str
    scale: float

    def cost(self, width: Width) -> float:
        """The cost of a width in the unit of the limit."""
        return float(getattr(width, self.field)) / self.scale


UNITS: dict[str, tuple[str, float]] = {
    "us": ("latency_ms", 1e-3), "ms": ("latency_ms", 1.0), "s": ("latency_ms", 1e3),
    "B": ("bytes", 1.0), "kB": ("bytes", 1e3), "MB": ("bytes", 1e6), "GB": ("bytes", 1e9),
    "kFLOP": ("flops", 1e3), "MFLOP": ("flops", 1e6), "GFLOP": ("flops", 1e9),
}  # fmt: skip


def parse_limit(text: str) -> Limit:
    """A limit such as 3ms, 2MB or 50MFLOP."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", text)
    units = {name.lower(): name for name in UNITS}
    if not found or found[2].lower() not in units or float(found[1]) <= 0:
        raise ConfigError(
            [f"--fit: given {text!r}, must be a number and a unit ({', '.join(UNITS)}), as in 3ms"]
        )
    unit = units[found[2].lower()]
    field, scale = UNITS[unit]
    return Limit(field, float(found[1]), unit, scale)


def widest(trained: TrainedModel, limit: Limit, format_name: str, *, prepare: bool = True) -> Width:
    """The widest sub-model (α to a hundredth) within the limit.

    A latency that fits is measured a second time, since the first may have been lucky.
    """
    least = least_alpha(trained.net)
    alphas = [least, *(i / 100 for i in range(1, 101) if i / 100 > least)]
    measured: dict[float, Width] = {}

    def cost(alpha: float) -> float:
        measured[alpha] = _measure(trained, limit, format_name, alpha, prepare=prepare)
        return limit.cost(measured[alpha])

    if (needed := cost(least)) > limit.amount:
        raise InfeasibleBudgetError(
            f"nothing fits into {limit.amount:g} {limit.unit}: the narrowest sub-model (alpha = "
            f"{least:.4g}) needs {_round_up(needed)} {limit.unit}"
        )
    fitting = bisect.bisect_right(alphas, limit.amount, lo=1, key=cost)
    if limit.field == "latency_ms":
        while fitting > 1 and cost(alphas[fitting - 1]) > limit.amount:
            fitting -= 1
    return measured[alphas[fitting - 1]]


def _round_up(amount: float) -> str:
    """Three digits, rounded up so that a limit of this amount is enough."""
    digits = 2 - math.floor(math.log10(amount)) if amount > 0 else 0
    return f"{math.ceil(amount * 10**digits - 1e-9) / 10**digits:g}"


def _measure(
    trained: TrainedModel, limit: Limit, format_name: str, alpha: float, *, prepare: bool
) -> Width:
    """The cost of a width, as far as the limit needs it."""
    sub = trained.net.shrink(alpha)  # not calibrated: statistics change neither size nor speed
    sub.module.eval()
    is_timed, latency_ms = limit.field == "latency_ms", None
    name = format_name if FORMATS[format_name].suffix == ".onnx" or not is_timed else "onnx"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"probe{FORMATS[name].suffix}")
        if limit.field == "flops":
            path.touch()
        else:
            write(trained, sub, path, name, prepare=prepare)
        if is_timed:
            example = deployed_for(trained, sub, name, prepare=prepare).inputs(1)
            [latency_ms] = measure_latency_ms([path], example)
        found = width_of_file(trained, sub, path, latency_ms=latency_ms)
        return replace(found, precision=precision_of(name))
