"""The two figures of `anycostfl plan`; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anycostfl.checks import FloatArray
from anycostfl.config import Config
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.planning.draw import channel_rate_bps
from anycostfl.planning.strategy import Strategies
from anycostfl.report.figures import new_figure, save

STEPS = 181  # grid points along each axis of a map
ALPHA = ("shrinking factor α", "alpha", 1.0)
BETA = ("compression rate β", "beta", 1.0)
FREQUENCY = ("f in GHz", "frequency_hz", 1e9)
GAIN = ("learning gain", "gain", 1.0)


@dataclass(frozen=True, slots=True)
class Planned:
    """Devices with their strategies, ready to show."""

    title: str
    index: npt.NDArray[np.intp]
    distance_m: FloatArray
    devices: Devices
    strategies: Strategies
    settings: Config


def draw_cohort(file: Path, planned: Planned) -> None:
    """α, β and f over distance and energy budget: the map of a typical device, and the cohort."""
    spec, devices, distance_m = planned.settings.fleet, planned.devices, planned.distance_m
    reach = max(spec.radius_m, float(distance_m.max()) * 1.02)
    x = np.linspace(min(20.0, float(distance_m.min())), reach, STEPS)
    low, high = float(devices.energy_j.min()), float(devices.energy_j.max())
    y = np.linspace(0.9 * min(low, spec.energy_min_j), 1.02 * max(high, spec.energy_max_j), STEPS)
    grid_x, grid_y = (axis.ravel() for axis in np.meshgrid(x, y))
    power = float(np.median(devices.power_w))
    rate = channel_rate_bps(spec, grid_x, power, sharers=len(devices))
    mapped = planned.settings.plan(_typical(devices, rate_bps=rate, energy_j=grid_y))
    figure, axes = _panels(3, planned.title)
    for panel, (label, field, unit) in zip(axes, (ALPHA, BETA, FREQUENCY), strict=True):
        _map(panel, (x, y), getattr(mapped, field) / unit, mapped.feasible, label)
        dots: dict[str, Any] = {"edgecolors": "white", "s": 50, "lw": 1.4, "zorder": 3}
        if panel.collections:  # the same colours as the map below
            dots |= {"cmap": panel.collections[0].get_cmap(), "norm": panel.collections[0].norm}
        own = getattr(planned.strategies, field) / unit
        panel.scatter(distance_m, devices.energy_j, c=own, **dots)
        panel.set_xlabel("distance in m")
    note = "map: a device with the cohort's median hardware; dots: the cohort, each with its own"
    _save(figure, file, note)


def draw_what_if(file: Path, planned: Planned) -> None:
    """Gain and α of one device over its latency and energy budgets."""
    devices = planned.devices
    here = float(devices.latency_s[0]), float(devices.energy_j[0])
    x, y = (np.geomspace(value / 8.0, value * 8.0, STEPS) for value in here)
    grid_x, grid_y = (axis.ravel() for axis in np.meshgrid(x, y))
    mapped = planned.settings.plan(_typical(devices, latency_s=grid_x, energy_j=grid_y))
    figure, axes = _panels(2, planned.title)
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    for panel, (label, field, unit) in zip(axes, (GAIN, ALPHA), strict=True):
        _map(panel, (x, y), getattr(mapped, field) / unit, mapped.feasible, label)
        face = "white" if planned.strategies.feasible[0] else "tab:red"
        panel.plot(*here, marker="*", ms=15, mfc=face, mec="black", zorder=3)
        panel.set(xlabel="latency budget in s", xscale="log", yscale="log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    note = f"star: the given budgets, {planned.distance_m[0]:.0f} m from the base station"
    _save(figure, file, note)


def _typical(devices: Devices, **changed: FloatArray) -> Devices:
    """A device with the median of every quantity, except for those that change."""
    median = {item.name: np.median(getattr(devices, item.name)) for item in fields(Devices)}
    return make_devices(**{**median, **changed})


def _map(
    panel: Any,
    axes: tuple[FloatArray, FloatArray],
    values: FloatArray,
    feasible: npt.NDArray[np.bool_],
    label: str,
) -> None:
    """Colour a panel by the values; grey where the device cannot take part."""
    field = np.ma.masked_array(values, mask=~feasible).reshape(len(axes[1]), len(axes[0]))
    panel.set_facecolor("0.88")
    panel.set_title(label, fontsize=10)
    if field.mask.any():
        panel.plot([], [], "s", color="0.88", mec="0.5", label="cannot take part")
        panel.legend(loc="lower left", fontsize=8, framealpha=0.9)
    if not field.count():
        return
    low, high = float(field.min()), float(field.max())
    scale: dict[str, Any] = {"norm": "log"} if 0 < low < high / 50 else {}
    mesh = panel.pcolormesh(*axes, field, cmap="viridis", shading="nearest", **scale)
    if low < high:
        levels = np.geomspace(low, high, 8) if scale else np.linspace(low, high, 8)
        lines = panel.contour(*axes, field, levels=levels[1:-1], colors="black", linewidths=0.6)
        panel.clabel(lines, fontsize=7, fmt=lambda level: f"{level:.2g}")
    panel.figure.colorbar(mesh, ax=panel, pad=0.02)


def _panels(count: int, title: str) -> tuple[Any, list[Any]]:
    figure, axes = new_figure(count, (4.3 * count, 3.7), sharey=True)
    figure.suptitle(title, fontsize=11)
    axes[0].set_ylabel("energy budget in J")
    return figure, axes


def _save(figure: Any, file: Path, note: str) -> None:
    figure.supxlabel(note, fontsize=8, color="0.35")
    save(figure, file)
