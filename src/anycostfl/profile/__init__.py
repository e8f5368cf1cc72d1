"""Measure this machine: what the planner has to know about a device (Sec. IV-A).

    W = FLOPs per sample / FLOPs per cycle, o    from training the task's own model
    ε = watts of training / f³                   from E = ε·f² per cycle, f cycles per second
    S = 32 bits per parameter                    from the model

What cannot be measured is estimated, listed in the profile's `guess`, and stated with its
uncertainty. The rate r is not measured here: it stands in the profile or comes with `--rate-bps`.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import tomli_w
import torch

from anycostfl.config import Config
from anycostfl.device import cores
from anycostfl.device import threads as use_threads
from anycostfl.experiment import resolve
from anycostfl.machine import sensors
from anycostfl.machine.sensors import Clock, Meter, Power, estimate_power, measure_power
from anycostfl.planning.draw import Profile
from anycostfl.profile.speed import (
    SpeedFit,
    WidthTiming,
    elastic_model,
    fit_speed,
    time_widths,
    timed_epoch,
)
from anycostfl.shrink import ElasticModel

TRANSMITTER_W = 0.1  # the paper's radio: no machine measures its own
WINDOW_S = 1.0  # of measuring power


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured on this machine with one task."""

    name: str
    config: Config
    threads: int
    clock: Clock
    timings: tuple[WidthTiming, ...]
    speed: SpeedFit
    power: Power
    size_bits: int

    @property
    def flops_per_cycle(self) -> float:
        """Effective, over the whole training step."""
        return self.speed.flops_per_second / self.clock.now_hz

    @property
    def cycles_per_sample(self) -> float:
        """W of the full model."""
        return self.config.workload.flops_per_sample / self.flops_per_cycle

    @property
    def energy_coefficient(self) -> float:
        """ε."""
        return self.power.watts / self.clock.now_hz**3


def measure(
    config: Config,
    *,
    repeats: int,
    threads: int = 0,
    seconds: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Measure speed, clock and energy of this machine on the task of a configuration.

    `seconds` is the timer: wall time, or processor time where one thread is used.
    """
    config = resolve(config)
    net = elastic_model(config)
    clock = _read_clock(config.training.device)
    frequencies: list[float] = []

    def sample_clock() -> None:
        if clock.is_live:
            frequencies.append(_read_clock(config.training.device).now_hz)

    with use_threads(threads or cores()) as used:
        timings = time_widths(config, net, repeats, after_each=sample_clock, clock=seconds)
        power = training_power(config, net, used, *sensors.find_meter())
    return Measurement(
        name=sensors.device_name(),
        config=config,
        threads=used,
        clock=replace(clock, now_hz=statistics.median(frequencies or [clock.now_hz])),
        timings=tuple(timings),
        speed=fit_speed(config.workload.flops_per_sample, timings),
        power=power,
        size_bits=net.size_bits,
    )


def _read_clock(device: str) -> Clock:
    if device != "cuda":
        return sensors.read_clock()
    if clock := sensors.read_gpu_clock():
        return clock
    kilohertz = float(torch.cuda.get_device_properties(0).clock_rate)
    return sensors.fixed_clock(1e3 * kilohertz, "the GPU's properties")


def training_power(
    config: Config,
    net: ElasticModel,
    threads: int,
    meter: Meter | None,
    problems: tuple[str, ...] = (),
) -> Power:
    """Watts that training the full model adds to an idle machine; estimated without a meter."""
    if config.training.device == "cuda" and (meter is None or meter.name.startswith("RAPL")):
        meter, problems = None, (*problems, "the GPU has no meter, and its watts are not included")
    if meter is None:
        return estimate_power(platform.machine(), threads, problems)
    train, batch = timed_epoch(config, net, 1.0), config.training.batch

    def work() -> None:
        end = time.perf_counter() + WINDOW_S
        while time.perf_counter() < end:
            train(batch)

    idle = measure_power(meter, lambda: time.sleep(WINDOW_S))
    load = measure_power(meter, work)
    watts, spread_w = load.watts - idle.watts, load.spread_w + idle.spread_w
    if watts > spread_w:
        return Power(watts, spread_w, meter.name, problems)
    why = f"{meter.name} shows no difference between training and idling"
    return estimate_power(platform.machine(), threads, (*problems, why))


# --- the profile ----------------------------------------------------------------------------------


def as_profile(measured: Measurement, name: str = "") -> Profile:
    """The profile that the planner and the simulator take."""
    clock, config = measured.clock, measured.config
    widths = ", ".join(f"{timing.alpha:g}" for timing in measured.timings)
    trained = (
        f"speed: {config.model.name} in {config.training.precision} on {config.training.device}, "
        f"batches of {config.training.batch}, threads: {measured.threads}, α = {widths}; times are "
        f"within {100 * measured.speed.worst_error:.0f} % of proportional to α + overhead"
    )
    return Profile(
        name=name or measured.name,
        flops_per_cycle=_round(measured.flops_per_cycle),
        energy_coefficient=_round(measured.energy_coefficient),
        frequency_min_hz=clock.min_hz,
        frequency_max_hz=max(clock.max_hz, clock.min_hz),
        power_w=TRANSMITTER_W,
        overhead=_round(measured.speed.overhead),
        sources=(trained, f"clock: {clock.source}", measured.power.source),
        guess=("power_w",) if measured.power.meter else ("energy_coefficient", "power_w"),
    )


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def to_toml(profile: Profile, measured: Measurement) -> str:
    """The profile as TOML, with the measured times in comments."""
    lines = [
        "# Measured by `anycostfl profile`. Values listed in `guess` are estimates.",
        f"# W = {measured.cycles_per_sample:.4g} cycles per sample of the full model, "
        f"S = {measured.size_bits:,} bits.",
        "#     α   FLOPs   ms per sample",
    ]
    lines += [
        f"# {t.alpha:5.3f}   {t.flops_ratio:.3f}   {1e3 * t.seconds_per_sample:9.4f}"
        for t in measured.timings
    ]
    known = {key: value for key, value in asdict(profile).items() if value is not None}
    return "\n".join(lines) + "\n" + tomli_w.dumps(known)
