"""Setting the processor's clock, where the system lets the owner (cpufreq), and restoring it.

Frequencies are in kHz, as the kernel has them. The lowest and the highest allowed clock are set to
the same value, so that the governor has no choice left. A process that is killed restores nothing;
the next one that starts and ends does not know what was there before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anycostfl.machine.sensors import ROOT, Clock, read_number, read_text

LIMITS = ("scaling_min_freq", "scaling_max_freq")


def policies(root: Path = ROOT) -> list[Path]:
    """The folders of the cores' clocks."""
    return sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))


def settable_clock(root: Path = ROOT) -> Clock | None:
    """The range in which this process may set the clock; None where it may not."""
    folders = policies(root)
    files = [folder / name for folder in folders for name in LIMITS]
    if not files or not all(os.access(file, os.W_OK) for file in files):
        return None
    ends = [[read_number(f / f"cpuinfo_{end}_freq") for end in ("min", "max")] for f in folders]
    known = [(low, high) for low, high in ends if low and high]
    if len(known) < len(folders):
        return None
    low, high = max(low for low, _ in known), min(high for _, high in known)
    return Clock(1e3 * low, 1e3 * high, 1e3 * high, "cpufreq") if low < high else None


def set_clock(hertz: float, root: Path = ROOT) -> None:
    """Let every core run at this clock, or at the next higher one that it has."""
    for folder in policies(root):
        steps = sorted(map(float, read_text(folder / "scaling_available_frequencies").split()))
        wanted = next((step for step in steps if step >= hertz / 1e3 - 1), hertz / 1e3)
        _write(folder, wanted, wanted)


def _write(folder: Path, low: float, high: float) -> None:
    """Both limits; in the order that never has the lower one above the upper one."""
    minimum, maximum = (folder / name for name in LIMITS)
    rising = high >= (read_number(maximum) or 0.0)
    values = ((maximum, high), (minimum, low)) if rising else ((minimum, low), (maximum, high))
    for file, value in values:
        file.write_text(f"{value:.0f}")


@contextmanager
def restored_clock(root: Path = ROOT) -> Iterator[None]:
    """Restore the limits of every core at the end."""
    before = {folder: [read_number(folder / name) for name in LIMITS] for folder in policies(root)}
    try:
        yield
    finally:
        for folder, (low, high) in before.items():
            if low and high:
                with suppress(OSError):
                    _write(folder, low, high)
