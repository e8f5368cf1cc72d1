"""Control groups: a share of a processor and a limit of memory for every device."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

PERIOD_US = 50_000  # short, so that a share of a processor is one over a second, too
ROOT = Path("/sys/fs/cgroup")
NAME = "acfltb"


def is_unified() -> bool:
    """Whether control groups are of version 2."""
    return (ROOT / "cgroup.controllers").is_file()


def folders(device: int) -> dict[str, Path]:
    """Where a device's limits are, by controller."""
    name = f"{NAME}-{device}"
    if is_unified():
        return dict.fromkeys(("cpu", "memory"), ROOT / name)
    return {controller: ROOT / controller / name for controller in ("cpu", "memory")}


def make(device: int) -> list[Path]:
    """A device's groups; the files to which a process that joins writes its number."""
    if is_unified():
        with suppress(OSError):  # they may be on already
            (ROOT / "cgroup.subtree_control").write_text("+cpu +memory")
    for folder in folders(device).values():
        folder.mkdir(exist_ok=True)
    return sorted({folder / "cgroup.procs" for folder in folders(device).values()})


def set_cpu(device: int, share: float) -> None:
    """Let a device use this share of one processor."""
    folder, quota = folders(device)["cpu"], int(share * PERIOD_US)
    if is_unified():
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


def set_memory(device: int, limit_bytes: int) -> None:
    """Kill a device that holds more."""
    name = "memory.max" if is_unified() else "memory.limit_in_bytes"
    (folders(device)["memory"] / name).write_text(str(limit_bytes))


def kills(device: int) -> int:
    """How often a process of the device was killed for memory."""
    folder = folders(device)["memory"]
    file = folder / ("memory.events" if is_unified() else "memory.oom_control")
    with suppress(OSError):
        for line in file.read_text().splitlines():
            word, _, number = line.partition(" ")
            if word == "oom_kill":
                return int(number)
    return 0


def remove(device: int) -> None:
    """The device's groups, once its processes are gone."""
    for folder in set(folders(device).values()):
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:  # a process is still going
                time.sleep(0.1)
