"""Two hundred rounds in one process: memory and open files stay where they were."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from anycostfl.config import to_toml
from anycostfl.records.run import RunWriter
from anycostfl.runs import journal
from anycostfl.simulate import simulate
from drills.common import Order, Report
from small_runs import small_config

WARM = 0.2  # of the rounds, until caches are full
MOST_MIB = 16.0  # that memory may grow after that


def drill(order: Order) -> Report:
    """Run `order.times` rounds with a real run directory; compare late rounds with early ones."""
    child = os.fork()  # so that nothing the drills did before is measured
    if not child:
        code = 1
        try:
            (order.folder / "result").write_text("\n".join(soak(order)))
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    report = Report("soak, rounds", order.times)
    report.expect(code == 0, "the process")
    if code == 0:
        report.note, *report.lost = (order.folder / "result").read_text().splitlines()
    return report


def soak(order: Order) -> list[str]:
    """A remark on memory and files, then what went wrong."""
    torch.set_num_threads(1)
    config = small_config(
        order.folder, f"run.rounds={order.times}", "run.checkpoint_every=10", "fleet.devices=40"
    )
    writer = RunWriter.create(order.folder / "run", to_toml(config))
    memory, files = [], []
    for result in journal(simulate(config), config, writer):
        if result.record.round % 10 == 9 or result.state.rounds == order.times:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what is free already is no growth
            memory.append(own_mib())
            files.append(len(os.listdir("/proc/self/fd")))
    early = max(1, int(WARM * len(memory)))
    grown = memory[-1] - max(memory[:early])
    found = [f"{grown:+.1f} MiB, {files[-1] - files[0]:+d} files"]
    if grown > MOST_MIB:
        found.append(f"memory grew by {grown:.1f} MiB")
    if files[-1] > files[0]:
        found.append(f"{files[-1] - files[0]} files were left open")
    return found


def own_mib() -> float:
    """What this process holds for itself now, in memory or swapped out; no pages of libraries."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024
