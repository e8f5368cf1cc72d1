"""`anycostfl plan`: the strategies of a simulated cohort, or of one real device (Sec. IV-D).

Defaults come from the preset: for one device, `--latency` and `--energy` are the preset's latency
and mean energy budget, and `--distance` is the mean distance in its cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Argument, BadParameter, Option

from anycostfl import config, methods
from anycostfl.checks import FloatArray
from anycostfl.cli._console import Json, emit_json, print_table, say
from anycostfl.cli._options import PRESETS, PROFILES, Overrides, Plot, load_config
from anycostfl.planning import draw, planner
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.planning.strategy import Binds, Reason, Strategies
from anycostfl.report.figures import new_figure, save

DEFAULT = "fmnist-iid"
COLUMNS = {  # key of a device's record, unit, digits
    ">#": ("device", 1, ".0f"),
    ">m": ("distance_m", 1, ".0f"),
    ">kbit/s": ("rate_bps", 1e3, ".0f"),
    ">≤ J": ("energy_budget_j", 1, ".2f"),
    ">α": ("alpha", 1, ".3f"),
    ">β": ("beta", 1, ".4f"),
    ">GHz": ("frequency_hz", 1e9, ".3f"),
    ">s": ("latency_s", 1, ".2f"),
    ">J": ("energy_j", 1, ".2f"),
    ">gain": ("gain", 1, ".5f"),
}
GIVEN = 4  # columns that say what was given; the others are the strategy
SYMBOLS = dict(zip(Binds(255).words(), ["T", "E", "α-", "α+", "β-", "β+", "f-", "f+"], strict=True))
LEGEND = "binds: T latency, E energy, - and + the smallest and the largest possible α, β, f"


@dataclass(frozen=True, slots=True)
class Planned:
    """Devices with their strategies, ready to show."""

    title: str
    cohort: draw.Cohort
    strategies: Strategies
    settings: config.Config


def plan(
    preset: Annotated[str | None, Argument(help=f"{PRESETS}; default: {DEFAULT}")] = None,
    *,
    preset_too: Annotated[str | None, Option("--preset", help="The same, by name")] = None,
    round_: Annotated[int | None, Option("--round", min=0, help="Round; default: 0")] = None,
    seed: Annotated[int | None, Option(min=0, help="Overrides the preset's seed")] = None,
    device: Annotated[str | None, Option(help=f"Plan one device: {PROFILES}")] = None,
    latency: Annotated[float | None, Option(help="Its latency budget in seconds")] = None,
    energy: Annotated[float | None, Option(help="Its energy budget in joules")] = None,
    distance: Annotated[float | None, Option(help="Its distance in metres")] = None,
    samples: Annotated[float | None, Option(help="Its number of samples")] = None,
    set_: Overrides = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Plan (α, β, f) of every device of a round, or of one device, under its budgets."""
    if preset and preset_too:
        raise BadParameter(f"--preset {preset_too} beside {preset}; give only one of them")
    preset = preset or preset_too or DEFAULT
    settings = load_config(preset, set_)
    if device is None:
        budgets = {"latency": latency, "energy": energy, "distance": distance, "samples": samples}
        _reject(budgets, "only with --device; use --set for a cohort")
        seed = settings.run.seed if seed is None else seed
        planned = _plan_cohort(settings, preset, seed, round_ or 0)
    else:
        _reject({"round": round_, "seed": seed}, "only for a cohort, without --device")
        if samples is not None:
            settings = replace(settings, fleet=replace(settings.fleet, samples=samples))
        planned = _plan_device(settings, device, latency, energy, distance)
    _show(planned, json=json)
    if plot is not None:
        (draw_cohort if device is None else draw_what_if)(plot, planned)
        if not json:
            say(f"figure: {plot}")
    if device is not None:
        planner.require_feasible(planned.strategies, planned.cohort.devices)


def _reject(options: Mapping[str, float | None], why: str) -> None:
    if given := [f"--{name}" for name, value in options.items() if value is not None]:
        raise BadParameter(f"{', '.join(given)} {why}")


def _plan_cohort(settings: config.Config, preset: str, seed: int, round_index: int) -> Planned:
    profiles = config.profiles_of(settings.fleet)
    cohort = draw.draw_cohort(settings.fleet, seed=seed, round_index=round_index, profiles=profiles)
    title = f"{preset}, round {round_index}, seed {seed}"
    return Planned(title, cohort, settings.plan(cohort.devices), settings)


