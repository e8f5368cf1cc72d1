"""Inject faults many times and report what was lost: `make drill`, or one drill by its name.

python -m drills                     # all of them
python -m drills simulator disk --times 20 --passes 3
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from drills.common import Order, Report

DRILLS = {  # in this order; how often each injects its fault by default
    "simulator": 20,
    "workers": 5,
    "disk": 20,
    "damage": 10,
    "clock": 6,
    "flower": 6,
    "connections": 6,
    "soak": 200,
    "extraction": 1,
    "hostile": 300,  # seconds
}


def main() -> None:
    """Run the drills and print a table; exit with 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(DRILLS)} [all]")
    parser.add_argument("--times", type=int, help="how often each fault is injected")
    parser.add_argument("--passes", type=int, default=1, help="how often everything is repeated")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.names) - DRILLS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(DRILLS)}")
    print("| fault | times | lost | remark | seconds |\n|---|---|---|---|---|", flush=True)
    lost = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started processes are stopped
    for number in range(args.passes):
        for name in args.names or DRILLS:
            seed = args.seed + 1000 * number
            lost += len(strike(name, args.times or DRILLS[name], seed).lost)
    raise SystemExit(1 if lost else 0)


def strike(name: str, times: int, seed: int) -> Report:
    """Run one drill in a temporary folder and print its line."""
    torch.set_num_threads(1)  # threads do not survive a fork
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"drill-{name}-") as folder:
        drill = importlib.import_module(f"drills.{name}").drill
        try:
            report: Report = drill(Order(times, Path(folder), seed))
        except AssertionError as error:  # waited for in vain
            report = Report(name, lost=[str(error)])
        if report.lost:
            show_logs(Path(folder))
    seconds = time.monotonic() - begun
    words = "; ".join(report.lost) or "nothing"
    cells: Sequence[object] = (report.fault, report.injected, words, report.note, f"{seconds:.0f}")
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return report


def show_logs(folder: Path) -> None:
    """The last lines of every log of a drill."""
    for path in sorted(folder.glob("**/*.log")):
        print(path.name, *path.read_text().splitlines()[-12:], sep="\n  ", file=sys.stderr)


if __name__ == "__main__":
    main()
