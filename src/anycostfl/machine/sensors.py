"""The machine's name, clock and energy meters, as Linux reports them.

Every reader takes the root of the file system, so tests can use a recorded tree. Files and units
follow the kernel's documentation (cpufreq in kHz, devfreq in Hz, RAPL in µJ, INA3221 in mV and mA
or mW, batteries in µV, µA and µW). RAPL counts joules and wraps at `max_energy_range_uj`; the
others report watts, which a thread samples and averages.
"""

from __future__ import annotations

import math
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anycostfl.compiled import compiled

ROOT = Path("/")
GPU_NAMES = re.compile(r"gpu|gp10b|gv11b|ga10b|gb10b")


@dataclass(frozen=True, slots=True)
class Clock:
    """Range and current value of a clock, and where they were read."""

    min_hz: float
    max_hz: float
    now_hz: float
    source: str

    @property
    def is_live(self) -> bool:
        """Whether the source reports the frequency of the moment."""
        return self.source.startswith(("cpufreq", "devfreq"))


def fixed_clock(hertz: float, source: str) -> Clock:
    """A clock of which only one frequency is known."""
    return Clock(hertz, hertz, hertz, source)


def read_text(path: Path) -> str:
    """The content of a small file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip(" \n\0")
    except OSError:
        return ""


def read_number(path: Path) -> float | None:
    """The number in a small file; None if it cannot be read."""
    try:
        return float(read_text(path))
    except ValueError:
        return None


def device_name(root: Path = ROOT) -> str:
    """The board's name, else the processor's, else the architecture."""
    if board := read_text(root / "proc/device-tree/model"):
        return board
    found = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo"), re.M)
    return found[1].strip() if found else platform.machine()


def read_clock(root: Path = ROOT) -> Clock:
    """The processor's clock: from cpufreq, else /proc/cpuinfo, else by counting cycles."""
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", read_text(root / "proc/cpuinfo"), re.M)
    megahertz = max(map(float, found), default=0.0)
    named = fixed_clock(1e6 * megahertz, "/proc/cpuinfo") if megahertz else None
    return _cpufreq(root) or named or _count_cycles()


def read_gpu_clock(root: Path = ROOT) -> Clock | None:
    """The clock of an integrated GPU, from devfreq."""
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        low, high, now = (read_number(folder / f"{name}_freq") for name in ("min", "max", "cur"))
        if GPU_NAMES.search(folder.name) and low and high and now:
            return Clock(low, high, now, f"devfreq {folder.name}")
    return None


def _cpufreq(root: Path) -> Clock | None:
    """The fastest core; limits of the scaling governor come before those of the hardware."""
    clocks = []
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        names = ("scaling_min", "scaling_max", "cpuinfo_min", "cpuinfo_max", "scaling_cur")
        numbers = [read_number(folder / f"{name}_freq") for name in names]
        low, high = numbers[0] or numbers[2], numbers[1] or numbers[3]
        now = numbers[4] or high
        if low and high and now:
            clocks.append(Clock(1e3 * low, 1e3 * high, 1e3 * now, "cpufreq"))
    return max(clocks, key=lambda clock: (clock.max_hz, clock.now_hz), default=None)


def cpu_clocks_hz(root: Path = ROOT) -> list[float]:
    """The clock of every core at this moment, where cpufreq says."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    return [1e3 * number for file in files if (number := read_number(file)) is not None]


ITERATIONS, CYCLES_PER_ITERATION = 4_000_000, 6
"""Xorshift: three shifts and three exclusive-ors, each depending on the one before.

On Arm a shift and an exclusive-or are one instruction of two cycles.
"""


@compiled
def _xorshift(iterations: int, x: np.uint64) -> np.uint64:
    for _ in range(iterations):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
    return x


def _count_cycles() -> Clock:
    """Time a chain of dependent operations, which no processor can reorder."""
    _xorshift(1, np.uint64(1))  # compiles
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        _xorshift(ITERATIONS, np.uint64(88172645463325252))
        seconds.append(time.perf_counter() - start)
    hertz = CYCLES_PER_ITERATION * ITERATIONS / min(seconds)
    return fixed_clock(hertz, "counted with a chain of dependent operations")


# --- meters ---------------------------------------------------------------------------------------

BOARD_RAILS = ("VDD_IN", "POM_5V_IN", "5V_IN")  # names of the rail that feeds all others
SAMPLE_EVERY_S = 0.02
ESTIMATED_FACTOR = 2.5  # by which an estimate may be off, either way

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
    meter: str  # its name; empty for an estimate
    problems: tuple[str, ...] = ()  # why there is no better measurement

    @property
    def source(self) -> str:
        """Where the watts come from and how certain they are."""
        if self.meter:
            return f"energy: {self.meter}, load minus idle, ± {self.spread_w:.2g} W"
        return (
            f"energy: {self.watts:g} W assumed for the busy cores, "
            f"accurate within a factor of {ESTIMATED_FACTOR:g}: {'; '.join(self.problems)}"
        )


def find_meter(
    root: Path = ROOT, *, every_s: float = SAMPLE_EVERY_S
) -> tuple[Meter | None, tuple[str, ...]]:
    """The most accurate meter, if there is one, and why others could not be used.

    Sensors of watts are read every so many seconds.
    """
    problems: list[str] = []
    for find in (_ina3221, _rapl, _battery):
        if meter := find(root, problems, every_s):
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


def _rapl(root: Path, problems: list[str], _every_s: float) -> Meter | None:
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


def _sampled(name: str, watts: Watts, every_s: float) -> Meter:
    """A meter that samples a sensor of watts in a thread."""

    def start() -> Watts:
        samples, done = [watts()], threading.Event()

        def sample() -> None:
            while not done.wait(every_s):
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


def _ina3221(root: Path, _problems: list[str], every_s: float) -> Meter | None:
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
    return _sampled(name, lambda: sum(one() for one in watts), every_s) if watts else None


def _battery(root: Path, problems: list[str], every_s: float) -> Meter | None:
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
        elif not watts():
            problems.append(f"battery {folder.name} does not report its power")
        else:
            return _sampled(f"battery {folder.name}", watts, every_s)
    return None


# --- without a meter ------------------------------------------------------------------------------


def estimate_power(machine: str, threads: int, problems: tuple[str, ...]) -> Power:
    """Watts of busy cores: 5 each (a PC's at its base clock), 1 each on Arm (Cortex-A72 to A78)."""
    watts = (1.0 if machine.startswith(("aarch64", "arm")) else 5.0) * threads
    spread_w = watts * (ESTIMATED_FACTOR - 1 / ESTIMATED_FACTOR) / 2
    return Power(watts, spread_w, "", problems)