def _plan_device(
    settings: config.Config,
    name: str,
    latency: float | None,
    energy: float | None,
    distance: float | None,
) -> Planned:
    profile, spec = config.load_profile(name), settings.fleet
    if distance is None:
        distance = spec.distance_mean_m or 2.0 * spec.radius_m / 3.0
    else:  # a given distance asks for the cell's channel, not for the profile's own rate
        profile = replace(profile, rate_bps=None)
    devices = draw.place_device(
        profile,
        spec,
        distance_m=distance,
        latency_s=spec.latency_s if latency is None else latency,
        energy_j=(spec.energy_min_j + spec.energy_max_j) / 2 if energy is None else energy,
    )
    title = f"{profile.name}, {settings.model.name} on {settings.data.name}"
    cohort = draw.Cohort(np.array([0]), np.array([distance]), devices)
    return Planned(title, cohort, settings.plan(devices), settings)


def _show(planned: Planned, *, json: bool) -> None:
    summary, devices = _summary(planned), planned.cohort.devices
    records = [_record(planned, i) for i in range(len(devices))]
    if json:
        emit_json({"title": planned.title, "devices": records, "summary": summary})
        return
    title = f"{planned.title}, at most {devices.latency_s.max():g} s"
    print_table(title, [*COLUMNS, "binds"], [_cells(item) for item in records])
    say(LEGEND)
    for i, item in enumerate(records):
        if not item["feasible"]:
            needs = planner.needed_budgets(planned.strategies, devices, i)
            say(f"device {item['device']} sits out ({item['reason']}); it needs {needs}")
    if len(records) > 1:
        for name, value in summary.items():
            say(f"  {name.replace('_', ' ')}: {value:.4g}")


def _record(planned: Planned, i: int) -> dict[str, Any]:
    strategies, devices = planned.strategies, planned.cohort.devices
    return {
        "device": int(planned.cohort.index[i]),
        "distance_m": float(planned.cohort.distance_m[i]),
        "rate_bps": float(devices.rate_bps[i]),
        "latency_budget_s": float(devices.latency_s[i]),
        "energy_budget_j": float(devices.energy_j[i]),
        **{item.name: float(getattr(strategies, item.name)[i]) for item in fields(Strategies)},
        "feasible": bool(strategies.feasible[i]),
        "reason": str(Reason(int(strategies.reason[i]))),
        "binds": Binds(int(strategies.binds[i])).words(),
    }


def _cells(record: dict[str, Any]) -> list[str]:
    cells = [format(record[key] / unit, digits) for key, unit, digits in COLUMNS.values()]
    if record["feasible"]:
        return [*cells, " ".join(SYMBOLS[word] for word in record["binds"])]
    return [*cells[:GIVEN], *["–"] * len(cells[GIVEN:]), "sits out"]


def _summary(planned: Planned) -> dict[str, float]:
    strategies, settings = planned.strategies, planned.settings
    alpha, beta = strategies.alpha, strategies.beta  # zeros where a device sits out
    taking_part = int(strategies.feasible.sum())
    mean_share = float((alpha * beta).sum()) / max(taking_part, 1)
    summary = {
        "devices_taking_part": taking_part,
        "devices_sitting_out": len(strategies) - taking_part,
        "mean_alpha": float(alpha.sum()) / max(taking_part, 1),
        "mean_alpha_beta": mean_share,
        "upload_kb_per_device": mean_share * settings.workload.size_bits / 8e3,
        "round_latency_s": float(strategies.latency_s.max()),
        "round_energy_j": float(strategies.energy_j.sum()),
        "mean_gain": float(strategies.gain.mean()),
    }
    method = settings.run.method
    if methods.load(method).plan is planner.plan_strategies:  # only then gains are comparable
        devices, limits = planned.cohort.devices, settings.limits_of(method)
        clipped = planner.closed_form(devices, settings.workload, limits, clipped=True)
        summary["mean_gain_of_the_clipped_closed_form"] = float(clipped.gain.mean())
    return summary


# --- figures --------------------------------------------------------------------------------------

STEPS = 181  # grid points along each axis of a map
ALPHA = ("shrinking factor α", "alpha", 1.0)  # label, field of a strategy, unit
BETA = ("compression rate β", "beta", 1.0)
FREQUENCY = ("f in GHz", "frequency_hz", 1e9)
GAIN = ("learning gain", "gain", 1.0)


