"""What a stretch of work took on this machine: measured, or None; never estimated.

Peak memory is the kernel's own (`VmHWM`), which is reset at the end of every stretch, so that what
happens between two of them counts for the later one. Joules are those that the meter counted while
the work ran, of the whole board or package.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from anycostfl.machine.sensors import ROOT, Meter, cpu_clocks_hz, find_meter, read_number, read_text

SAMPLE_EVERY_S = 0.25  # of a sensor of watts, over a round of seconds
RESET_PEAK = "5"  # to clear_refs
THROTTLED_NOW = 0xF  # bits of a Raspberry Pi's get_throttled; higher ones say "since boot"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a stretch of work took; None is not measured."""

    seconds: float
    joules: float | None = None
    base_bytes: float | None = None  # held when it began
    peak_bytes: float | None = None
    clock_hz: float | None = None
    celsius: float | None = None
    throttled: bool | None = None


def start_usage(root: Path = ROOT) -> Callable[[], Usage]:
    """Begin to measure; what is returned ends it."""
    meter, begin = energy_meter(root), time.perf_counter()
    watts = meter.start() if meter else None
    base, before = memory_bytes(root)[0], throttle_count(root)

    def stop() -> Usage:
        seconds = time.perf_counter() - begin
        peak, clocks = memory_bytes(root)[1], cpu_clocks_hz(root)
        reset_peak(root)
        after = throttle_count(root)
        throttled = is_throttled(root)
        if before is not None and after is not None:
            throttled = after > before
        return Usage(
            seconds=seconds,
            joules=watts() * seconds if watts else None,
            base_bytes=base,
            peak_bytes=peak,
            clock_hz=sum(clocks) / len(clocks) if clocks else None,
            celsius=celsius(root),
            throttled=throttled,
        )

    return stop


@cache
def energy_meter(root: Path = ROOT) -> Meter | None:
    """The meter of this machine, if there is one; looked for once."""
    return find_meter(root, every_s=SAMPLE_EVERY_S)[0]


def has_meter() -> bool:
    """Whether this machine counts joules."""
    return energy_meter() is not None


def memory_bytes(root: Path = ROOT) -> tuple[float | None, float | None]:
    """What this process holds now, and the most since the peak was reset."""
    status = read_text(root / "proc/self/status")
    found = [re.search(rf"^{name}:\s*(\d+) kB", status, re.M) for name in ("VmRSS", "VmHWM")]
    now, peak = (1024.0 * int(one[1]) if one else None for one in found)
    return now, peak


def reset_peak(root: Path = ROOT) -> None:
    """Let the peak begin anew, where the kernel can."""
    with suppress(OSError):
        (root / "proc/self/clear_refs").write_text(RESET_PEAK)


def release_memory() -> None:
    """Give back to the system what earlier work freed (glibc): peaks then say what is used."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def celsius(root: Path = ROOT) -> float | None:
    """The hottest thermal zone."""
    zones = (root / "sys/class/thermal").glob("thermal_zone*/temp")
    found = [number / 1e3 for zone in zones if (number := read_number(zone)) is not None]
    return max(found, default=None)


def throttle_count(root: Path = ROOT) -> float | None:
    """How often cores were throttled since the machine started, where the processor counts it."""
    cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [number for core in cores if (number := read_number(core)) is not None]
    return sum(counts) if counts else None


def is_throttled(root: Path = ROOT) -> bool | None:
    """Whether a Raspberry Pi's firmware throttles at this moment (heat or too little voltage)."""
    try:
        state = int(read_text(root / "sys/devices/platform/soc/soc:firmware/get_throttled"), 16)
    except ValueError:
        return None
    return bool(state & THROTTLED_NOW)
