"""`anycostfl profile`: measure this machine and write a device profile."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from anycostfl import profile as profiling
from anycostfl.cli._console import Json, emit_json, err, note, print_table, say
from anycostfl.cli._options import Overrides, Preset
from anycostfl.config import load_preset, load_profile
from anycostfl.errors import ConfigError
from anycostfl.files import writing_to
from anycostfl.profile import Measurement
from anycostfl.profile.speed import SpeedFit
from anycostfl.records.run import ELSEWHERE

MOST_ERROR = 0.15
MOST_OVERHEAD = 2.0  # beyond, no width trains in less than two thirds of the full model's time


def profile(
    preset: Preset = "demo",
    set_: Overrides = None,
    out_file: Annotated[Path, Option("--out", help="File to write")] = Path("device.toml"),
    name: Annotated[str, Option(help="Device name; default: as the machine reports it")] = "",
    threads: Annotated[int, Option(min=0, help="Training threads; 0: one per core")] = 0,
    repeats: Annotated[int, Option(min=1, help="Repetitions at each width")] = 15,
    json: Json = False,
) -> None:
    """Measure training speed and power of this machine, for `plan`, `run` and `join`."""
    problems = []
    if out_file.suffix != ".toml":
        problems.append(f"--out: given {out_file}, must end in .toml")
    if not out_file.parent.is_dir():
        problems.append(f"--out: there is no folder {out_file.parent}; create it first")
    if problems:
        raise ConfigError(problems)
    config = load_preset(preset, set_ or [])
    if not json:
        err.print(f"training {config.model.name} at several widths …")
    measured = profiling.measure(config, repeats=repeats, threads=threads)
    found = profiling.as_profile(measured, name)
    with writing_to(out_file, ELSEWHERE):
        out_file.write_text(profiling.to_toml(found, measured))
    load_profile(str(out_file))
    if json:
        document = {"file": str(out_file), "profile": asdict(found)}
        emit_json({**document, "measured": _as_json(measured)})
    else:
        _show(measured, preset, out_file)
    if warning := _warning(measured.speed):
        again = "If not, try --set model.widths=fast, or more --repeats"
        note(f"{warning}. Was the machine busy? {again}")


def _as_json(measured: Measurement) -> dict[str, object]:
    return {
        "threads": measured.threads,
        "precision": measured.config.training.precision,
        "clock": asdict(measured.clock),
        "widths": [asdict(timing) for timing in measured.timings],
        **asdict(measured.speed),
        "cycles_per_sample": measured.cycles_per_sample,
        "size_bits": measured.size_bits,
        "watts": measured.power.watts,
        "meter": measured.power.meter or None,
    }


def _warning(speed: SpeedFit) -> str:
    """Why a speed is doubtful; empty if it is not."""
    if speed.worst_error > MOST_ERROR:
        off = f"predictions are up to {100 * speed.worst_error:.0f} % off"
        return f"time is not proportional to α + overhead here: {off}"
    if speed.overhead > MOST_OVERHEAD:
        return f"narrow models train hardly faster than wide ones here ({_overhead(speed)})"
    return ""


def _overhead(speed: SpeedFit) -> str:
    return f"{100 * speed.overhead:.1f} % of W at every width"


def _show(measured: Measurement, preset: str, path: Path) -> None:
    clock, power, flops = measured.clock, measured.power, measured.config.workload.flops_per_sample
    rows = []
    for timing in measured.timings:
        seconds, predicted = timing.seconds_per_sample, measured.speed.seconds(flops, timing.alpha)
        width = [f"{timing.alpha:g}", f"{timing.flops_ratio:.3f}", f"{1e3 * seconds:.3f}"]
        speed = flops * timing.flops_ratio / seconds
        rate = [f"{speed / 1e9:.2f}", f"{speed / clock.now_hz:.2f}"]
        error = f"{100 * (predicted / seconds - 1):+.0f} %"
        rows.append([*width, *rate, f"{1e3 * predicted:.3f}", error])
    columns = (">α", ">FLOPs", ">ms/sample", ">GFLOP/s", ">per cycle", ">predicted ms", ">error")
    print_table("", columns, rows)
    facts = {
        "clock": f"{clock.now_hz / 1e9:.3f} GHz ({clock.source})",
        "FLOPs per cycle": f"{measured.flops_per_cycle:.3g}, threads: {measured.threads}",
        "W": f"{measured.cycles_per_sample:.4g} cycles per sample",
        "overhead": _overhead(measured.speed),
        "S": f"{measured.size_bits / 1e6:.2f} Mbit",
        "ε": f"{measured.energy_coefficient:.3g}, {power.watts:.3g} W",
        "": power.source,
    }
    for label, fact in facts.items():
        say(f"{label:>16}  {fact}")
    say(f"Written to {path}. Use it with:")
    say(f"  anycostfl plan {preset} --device {path}")
    say(f"  anycostfl run {preset} --set 'fleet.profiles=[\"{path}\"]'")