def draw_cohort(file: Path, planned: Planned) -> None:
    """α, β and f over distance and energy budget: the map of a typical device, and the cohort."""
    spec, cohort = planned.settings.fleet, planned.cohort
    devices, distance_m = cohort.devices, cohort.distance_m
    reach = max(spec.radius_m, float(distance_m.max()) * 1.02)
    x = np.linspace(min(20.0, float(distance_m.min())), reach, STEPS)
    low, high = float(devices.energy_j.min()), float(devices.energy_j.max())
    y = np.linspace(0.9 * min(low, spec.energy_min_j), 1.02 * max(high, spec.energy_max_j), STEPS)
    grid_x, grid_y = (axis.ravel() for axis in np.meshgrid(x, y))
    power = float(np.median(devices.power_w))
    rate = draw.channel_rate_bps(spec, grid_x, power, sharers=len(devices))
    shown = (ALPHA, BETA, FREQUENCY)
    figure, panels = _draw_maps(planned, shown, (x, y), rate_bps=rate, energy_j=grid_y)
    for panel, (_, field, unit) in zip(panels, shown, strict=True):
        dots: dict[str, Any] = {"edgecolors": "white", "s": 50, "lw": 1.4, "zorder": 3}
        if panel.collections:  # the same colours as the map below
            dots |= {"cmap": panel.collections[0].get_cmap(), "norm": panel.collections[0].norm}
        own = getattr(planned.strategies, field) / unit
        panel.scatter(distance_m, devices.energy_j, c=own, **dots)
        panel.set_xlabel("distance in m")
    note = "map: a device with the cohort's median hardware; dots: the cohort, each with its own"
    figure.supxlabel(note, fontsize=8, color="0.35")
    save(figure, file)


def draw_what_if(file: Path, planned: Planned) -> None:
    """Gain and α of one device over its latency and energy budgets."""
    devices = planned.cohort.devices
    here = float(devices.latency_s[0]), float(devices.energy_j[0])
    x, y = (np.geomspace(value / 8.0, value * 8.0, STEPS) for value in here)
    grid_x, grid_y = (axis.ravel() for axis in np.meshgrid(x, y))
    shown = (GAIN, ALPHA)
    figure, panels = _draw_maps(planned, shown, (x, y), latency_s=grid_x, energy_j=grid_y)
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    for panel in panels:
        face = "white" if planned.strategies.feasible[0] else "tab:red"
        panel.plot(*here, marker="*", ms=15, mfc=face, mec="black", zorder=3)
        panel.set(xlabel="latency budget in s", xscale="log", yscale="log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    where = f"{planned.cohort.distance_m[0]:.0f} m from the base station"
    figure.supxlabel(f"star: the given budgets, {where}", fontsize=8, color="0.35")
    save(figure, file)


def _draw_maps(
    planned: Planned,
    quantities: Sequence[tuple[str, str, float]],
    axes: tuple[FloatArray, FloatArray],
    **changed: FloatArray,
) -> tuple[Any, list[Any]]:
    """A panel for each quantity of the median device, changed; grey where it cannot take part."""
    devices = planned.cohort.devices
    median = {item.name: np.median(getattr(devices, item.name)) for item in fields(Devices)}
    mapped = planned.settings.plan(make_devices(**{**median, **changed}))
    figure, panels = new_figure(len(quantities), (4.3 * len(quantities), 3.7), sharey=True)
    figure.suptitle(planned.title, fontsize=11)
    panels[0].set_ylabel("energy budget in J")
    for panel, (label, field, unit) in zip(panels, quantities, strict=True):
        values = np.ma.masked_array(getattr(mapped, field) / unit, mask=~mapped.feasible)
        panel.set_facecolor("0.88")
        panel.set_title(label, fontsize=10)
        if values.mask.any():
            panel.plot([], [], "s", color="0.88", mec="0.5", label="cannot take part")
            panel.legend(loc="lower left", fontsize=8, framealpha=0.9)
        if values.count():
            _draw_map(panel, axes, values.reshape(len(axes[1]), len(axes[0])))
    return figure, panels


def _draw_map(panel: Any, axes: tuple[FloatArray, FloatArray], values: Any) -> None:
    """Colours and contours of values, on a logarithmic scale if they differ widely."""
    low, high = float(values.min()), float(values.max())
    scale: dict[str, Any] = {"norm": "log"} if 0 < low < high / 50 else {}
    mesh = panel.pcolormesh(*axes, values, cmap="viridis", shading="nearest", **scale)
    if low < high:
        levels = np.geomspace(low, high, 8) if scale else np.linspace(low, high, 8)
        lines = panel.contour(*axes, values, levels=levels[1:-1], colors="black", linewidths=0.6)
        panel.clabel(lines, fontsize=7, fmt=lambda level: f"{level:.2g}")
    panel.figure.colorbar(mesh, ax=panel, pad=0.02)
