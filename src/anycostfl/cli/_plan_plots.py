"""The two figures of `anycostfl plan`; matplotlib is loaded only when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anycostfl.checks import FloatArray
from anycostfl.config import Config
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.planning.draw import channel_rate_bps
from anycostfl.planning.strategy import Strategies
from anycostfl.report.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 181  # grid points along each axis of a map


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
    """α, β and f over distance and energy budget: the map of a typical device, the cohort on it."""
    settings, devices, distance_m = planned.settings, planned.devices, planned.distance_m
    spec = settings.fleet
    reach = max(spec.radius_m, float(distance_m.max()) * 1.02)
    x = np.linspace(min(20.0, float(distance_m.min())), reach, STEPS)
    low, high = float(devices.energy_j.min()), float(devices.energy_j.max())
    y = np.linspace(0.9 * min(low, spec.energy_min_j), 1.02 * max(high, spec.energy_max_j), STEPS)
    grid_x, grid_y = (axis.ravel() for axis in np.meshgrid(x, y))
    power = float(np.median(devices.power_w))
    rate = channel_rate_bps(spec, grid_x, power, sharers=len(devices))
    typical = _typical(devices, rate_bps=rate, energy_j=grid_y)
    mapped = settings.plan(typical)
    figure, axes = _panels(3, planned.title)
    names = (("shrinking factor α", "alpha"), ("compression rate β", "beta"), ("f in GHz", "f"))
    for panel, (label, key) in zip(axes, names, strict=True):
        _map(panel, (x, y), _values(mapped, key), mapped.feasible, label)
        own = _values(planned.strategies, key)
        panel.scatter(distance_m, devices.energy_j, c=own, zorder=3, **_style(panel))
        panel.set_xlabel("distance in m")
    axes[0].set_ylabel("energy budget in J")
    note = "map: a device with the cohort's median hardware; dots: the cohort, each with its own"
    _save(figure, file, note)


def draw_what_if(file: Path, planned: Planned) -> None:
    """Gain and α of one device over its latency and energy budgets."""
    settings, devices = planned.settings, planned.devices
    here = float(devices.latency_s[0]), float(devices.energy_j[0])
    x, y = (np.geomspace(value / 8.0, value * 8.0, STEPS) for value in here)
    grid_x, grid_y = (axis.ravel() for axis in np.meshgrid(x, y))
    changed = _typical(devices, latency_s=grid_x, energy_j=grid_y)
    mapped = settings.plan(changed)
    figure, axes = _panels(2, planned.title)
    names = (("learning gain", "gain"), ("shrinking factor α", "alpha"))
    for panel, (label, key) in zip(axes, names, strict=True):
        _map(panel, (x, y), _values(mapped, key), mapped.feasible, label)
        face = "white" if planned.strategies.feasible[0] else "tab:red"
        panel.plot(*here, marker="*", ms=15, mfc=face, mec="black", zorder=3)
        panel.set_xlabel("latency budget in s")
        _log_axes(panel)
    axes[0].set_ylabel("energy budget in J")
    note = f"star: the budgets asked for, {planned.distance_m[0]:.0f} m from the base station"
    _save(figure, file, note)


def _typical(devices: Devices, **changed: FloatArray) -> Devices:
    """The devices' median in every quantity, but for those that change."""
    names = [item.name for item in fields(Devices)]
    median = {name: np.median(getattr(devices, name)) for name in names}
    return make_devices(**{**median, **changed})


def _values(strategies: Strategies, key: str) -> FloatArray:
    if key == "f":
        return strategies.frequency_hz / 1e9
    values: FloatArray = getattr(strategies, key)
    return values


def _map(
    panel: Axes,
    axes: tuple[FloatArray, FloatArray],
    values: FloatArray,
    shown: npt.NDArray[np.bool_],
    label: str,
) -> None:
    """Colour a panel by the values; where the device cannot take part it stays grey."""
    field = np.ma.masked_array(values, mask=~shown).reshape(len(axes[1]), len(axes[0]))
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


def _style(panel: Axes) -> dict[str, Any]:
    """Dots with the colours of the map below them."""
    dots: dict[str, Any] = {"edgecolors": "white", "s": 50, "lw": 1.4}
    if panel.collections:
        dots |= {"cmap": panel.collections[0].get_cmap(), "norm": panel.collections[0].norm}
    return dots


def _log_axes(panel: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    panel.set(xscale="log", yscale="log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _panels(count: int, title: str) -> tuple[Figure, Sequence[Axes]]:
    figure, axes = new_figure(count, (4.3 * count, 3.7), sharey=True)
    figure.suptitle(title, fontsize=11)
    return figure, axes


def _save(figure: Figure, file: Path, note: str) -> None:
    figure.supxlabel(note, fontsize=8, color="0.35")
    save(figure, file)
