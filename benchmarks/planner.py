"""Planner: devices per second on one core, and its gain beside the clipped closed form.

Run `python benchmarks/planner.py` for the numbers, with `--figure FILE` also for the figure of
docs/planner.md. One thread is used throughout.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from anycostfl import config
from anycostfl.checks import FloatArray
from anycostfl.planning.cost import Devices, Workload, make_devices
from anycostfl.planning.draw import draw_cohort
from anycostfl.planning.planner import closed_form, plan_strategies
from anycostfl.planning.strategy import Limits

FACTORS = np.geomspace(0.1, 10.0, 41)


def draw_devices(count: int) -> Devices:
    """Devices over wide ranges, so that every regime of the solver is in use."""
    rng = np.random.default_rng(0)

    def spread(low: float, high: float) -> FloatArray:
        values: FloatArray = np.exp(rng.uniform(np.log(low), np.log(high), count))
        return values

    return make_devices(
        samples=spread(50, 5000),
        flops_per_cycle=spread(5, 300),
        energy_coefficient=spread(1e-28, 1e-25),
        frequency_min_hz=spread(5e7, 5e8),
        frequency_max_hz=spread(5e8, 4e9),
        rate_bps=spread(1e4, 1e8),
        power_w=spread(0.01, 2),
        latency_s=spread(0.5, 100),
        energy_j=spread(0.05, 200),
    )


def throughput(count: int, repeats: int) -> float:
    """Devices per second of processor time, the median of several passes."""
    devices, workload = draw_devices(count), Workload(72_384_512, 53_227_840)
    rates = []
    for _ in range(repeats):
        start = time.process_time()
        plan_strategies(devices, workload, Limits())
        rates.append(count / (time.process_time() - start))
    return float(np.median(rates))


def draw_cohorts(settings: config.Config, rounds: int) -> Devices:
    """The cohorts of many rounds, one after the other."""
    drawn = [
        draw_cohort(settings.fleet, seed=0, round_index=index).devices for index in range(rounds)
    ]
    columns = {
        item.name: np.concatenate([getattr(devices, item.name) for devices in drawn])
        for item in fields(Devices)
    }
    return Devices(**columns)


def mean_gains(settings: config.Config, rounds: int) -> tuple[float, float, float]:
    """Mean gain of the exact and the clipped solution; share of printed ones outside the box."""
    problem = draw_cohorts(settings, rounds), settings.workload, settings.limits_of("anycostfl")
    exact, clipped = plan_strategies(*problem), closed_form(*problem, clipped=True)
    outside = ~closed_form(*problem).feasible
    return float(exact.gain.mean()), float(clipped.gain.mean()), float(outside.mean())


def sweep(settings: config.Config, what: str) -> list[tuple[float, float, float]]:
    """The ratio of the two gains, and the share outside, as one quantity is scaled."""
    rows = []
    for factor in FACTORS:
        changed = scaled(settings, what, float(factor))
        exact, clipped, outside = mean_gains(changed, rounds=100)
        rows.append((float(factor), clipped / exact if exact else np.nan, outside))
    return rows


def scaled(settings: config.Config, what: str, factor: float) -> config.Config:
    """The same experiment with a heavier model, a wider band or larger budgets."""
    spec, workload = settings.fleet, settings.workload
    if what == "work":
        return replace(
            settings,
            workload=replace(workload, flops_per_sample=workload.flops_per_sample * factor),
        )
    changes = {
        "bandwidth": {"bandwidth_hz": spec.bandwidth_hz * factor},
        "latency": {"latency_s": spec.latency_s * factor},
        "energy": {
            "energy_min_j": spec.energy_min_j * factor,
            "energy_max_j": spec.energy_max_j * factor,
        },
    }
    return replace(settings, fleet=replace(spec, **changes[what]))  # type: ignore[arg-type]


def draw(file: Path, swept: dict[str, dict[str, list[tuple[float, float, float]]]]) -> None:
    """One panel per quantity: clipped gain over exact gain."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only with --figure

    figure = Figure(figsize=(11, 3.1), layout="constrained")
    panels = figure.subplots(1, len(swept), sharey=True)
    for panel, (what, lines) in zip(panels, swept.items(), strict=True):
        for (name, rows), colour in zip(lines.items(), ("tab:blue", "tab:orange"), strict=True):
            factor, ratio, outside = np.array(rows).T
            panel.plot(factor, ratio, color=colour, label=name)
            panel.plot(factor, 1 - outside, color=colour, lw=1, ls=":", label=f"{name}, inside")
        panel.axvline(1.0, color="0.6", lw=0.8)
        panel.set(xscale="log", xlabel=f"{what} × preset", ylim=(0, 1.03), xlim=(0.1, 10))
        panel.grid(color="0.92")
    panels[0].set_ylabel("clipped / exact gain\n(dotted: printed solutions in the box)")
    panels[1].legend(fontsize=8, loc="lower left")
    figure.savefig(file, dpi=90)


def main() -> None:
    """Print the tables; draw the figure if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    rate = throughput(options.devices, options.repeats)
    print(f"plan_strategies: {rate / 1e6:.2f} million devices per second and core")
    print(f"{'preset':16} {'exact':>9} {'clipped':>9} {'ratio':>7} {'outside the box':>16}")
    for name in config.preset_names():
        exact, clipped, outside = mean_gains(config.load_preset(name), rounds=400)
        print(f"{name:16} {exact:9.5f} {clipped:9.5f} {clipped / exact:7.3f} {outside:16.1%}")
    swept = {
        what: {
            name: sweep(config.load_preset(name), what) for name in ("fmnist-iid", "cifar10-iid")
        }
        for what in ("work", "bandwidth", "latency", "energy")
    }
    for what, lines in swept.items():
        for name, rows in lines.items():
            text = "  ".join(f"×{factor:.2g} {ratio:.2f}" for factor, ratio, _ in rows[::10])
            print(f"{what:10} {name:12} clipped/exact {text}")
    if options.figure:
        draw(options.figure, swept)


if __name__ == "__main__":
    main()
