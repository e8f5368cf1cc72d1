"""`anycostfl plan`: the strategies of a simulated cohort, or of one real device (Sec. IV-D).

Defaults come from the preset: for one device, `--latency` and `--energy` are the preset's latency
and mean energy budget, and `--distance` is the mean distance in its cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

import numpy as np
import typer

from anycostfl import config, methods
from anycostfl.cli._console import Json, emit_json, out, say, table
from anycostfl.cli._options import PRESETS, PROFILES, Overrides, Plot
from anycostfl.cli._plan_plots import Planned, draw_cohort, draw_what_if
from anycostfl.planning import draw, planner
from anycostfl.planning.strategy import Binds, Reason

DEFAULT = "fmnist-iid"
COLUMNS = (">#", ">m", ">kbit/s", ">≤ J", ">α", ">β", ">GHz", ">s", ">J", ">gain", "binds")
SYMBOLS = dict(zip(Binds(255).words(), ["T", "E", "α-", "α+", "β-", "β+", "f-", "f+"], strict=True))
LEGEND = "binds: T latency, E energy, - and + the smallest and the largest allowed α, β, f"


def plan(
    preset: Annotated[str | None, typer.Argument(help=f"{PRESETS}; default: {DEFAULT}")] = None,
    *,
    preset_too: Annotated[str | None, typer.Option("--preset", help="The same, by name")] = None,
    round_: Annotated[int | None, typer.Option("--round", min=0, help="Round; default: 0")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Overrides the preset's seed")] = None,
    device: Annotated[str | None, typer.Option(help=f"Plan one device: {PROFILES}")] = None,
    latency: Annotated[float | None, typer.Option(help="Its latency budget in seconds")] = None,
    energy: Annotated[float | None, typer.Option(help="Its energy budget in joules")] = None,
    distance: Annotated[float | None, typer.Option(help="Its distance in metres")] = None,
    samples: Annotated[float | None, typer.Option(help="Its number of samples")] = None,
    set_: Overrides = None,
    json_: Json = False,
    plot: Plot = None,
) -> None:
    """Plan (α, β, f) of every device of a round, or of one device, under its budgets."""
    if preset and preset_too:
        raise typer.BadParameter(f"--preset {preset_too} beside {preset}; give only one of them")
    preset = preset or preset_too or DEFAULT
    settings = config.load_preset(preset, set_ or [])
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
    _show(planned, as_json=json_)
    if plot is not None:
        draw = draw_cohort if device is None else draw_what_if
        draw(plot, planned)
        if not json_:
            say(f"figure: {plot}")
    if device is not None:
        planner.require_feasible(planned.strategies, planned.devices)


def _reject(options: Mapping[str, float | None], why: str) -> None:
    if given := [f"--{name}" for name, value in options.items() if value is not None]:
        raise typer.BadParameter(f"{', '.join(given)} {why}")


def _plan_cohort(settings: config.Config, preset: str, seed: int, round_index: int) -> Planned:
    profiles = config.profiles_of(settings.fleet)
    cohort = draw.draw_cohort(settings.fleet, seed=seed, round_index=round_index, profiles=profiles)
    strategies = settings.plan(cohort.devices)
    title = f"{preset}, round {round_index}, seed {seed}"
    return Planned(title, cohort.index, cohort.distance_m, cohort.devices, strategies, settings)


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
    where = np.array([distance])
    return Planned(title, np.array([0]), where, devices, settings.plan(devices), settings)


def _show(planned: Planned, *, as_json: bool) -> None:
    summary = _summary(planned)
    records = [_record(planned, i) for i in range(len(planned.devices))]
    if as_json:
        emit_json({"title": planned.title, "devices": records, "summary": summary})
        return
    title = f"{planned.title}, at most {planned.devices.latency_s.max():g} s"
    out.print(table(title, COLUMNS, [_cells(item) for item in records]))
    say(LEGEND)
    for i, item in enumerate(records):
        if not item["feasible"]:
            needs = planner.needed_budgets(planned.strategies, planned.devices, i)
            say(f"device {item['device']} sits out ({item['reason']}); it needs {needs}")
    if len(records) > 1:
        for name, value in summary.items():
            say(f"  {name.replace('_', ' ')}: {value:.4g}")


def _record(planned: Planned, i: int) -> dict[str, Any]:
    s, d = planned.strategies, planned.devices
    slacks = ("latency_slack_s", "energy_slack_j")
    needs = ("least_latency_s", "least_energy_j", "latency_floor_s", "energy_floor_j")
    return {
        "device": int(planned.index[i]),
        "distance_m": float(planned.distance_m[i]),
        "rate_bps": float(d.rate_bps[i]),
        "latency_budget_s": float(d.latency_s[i]),
        "energy_budget_j": float(d.energy_j[i]),
        **asdict(s[i]),
        **{name: float(getattr(s, name)[i]) for name in slacks},
        "feasible": bool(s.feasible[i]),
        "reason": str(Reason(int(s.reason[i]))),
        "binds": Binds(int(s.binds[i])).words(),
        **{name: float(getattr(s, name)[i]) for name in needs},
    }


def _cells(record: dict[str, Any]) -> list[str]:
    budget = record["energy_budget_j"]
    place = [
        str(record["device"]),
        f"{record['distance_m']:.0f}",
        f"{record['rate_bps'] / 1e3:.0f}",
        f"{budget:.2f}" if budget < 1e6 else f"{budget:.3g}",
    ]
    if not record["feasible"]:
        return [*place, *["–"] * 6, "sits out"]
    return [
        *place,
        f"{record['alpha']:.3f}",
        f"{record['beta']:.4f}",
        f"{record['frequency_hz'] / 1e9:.3f}",
        f"{record['latency_s']:.2f}",
        f"{record['energy_j']:.2f}",
        f"{record['gain']:.5f}",
        " ".join(SYMBOLS[word] for word in record["binds"]),
    ]


def _summary(planned: Planned) -> dict[str, float]:
    s, settings = planned.strategies, planned.settings
    taking_part = int(s.feasible.sum())
    mean_alpha, mean_share = (
        float(values[s.feasible].sum()) / max(taking_part, 1)
        for values in (s.alpha, s.alpha * s.beta)
    )
    summary = {
        "devices_taking_part": taking_part,
        "devices_sitting_out": len(s.feasible) - taking_part,
        "mean_alpha": mean_alpha,
        "mean_alpha_beta": mean_share,
        "upload_kb_per_device": mean_share * settings.workload.size_bits / 8e3,
        "round_latency_s": float(s.latency_s.max()),
        "round_energy_j": float(s.energy_j.sum()),
        "mean_gain": float(s.gain.mean()),
    }
    method = settings.run.method
    if methods.load(method).plan is planner.plan_strategies:  # only then gains are comparable
        limits = settings.limits_of(method)
        clipped = planner.closed_form(planned.devices, settings.workload, limits, clipped=True)
        summary["mean_gain_of_the_clipped_closed_form"] = float(clipped.gain.mean())
    return summary
