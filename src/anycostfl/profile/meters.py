"""Energy meters on Linux: RAPL, Jetson's INA3221, a battery.

RAPL counts joules and wraps at `max_energy_range_uj`. The others report watts, which a thread
samples and averages.
"""

from __future__ import annotations

import math
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anycostfl.profile.machine import ROOT, read_number, read_text

BOARD_RAILS = ("VDD_IN", "POM_5V_IN", "5V_IN")
"""Names of the rail that feeds all others."""

SAMPLE_EVERY_S = 0.02

Watts = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Meter:
    """An energy meter; `start()` returns a function that gives the mean watts since the call."""

    name: str
    start: Callable[[], Watts]


@dataclass(frozen=True, slots=True)
class Power:
    """Watts, half the range of the measurements, and where they come from."""

    watts: float
    spread_w: float
    meter: str
    """Its name; empty for an estimate."""
    problems: tuple[str, ...] = ()
    """Why there is no better measurement."""

    @property
    def source(self) -> str:
        """Where the watts come from and how certain they are."""
        if self.meter:
            return f"energy: {self.meter}, load minus idle, ± {self.spread_w:.2g} W"
        return (
            f"energy: {self.watts:g} W assumed for the busy cores, "
            f"accurate within a factor of {ESTIMATED_FACTOR:g}: {'; '.join(self.problems)}"
        )


def find_meter(root: Path = ROOT) -> tuple[Meter | None, tuple[str, ...]]:
    """The most accurate meter, if there is one, and why others could not be used."""
    problems: list[str] = []
    for find in (_ina3221, _rapl, _battery):
        if meter := find(root, problems):
            return meter, tuple(problems)
    return None, tuple(problems) or ("no energy meter (RAPL, INA3221 or a battery)",)


def measure_power(meter: Meter, work: Callable[[], None], windows: int = 3) -> Power:
    """Power while `work` runs, measured several times."""
    watts = []
    for _ in range(windows):
        mean_watts = meter.start()
        work()
        watts.append(mean_watts())
    return Power(statistics.median(watts), (max(watts) - min(watts)) / 2, meter.name)


# --- counters of joules ---------------------------------------------------------------------------


def joules_between(
    before: Sequence[float], after: Sequence[float], ranges: Sequence[float]
) -> float:
    """Energy between two values of counters in µJ, each of which may have wrapped once."""
    return 1e-6 * sum(
        b - a if b >= a else b - a + full for a, b, full in zip(before, after, ranges, strict=True)
    )


def _rapl(root: Path, problems: list[str]) -> Meter | None:
    """All packages; their sub-zones (cores, some DRAM) are part of them."""
    packages = [
        folder
        for folder in sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        if folder.name.count(":") == 1 and read_text(folder / "name").startswith("package")
    ]
    if not packages:
        return None
    if any(read_number(folder / "energy_uj") is None for folder in packages):
        problems.append("RAPL cannot be read; run as root, or make energy_uj readable")
        return None
    ranges = [read_number(folder / "max_energy_range_uj") or 0.0 for folder in packages]

    def read() -> list[float]:
        return [read_number(folder / "energy_uj") or 0.0 for folder in packages]

    def start() -> Watts:
        before, since = read(), time.perf_counter()
        return lambda: joules_between(before, read(), ranges) / (time.perf_counter() - since)

    return Meter(f"RAPL {', '.join(read_text(folder / 'name') for folder in packages)}", start)


# --- sensors of watts -----------------------------------------------------------------------------


def _sampled(name: str, watts: Watts) -> Meter:
    """A meter that samples a sensor of watts in a thread."""

    def start() -> Watts:
        samples, done = [watts()], threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLE_EVERY_S):
                samples.append(watts())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()

        def mean_watts() -> float:
            done.set()
            thread.join()
            return statistics.fmean(samples)

        return mean_watts

    return Meter(name, start)


def _product(unit: float, *files: Path) -> Watts:
    """Watts from one file of power, or from current and voltage; drivers disagree on the sign."""
    return lambda: abs(math.prod(unit * (read_number(file) or 0.0) for file in files))


def _ina3221(root: Path, _problems: list[str]) -> Meter | None:
    """Jetson's rails: that which feeds the whole board, else the sum of all."""
    rails: dict[str, tuple[Path, ...]] = {}
    # The mainline driver (Orin): millivolts and milliamperes per channel.
    for label in sorted((root / "sys/class/hwmon").glob("hwmon*/in[123]_label")):
        if read_text(label.with_name("name")) == "ina3221":
            names = f"in{label.name[2]}_input", f"curr{label.name[2]}_input"
            rails[read_text(label)] = tuple(map(label.with_name, names))
    # The older driver of L4T (Nano, Xavier): milliwatts per channel.
    for label in sorted((root / "sys/bus/i2c/drivers").glob("ina3221x/*/iio:device*/rail_name_*")):
        power = f"in_power{label.name.removeprefix('rail_name_')}_input"
        rails[read_text(label)] = (label.with_name(power),)
    readable = [name for name, files in rails.items() if None not in map(read_number, files)]
    chosen = [name for name in readable if name in BOARD_RAILS][:1] or sorted(readable)
    watts = [_product(1e-3, *rails[name]) for name in chosen]
    name = f"INA3221 {' + '.join(chosen)}"
    return _sampled(name, lambda: sum(one() for one in watts)) if watts else None


def _battery(root: Path, problems: list[str]) -> Meter | None:
    """A discharging battery of the machine itself, not of a peripheral."""
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        if read_text(folder / "type") != "Battery" or read_text(folder / "scope") == "Device":
            continue
        names = ["power_now"]
        if read_number(folder / "power_now") is None:
            names = ["current_now", "voltage_now"]
        watts = _product(1e-6, *(folder / name for name in names))
        if (status := read_text(folder / "status")) != "Discharging":
            problems.append(f"battery {folder.name} is {status.lower()}; unplug it to measure")
        elif watts():
            return _sampled(f"battery {folder.name}", watts)
        else:
            problems.append(f"battery {folder.name} does not report its power")
    return None


# --- without a meter ------------------------------------------------------------------------------

ESTIMATED_FACTOR = 2.5
"""The factor by which an estimate may be off, either way."""


def estimate_power(machine: str, threads: int, problems: tuple[str, ...]) -> Power:
    """Watts of busy cores: 5 each, or 1 each on Arm, within the factor above.

    The first is a desktop or server core near its base clock, the second a Cortex-A72 to A78.
    """
    watts = (1.0 if re.match(r"aarch64|arm", machine) else 5.0) * threads
    spread_w = watts * (ESTIMATED_FACTOR - 1 / ESTIMATED_FACTOR) / 2
    return Power(watts, spread_w, "", problems)
