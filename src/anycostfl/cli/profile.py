"""`anycostfl profile`: measure this machine and write it down as a device profile."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from anycostfl import profile as profiling
from anycostfl.cli._console import Json, emit_json, err, note, out, say, table
from anycostfl.cli._options import Overrides, Preset
from anycostfl.config import load_preset, load_profile
from anycostfl.errors import ConfigError
from anycostfl.files import StorageError
from anycostfl.profile import Measurement
from anycostfl.profile.network import listen, measure_rate, parse_address
from anycostfl.profile.pace import Pace, Speed

GOOD_ENOUGH = 0.15
TOO_MUCH = 2.0  # overhead with which a third of the time is all that any shrinking saves


def profile(
    preset: Preset = "demo",
    set_: Overrides = None,
    out_file: Annotated[Path, typer.Option("--out", help="File to write")] = Path("device.toml"),
    name: Annotated[str, typer.Option(help="The device's name; else what the machine says")] = "",
    server: Annotated[str, typer.Option(help="HOST:PORT of a sink, to measure the uplink")] = "",
    listen_: Annotated[
        int | None, typer.Option("--listen", metavar="PORT", help="Be that sink")
    ] = None,
    threads: Annotated[int, typer.Option(help="To train with; 0 is one per core")] = 0,
    repeats: Annotated[int, typer.Option(help="Repetitions at each width")] = 15,
    json: Json = False,
) -> None:
    """Measure how fast and how hungry this machine trains, for `plan`, `run` and real fleets."""
    if listen_ is not None:
        _listen(listen_)
        return
    _check(threads, repeats, out_file)
    address = parse_address(server) if server else None
    config = load_preset(preset, set_ or [])
    rate = measure_rate(*address) if address else None
    if not json:
        err.print(f"training {config.model.name} at several widths …")
    measured = replace(profiling.measure(config, repeats=repeats, threads=threads), rate=rate)
    found = profiling.as_profile(measured, name)
    try:
        out_file.write_text(profiling.to_toml(found, measured))
    except OSError as error:
        raise StorageError(f"cannot write {out_file}: {error}") from error
    load_profile(str(out_file))
    if json:
        emit_json({"file": str(out_file), "profile": asdict(found), "measured": _plain(measured)})
    else:
        _show(measured, preset, out_file)
    if doubt := _doubt(measured.speed):
        again = "Otherwise try --set model.widths=fast, or more --repeats"
        note(f"{doubt}. Was the machine busy? {again}")


def _check(threads: int, repeats: int, out_file: Path) -> None:
    problems = [
        f"--{key}: given {value}, allowed at least {least}"
        for key, value, least in (("threads", threads, 0), ("repeats", repeats, 1))
        if value < least
    ]
    if out_file.suffix != ".toml":
        problems.append(f"--out: given {out_file}, allowed a file that ends in .toml")
    if not out_file.parent.is_dir():
        problems.append(f"--out: there is no folder {out_file.parent}; make it first")
    if problems:
        raise ConfigError(problems)


def _listen(port: int) -> None:
    """Be a sink until Ctrl-C."""
    try:
        listen(
            port,
            ready=lambda used: say(f"listening on port {used}; Ctrl-C ends it"),
            served=lambda peer, count: say(f"{peer} sent {count / 1e6:.1f} MB"),
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _plain(measured: Measurement) -> dict[str, object]:
    return {
        "threads": measured.threads,
        "precision": measured.config.training.precision,
        "clock": asdict(measured.clock),
        "widths": [asdict(pace) for pace in measured.paces],
        "flops_per_second": measured.speed.flops_per_second,
        "overhead": measured.speed.overhead,
        "worst_error": measured.speed.worst_error,
        "cycles_per_sample": measured.cycles_per_sample,
        "size_bits": measured.size_bits,
        "watts": measured.energy.power.watts,
        "meter": measured.energy.meter or None,
    }


def _cells(measured: Measurement, pace: Pace) -> list[str]:
    """What was reached at a width, beside what is predicted."""
    flops = measured.config.workload.flops_per_sample
    reached = flops * pace.flops_ratio / pace.seconds_per_sample
    predicted = measured.speed.seconds(flops, pace.alpha)
    return [
        f"{pace.alpha:g}",
        f"{pace.flops_ratio:.3f}",
        f"{1e3 * pace.seconds_per_sample:.3f}",
        f"{reached / 1e9:.2f}",
        f"{reached / measured.clock.now_hz:.2f}",
        f"{1e3 * predicted:.3f}",
        f"{100 * (predicted / pace.seconds_per_sample - 1):+.0f} %",
    ]


def _doubt(speed: Speed) -> str:
    """Why a speed should not be believed, if so."""
    if speed.worst_error > GOOD_ENOUGH:
        off = f"predictions are up to {100 * speed.worst_error:.0f} % off"
        return f"time does not follow α + overhead here: {off}"
    if speed.overhead > TOO_MUCH:
        return f"narrow models train hardly faster than wide ones here ({_overhead(speed)})"
    return ""


def _overhead(speed: Speed) -> str:
    return f"{100 * speed.overhead:.1f} % of W at every width"


def _show(measured: Measurement, preset: str, path: Path) -> None:
    columns = (">α", ">FLOPs", ">ms/sample", ">GFLOP/s", ">per cycle", ">predicted ms", ">error")
    out.print(table("", columns, [_cells(measured, pace) for pace in measured.paces]))
    clock, power, energy = measured.clock, measured.energy.power, measured.energy
    facts = [
        ("clock", f"{clock.now_hz / 1e9:.3f} GHz ({clock.source})"),
        ("FLOPs per cycle", f"{measured.flops_per_cycle:.3g}, threads: {measured.threads}"),
        ("W", f"{measured.cycles_per_sample:.4g} cycles per sample"),
        ("overhead", _overhead(measured.speed)),
        ("S", f"{measured.size_bits / 1e6:.2f} Mbit"),
        ("ε", f"{measured.energy_coefficient:.3g}, {power.watts:.3g} W"),
        ("", energy.source),
    ]
    if measured.rate:
        facts.append(("uplink", f"{measured.rate.rate_bps / 1e6:.2f} Mbit/s"))
    for label, fact in facts:
        say(f"{label:>16}  {fact}")
    say(f"Written to {path}. Use it:")
    say(f"  anycostfl plan {preset} --device {path}")
    say(f"  anycostfl run {preset} --set 'fleet.profiles=[\"{path}\"]'")
