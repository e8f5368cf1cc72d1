"""Measure the machine this runs on: what the planner has to know about a device (Sec. IV-A).

    W = FLOPs per sample / FLOPs per cycle, o    from training the task's own model
    ε = watts of training / f³                   from E = ε·f² per cycle, f cycles per second
    S = 32 bits for every parameter              from the model
    r                                            by sending bytes to a server, if one is named

What cannot be measured is estimated, named in the profile's `guess`, and its uncertainty is stated.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from anycostfl import workers
from anycostfl.config import Config, toml_lines
from anycostfl.experiment import resolve
from anycostfl.planning.draw import Profile
from anycostfl.profile.machine import Clock, device_name, read_clock, read_gpu_clock
from anycostfl.profile.meters import (
    ESTIMATED_FACTOR,
    Found,
    Power,
    estimate_power,
    find_meter,
    measure_power,
)
from anycostfl.profile.network import Rate
from anycostfl.profile.pace import (
    Pace,
    Speed,
    elastic_model,
    fit_speed,
    local_epoch,
    measure_paces,
    measured_alphas,
)
from anycostfl.shrink import ElasticModel

TRANSMITTER_W = 0.1
"""The paper's radio, for no machine measures its own."""

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Energy:
    """Watts that training adds, and where the number comes from; `meter` is empty for a guess."""

    power: Power
    meter: str
    remarks: tuple[str, ...]

    @property
    def source(self) -> str:
        """Where the watts come from and how sure they are."""
        if self.meter:
            return f"energy: {self.meter}, load minus idle, ± {self.power.spread_w:.2g} W"
        why = "; ".join(self.remarks)
        return (
            f"energy: {self.power.watts:g} W assumed for the busy cores, "
            f"true within a factor of {ESTIMATED_FACTOR:g}: {why}"
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that was measured about this machine with one task."""

    name: str
    config: Config
    threads: int
    clock: Clock
    paces: tuple[Pace, ...]
    speed: Speed
    energy: Energy
    size_bits: int
    rate: Rate | None = None

    @property
    def flops_per_cycle(self) -> float:
        """Effective, over forward and backward and everything around them."""
        return self.speed.flops_per_second / self.clock.now_hz

    @property
    def cycles_per_sample(self) -> float:
        """W of the full model."""
        return self.config.workload.flops_per_sample / self.flops_per_cycle

    @property
    def energy_coefficient(self) -> float:
        """ε."""
        return self.energy.power.watts / self.clock.now_hz**3


def measure(
    config: Config,
    *,
    repeats: int,
    threads: int = 0,
    seconds: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Measure speed, clock and energy of this machine on the task of a configuration.

    `seconds` is what tells the time: that of the wall, or that of the processor on one thread.
    """
    config = resolve(config)
    net = elastic_model(config)
    clocks: list[Clock] = []
    with workers.threads(threads or workers.cores()) as used:
        clock = _clock(config)

        def look() -> None:
            if clock.source.startswith(("cpufreq", "devfreq")):
                clocks.append(_clock(config))

        alphas = measured_alphas(config)
        paces = measure_paces(config, net, alphas, repeats, between=look, clock=seconds)
        energy = measure_energy(config, net, used, find_meter())
    now = statistics.median(seen.now_hz for seen in clocks) if clocks else clock.now_hz
    return Measurement(
        name=device_name(),
        config=config,
        threads=used,
        clock=replace(clock, now_hz=now),
        paces=tuple(paces),
        speed=fit_speed(config.workload.flops_per_sample, paces),
        energy=energy,
        size_bits=net.size_bits,
    )


def _clock(config: Config) -> Clock:
    if config.training.device != "cuda":
        return read_clock()
    if clock := read_gpu_clock():
        return clock
    hertz = 1e3 * float(torch.cuda.get_device_properties(0).clock_rate)
    return Clock(hertz, hertz, hertz, "the GPU's properties")


def measure_energy(config: Config, net: ElasticModel, threads: int, found: Found) -> Energy:
    """Watts that training the full model adds to an idle machine, with the meter that was found."""
    meter, remarks = found
    if config.training.device == "cuda" and (meter is None or meter.name.startswith("RAPL")):
        meter, remarks = None, (*remarks, "the GPU has no meter, and its watts are not in this")
    estimate = estimate_power(platform.machine(), threads)
    if meter is None:
        return Energy(estimate, "", remarks)
    train, batch = local_epoch(config, net, 1.0), config.training.batch

    def work() -> None:
        end = time.perf_counter() + WINDOW_S
        while time.perf_counter() < end:
            train(batch)

    idle = measure_power(meter, lambda: time.sleep(WINDOW_S))
    load = measure_power(meter, work)
    added = Power(load.watts - idle.watts, load.spread_w + idle.spread_w)
    if added.watts <= added.spread_w:
        remark = f"{meter.name} sees no difference between training and idling"
        return Energy(estimate, "", (*remarks, remark))
    return Energy(added, meter.name, remarks)


# --- the profile ----------------------------------------------------------------------------------


def as_profile(measured: Measurement, name: str = "") -> Profile:
    """What the planner and the simulator take."""
    clock, config = measured.clock, measured.config
    widths = ", ".join(f"{pace.alpha:g}" for pace in measured.paces)
    trained = (
        f"speed: {config.model.name} in {config.training.precision} on {config.training.device}, "
        f"batches of {config.training.batch}, threads: {measured.threads}, α = {widths}; "
        f"times lie within {100 * measured.speed.worst_error:.0f} % of proportional to α + overhead"
    )
    sources = [trained, f"clock: {clock.source}", measured.energy.source]
    if measured.rate:
        sources.append(f"rate: measured, round trip {1e3 * measured.rate.round_trip_s:.1f} ms")
    return Profile(
        name=name or measured.name,
        flops_per_cycle=_round(measured.flops_per_cycle),
        energy_coefficient=_round(measured.energy_coefficient),
        frequency_min_hz=clock.min_hz,
        frequency_max_hz=max(clock.max_hz, clock.min_hz),
        power_w=TRANSMITTER_W,
        overhead=_round(measured.speed.overhead),
        rate_bps=_round(measured.rate.rate_bps) if measured.rate else None,
        sources=tuple(sources),
        guess=("power_w",) if measured.energy.meter else ("energy_coefficient", "power_w"),
    )


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def to_toml(profile: Profile, measured: Measurement) -> str:
    """The profile as TOML, with what it was fitted to in comments."""
    lines = [
        "# Measured by `anycostfl profile`. Values named in `guess` are estimates.",
        f"# W = {measured.cycles_per_sample:.4g} cycles per sample of the full model, "
        f"S = {measured.size_bits:,} bits.",
        "#     α   FLOPs   ms per sample",
    ]
    lines += [
        f"# {p.alpha:5.3f}   {p.flops_ratio:.3f}   {1e3 * p.seconds_per_sample:9.4f}"
        for p in measured.paces
    ]
    return "\n".join([*lines, *toml_lines(asdict(profile))]) + "\n"
