"""Energy meters that Linux offers: RAPL, Jetson's INA3221, a battery.

A meter is begun and later asked for the mean watts since. RAPL counts joules and starts over at
`max_energy_range_uj`; the others show watts, which are sampled in a thread and averaged.
"""

from __future__ import annotations

import math
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anycostfl.profile.machine import ROOT, read_number, read_text

WHOLE_BOARD = ("VDD_IN", "POM_5V_IN", "5V_IN")
"""Names of the rail that feeds all others."""

SAMPLE_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Meter:
    """Something that measures energy; `begin()` returns a function: mean watts since then."""

    name: str
    begin: Callable[[], Callable[[], float]]


@dataclass(frozen=True, slots=True)
class Power:
    """Watts, and the half width of the range in which they were seen."""

    watts: float
    spread_w: float


Found = tuple[Meter | None, tuple[str, ...]]
"""The best meter if there is one, and why others could not be used."""


def find_meter(root: Path = ROOT) -> Found:
    """The best meter of this machine, and why others could not be used."""
    remarks: list[str] = []
    for look in (_ina3221, _ina3221_iio, _rapl, _battery):
        if meter := look(root, remarks):
            return meter, tuple(remarks)
    return None, tuple(remarks) or ("no energy meter (RAPL, INA3221 or a battery)",)


def measure_power(meter: Meter, work: Callable[[], None], windows: int = 3) -> Power:
    """Power while working, over some windows of time."""
    watts = []
    for _ in range(windows):
        since = meter.begin()
        work()
        watts.append(since())
    return Power(statistics.median(watts), (max(watts) - min(watts)) / 2)


# --- counters -------------------------------------------------------------------------------------


def joules_between(
    before: Sequence[float], after: Sequence[float], ranges: Sequence[float]
) -> float:
    """Energy between two readings of counters in µJ, each of which may have wrapped once."""
    return 1e-6 * sum(
        b - a if b >= a else b - a + full for a, b, full in zip(before, after, ranges, strict=True)
    )


def _rapl(root: Path, remarks: list[str]) -> Meter | None:
    """All packages; what lies inside them (cores, dram of some) is not counted again."""
    folders = [
        folder
        for folder in sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        if folder.name.count(":") == 1 and read_text(folder / "name").startswith("package")
    ]
    if not folders:
        return None
    files = [folder / "energy_uj" for folder in folders]
    if any(read_number(file) is None for file in files):
        remarks.append("RAPL is there but cannot be read; run as root, or allow energy_uj")
        return None
    ranges = [read_number(folder / "max_energy_range_uj") or 0.0 for folder in folders]

    def read() -> list[float]:
        return [read_number(file) or 0.0 for file in files]

    def begin() -> Callable[[], float]:
        before, start = read(), time.perf_counter()
        return lambda: joules_between(before, read(), ranges) / (time.perf_counter() - start)

    names = ", ".join(read_text(folder / "name") for folder in folders)
    return Meter(f"RAPL {names}", begin)


# --- gauges ---------------------------------------------------------------------------------------


def _gauge(name: str, watts: Callable[[], float]) -> Meter:
    """A meter of something that shows watts."""

    def begin() -> Callable[[], float]:
        seen, done = [watts()], threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLE_EVERY_S):
                seen.append(watts())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()

        def since() -> float:
            done.set()
            thread.join()
            return statistics.fmean(seen)

        return since

    return Meter(name, begin)


Rails = dict[str, Callable[[], float]]
"""Watts of a rail, by its name."""


def _board(kind: str, rails: Rails) -> Meter | None:
    """The rail that feeds the whole board, else all rails together."""
    whole = [name for name in rails if name in WHOLE_BOARD]
    chosen = whole[:1] or sorted(rails)
    if not chosen:
        return None
    return _gauge(f"{kind} {' + '.join(chosen)}", lambda: sum(rails[name]() for name in chosen))


def _product(a: Path, b: Path, scale: float) -> Callable[[], float]:
    return lambda: (read_number(a) or 0.0) * (read_number(b) or 0.0) * scale


def _milliwatts(path: Path) -> float:
    return 1e-3 * (read_number(path) or 0.0)


def _ina3221(root: Path, _remarks: list[str]) -> Meter | None:
    """The mainline driver (Jetson Orin): in1_label, millivolts and milliamperes by channel."""
    rails: Rails = {}
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        if read_text(folder / "name") != "ina3221":
            continue
        for channel in (1, 2, 3):
            volts, amperes = folder / f"in{channel}_input", folder / f"curr{channel}_input"
            label = read_text(folder / f"in{channel}_label")
            if label and read_number(volts) is not None and read_number(amperes) is not None:
                rails[label] = _product(volts, amperes, 1e-6)
    return _board("INA3221", rails)


def _ina3221_iio(root: Path, _remarks: list[str]) -> Meter | None:
    """The older driver of L4T (Jetson Nano, Xavier): rail_name_0 and milliwatts by channel."""
    rails: Rails = {}
    for path in sorted((root / "sys/bus/i2c/drivers/ina3221x").glob("*/iio:device*/rail_name_*")):
        power = path.with_name(f"in_power{path.name.removeprefix('rail_name_')}_input")
        if read_number(power) is not None:
            rails[read_text(path)] = partial(_milliwatts, power)
    return _board("INA3221", rails)


def _battery(root: Path, remarks: list[str]) -> Meter | None:
    """A battery that is being emptied, by the machine and not by a mouse."""
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        if read_text(folder / "type") != "Battery" or read_text(folder / "scope") == "Device":
            continue
        if (status := read_text(folder / "status")) != "Discharging":
            remarks.append(f"battery {folder.name} is {status.lower()}; unplug it to measure")
        elif _battery_watts(folder):
            return _gauge(f"battery {folder.name}", partial(_battery_watts, folder))
        else:
            remarks.append(f"battery {folder.name} does not tell its power")
    return None


def _battery_watts(folder: Path) -> float:
    """From µW, or µA and µV; drivers disagree on the sign of discharging."""
    if (power := read_number(folder / "power_now")) is not None:
        return math.fabs(1e-6 * power)
    return math.fabs(_product(folder / "current_now", folder / "voltage_now", 1e-12)())


# --- without a meter ------------------------------------------------------------------------------

ESTIMATED_FACTOR = 2.5
"""By how much an estimate may be wrong, either way."""


def estimate_power(machine: str, threads: int) -> Power:
    """Watts of busy cores: 5 each, or 1 each on Arm, within the factor above.

    The first is a desktop or server core near its base clock, the second a Cortex-A72 to A78.
    """
    arm = re.match(r"aarch64|arm", machine) is not None
    watts = (1.0 if arm else 5.0) * threads
    return Power(watts, watts * (ESTIMATED_FACTOR - 1 / ESTIMATED_FACTOR) / 2)
