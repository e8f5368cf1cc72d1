"""Clock jumps while a fleet trains: those of devices and of the server, by minutes and by days.

The time of day of a process is shifted by a small library in front of the C library's own
(shifted_clock.c, so this drill needs a C compiler). Monotonic clocks are not affected, as on a
real machine.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drills.common import Order, Report
from drills.fleet import DEVICES, fleet

MINUTE, DAY = 60, 86_400
# Offsets in seconds, one after the other. A device whose clock is before its certificates became
# valid cannot connect; they are valid from an hour before they were made.
JUMPS = (7 * MINUTE, -40 * MINUTE, 20 * DAY, -7 * MINUTE, 0, 0)
APART = 2  # rounds between two jumps


def drill(order: Order) -> Report:
    """Set the clock of one device after another, then the server's, all in one run."""
    report = Report("clock jumps of devices and server")
    compiler = shutil.which("cc")
    if compiler is None:
        report.note = "no C compiler, nothing injected"
        return report
    library = order.folder / "shifted_clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run(  # noqa: S603 - the compiler of this machine
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    clocks = [order.folder / f"clock-{i}" for i in range(DEVICES + 1)]
    for clock in clocks:
        set_clock(clock, 0)
    with fleet(order.folder, rounds=APART * (order.times + 1)) as there:
        with shifted(library, clocks[DEVICES]):
            there.serve("--deadline-s", "30", "--wait-for", "1")
        for device in range(DEVICES):
            with shifted(library, clocks[device]):
                there.join(device)
        for number in range(order.times):
            there.wait_for_rounds(APART * (number + 1))
            set_clock(clocks[number % (DEVICES + 1)], JUMPS[number % len(JUMPS)])
            report.injected += 1
        there.check(report, exact=False)
    return report


def set_clock(path: Path, seconds: int) -> None:
    """Set the offset of a clock, for all processes that use it."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("=q", seconds))


@contextmanager
def shifted(library: Path, clock: Path) -> Iterator[None]:
    """Processes that are started here use another clock."""
    os.environ |= {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(clock)}
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"], os.environ["SHIFTED_CLOCK"]
