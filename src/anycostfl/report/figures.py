"""Figures: the metric over rounds, time, energy and bytes; data per device; sweeps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.files import atomic_write
from anycostfl.metrics import MetricInfo
from anycostfl.records.round import RoundRecord


def new_figure(panels: int, size: tuple[float, float], **options: Any) -> tuple[Any, list[Any]]:
    """A figure with panels side by side, for `save`; without a window or global state."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingExtraError("figures need: pip install 'anycostfl[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False, **options)[0])


def save(figure: Any, path: Path) -> None:
    """Write a figure; missing folders are created, and a link is replaced, not followed."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=110, format=path.suffix.removeprefix(".") or "png")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, drawn.getvalue())
    except (OSError, ValueError) as error:  # not writable, or not a format matplotlib knows
        raise ConfigError([f"figure: given {path}, but {error}"]) from error


def draw_curves(runs: Mapping[str, Sequence[RoundRecord]], info: MetricInfo, path: Path) -> None:
    """The metric over cost, for one or several runs; log axes for widely different costs."""
    figure, axes = new_figure(4, (14, 3.4), sharey=True)
    for name, records in runs.items():
        values = {i: r.metric for i, r in enumerate(records) if r.metric is not None}
        shown = [info.factor * value for value in values.values()]
        for axis, costs in zip(axes, _costs(records).values(), strict=True):
            axis.plot([costs[i] for i in values], shown, label=name, linewidth=1.6)
    for axis, label in zip(axes, _costs([]), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        ends = [line.get_xdata()[-1] for line in axis.get_lines() if len(line.get_xdata())]
        if ends and max(ends) > 10 * min(ends):
            axis.set_xscale("log")
    axes[0].set_ylabel(f"test {info.title}")
    if len(runs) > 1:
        axes[0].legend()
    save(figure, path)


def _costs(records: Sequence[RoundRecord]) -> dict[str, list[float]]:
    """Cumulative cost after each round."""
    return {
        "round": [float(r.round + 1) for r in records],
        "simulated minutes": [s / 60 for s in accumulate(r.latency_s for r in records)],
        "energy, kJ": [j / 1e3 for j in accumulate(r.energy_j for r in records)],
        "uploaded, MB": [b / 1e6 for b in accumulate(r.bytes_up for r in records)],
    }


def draw_partition(counts: np.ndarray[tuple[int, int], np.dtype[np.int64]], path: Path) -> None:
    """Samples per device and class: one bar per device; `counts` is (device, class)."""
    devices, classes = counts.shape
    figure, [axis] = new_figure(1, (max(6.0, min(14.0, 0.2 * devices)), 3.4))
    from matplotlib import colormaps  # noqa: PLC0415 - optional, but there now

    colours = colormaps["tab10" if classes <= 10 else "viridis"]
    bottom = np.zeros(devices)
    for kind in range(classes):
        colour = colours(kind % 10 / 10)
        axis.bar(range(devices), counts[:, kind], 1.0, bottom=bottom, color=colour, label=str(kind))
        bottom += counts[:, kind]
    axis.set(xlabel="device", ylabel="training samples")
    axis.legend(title="class", ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def draw_lines(panels: Mapping[str, Lines], x_label: str, path: Path) -> None:
    """One panel per quantity, one line per method."""
    figure, axes = new_figure(len(panels), (4.6 * len(panels), 3.6))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (x, y) in lines.items():
            axis.plot(x, y, "o-", label=name, linewidth=1.6, markersize=4)
        axis.set(xlabel=x_label, ylabel=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    save(figure, path)


def draw_bars(names: Sequence[str], panels: Mapping[str, Sequence[float]], path: Path) -> None:
    """One panel per quantity, one bar per name."""
    figure, axes = new_figure(len(panels), (3.6 * len(panels), 3.4))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.bar_label(axis.bar(range(len(names)), values, 0.7), fmt="%.3g")
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axis.set_ylabel(title)
        axis.margins(y=0.15)
    save(figure, path)
