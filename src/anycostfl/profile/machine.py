"""What Linux says about the machine: its name and its clock.

Every reader takes the root of the file system, so that it can be tested on a recorded tree.
Files and units are those of the kernel's documentation (cpufreq in kHz, devfreq in Hz).
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
    """The range of a clock, what it is just now, and who says so."""

    min_hz: float
    max_hz: float
    now_hz: float
    source: str


def read_text(path: Path) -> str:
    """The content of a small file, or nothing if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip(" \n\0")
    except OSError:
        return ""


def read_number(path: Path) -> float | None:
    """The number in a small file, or None if there is none."""
    try:
        return float(read_text(path))
    except ValueError:
        return None


def device_name(root: Path = ROOT) -> str:
    """The board's name, else the processor's, else its architecture."""
    if board := read_text(root / "proc/device-tree/model"):
        return board
    found = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo"), re.M)
    return found[1].strip() if found else platform.machine()


def read_clock(root: Path = ROOT) -> Clock:
    """The processor's clock: cpufreq, else /proc/cpuinfo, else counted."""
    return _cpufreq(root) or _cpuinfo(root) or _counted()


def read_gpu_clock(root: Path = ROOT) -> Clock | None:
    """The clock of an integrated GPU, as devfreq tells it."""
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        low, high, now = (read_number(folder / f"{name}_freq") for name in ("min", "max", "cur"))
        if GPU_NAMES.search(folder.name) and low and high and now:
            return Clock(low, high, now, f"devfreq {folder.name}")
    return None


def _cpufreq(root: Path) -> Clock | None:
    """The fastest core's; scaling limits say what may be used, hardware limits what exists."""
    clocks = []
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        low, high = (_limit_khz(folder, end) for end in ("min", "max"))
        now = read_number(folder / "scaling_cur_freq") or high
        if low and high and now:
            clocks.append(Clock(1e3 * low, 1e3 * high, 1e3 * now, "cpufreq"))
    return max(clocks, key=lambda clock: (clock.max_hz, clock.now_hz), default=None)


def _limit_khz(folder: Path, end: str) -> float | None:
    scaling = read_number(folder / f"scaling_{end}_freq")
    return scaling or read_number(folder / f"cpuinfo_{end}_freq")


def _cpuinfo(root: Path) -> Clock | None:
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", read_text(root / "proc/cpuinfo"), re.M)
    hertz = 1e6 * max(map(float, found), default=0.0)
    return Clock(hertz, hertz, hertz, "/proc/cpuinfo") if hertz else None


TURNS, CYCLES_PER_TURN = 4_000_000, 6
"""Of xorshift: three shifts and three exclusive-ors, each waiting for the one before.

On Arm a shift and an exclusive-or are one instruction, but one of two cycles.
"""


@compiled
def _spin(turns: int, x: np.uint64) -> np.uint64:
    """Xorshift, so many times."""
    for _ in range(turns):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
    return x


def _counted() -> Clock:
    """Count cycles: a chain of operations that no processor can do out of order."""
    _spin(1, np.uint64(1))  # compiles
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        _spin(TURNS, np.uint64(88172645463325252))
        seconds.append(time.perf_counter() - start)
    hertz = CYCLES_PER_TURN * TURNS / min(seconds)
    return Clock(hertz, hertz, hertz, "counted with a chain of dependent operations")
