"""The machine's name and clock, as Linux reports them.

Every reader takes the root of the file system, so tests can use a recorded tree. Files and units
follow the kernel's documentation (cpufreq in kHz, devfreq in Hz).
"""

from __future__ import annotations

import platform
import re
import time
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
    if clock := _cpufreq(root):
        return clock
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", read_text(root / "proc/cpuinfo"), re.M)
    megahertz = max(map(float, found), default=0.0)
    return fixed_clock(1e6 * megahertz, "/proc/cpuinfo") if megahertz else _count_cycles()


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
        low, high = (
            read_number(folder / f"scaling_{end}_freq")
            or read_number(folder / f"cpuinfo_{end}_freq")
            for end in ("min", "max")
        )
        now = read_number(folder / "scaling_cur_freq") or high
        if low and high and now:
            clocks.append(Clock(1e3 * low, 1e3 * high, 1e3 * now, "cpufreq"))
    return max(clocks, key=lambda clock: (clock.max_hz, clock.now_hz), default=None)


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
