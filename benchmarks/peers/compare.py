"""The simulators side by side on W1, each peer in its own environment, one contestant at a time.

A pass runs every contestant once, each in a fresh process: the bare loop and our simulator of
benchmarks/simulator.py, then the peers that were given an interpreter. Every other pass goes in
reverse order, so that a drift of the machine's speed cancels. Left out are each run's first round
and rounds during which the rest of the machine took more than `--quiet` cores. Printed are the
median seconds per round, the ratio to the bare loop, CPU seconds per round, and the peak memory of
the process tree (proportional set size: pages that processes share count once).

    python benchmarks/peers/compare.py --flower FLOWER_ENV/bin/python --pfl PFL_ENV/bin/python

With `--out FILE` every run is appended to a JSON-lines file, and the table covers all of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BARE = "bare loop"
OWN: dict[str, tuple[str, ...]] = {
    "anycostfl, FedAvg": ("run.method=fedavg",),
    "anycostfl, AnycostFL, widths sqrt": (),
    "anycostfl, AnycostFL, widths fast": ("model.widths=fast",),
}


def own_rounds(name: str) -> Iterator[float]:
    """Seconds per round of one of our own contestants."""
    sys.path.insert(0, str(HERE.parent))
    import simulator  # noqa: PLC0415 - only the process that measures needs torch
    from anycostfl.config import load_preset  # noqa: PLC0415
    from anycostfl.experiment import load_data  # noqa: PLC0415

    if name == BARE:
        return simulator.bare_rounds(load_data(load_preset("fmnist-iid")))
    return simulator.simulated_rounds(*OWN[name])


def commands(flower: str | None, pfl: str | None) -> dict[str, list[str]]:
    """How to start each contestant."""
    this = str(Path(__file__).resolve())
    found = {name: [sys.executable, this, "--own", name] for name in (BARE, *OWN)}
    if flower:
        script = [flower, str(HERE / "flower_w1.py")]
        found["Flower, 2 actors, plain model"] = script
        found["Flower, 2 actors, our kernels"] = [*script, "--kernels", "ours"]
    if pfl:
        script = [str(HERE / "pfl_w1.py")]
        launcher = [pfl, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        found["pfl, 1 process, plain model"] = [pfl, *script]
        found["pfl, 2 processes, our kernels"] = [*launcher, *script, "--kernels", "ours"]
    return found


def descendants(root: int) -> list[int]:
    """The process and everything it started, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    tree = [root]
    for process in tree:  # grows while we walk it
        tree.extend(children.get(process, []))
    return tree


def proportional_megabytes(process: int) -> float:
    """Memory of a process, shared pages divided among the processes that share them."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def watch_memory(root: int, stop: threading.Event, peak: dict[str, float]) -> None:
    """Note the tree's largest memory and number of processes once a second."""
    while not stop.wait(1.0):
        tree = descendants(root)
        total = sum(map(proportional_megabytes, tree))
        peak["megabytes"] = max(peak["megabytes"], total)
        peak["processes"] = max(peak["processes"], len(tree))


def cpu_seconds(root: int) -> tuple[float, float]:
    """Seconds of CPU so far: of the tree, and of everything on the machine."""
    ticks = 0
    for process in descendants(root):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # its own and its ended children's
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    hertz = os.sysconf("SC_CLK_TCK")
    return ticks / hertz, (user + nice + system + irq + softirq + steal) / hertz


def run(name: str, command: list[str], rounds: int) -> dict[str, Any]:
    """Run one contestant; its rounds as (seconds, its CPU seconds, others' CPU seconds), memory."""
    peak = {"megabytes": 0.0, "processes": 0.0}
    stop, seen = threading.Event(), []
    process = subprocess.Popen(  # noqa: S603 - the interpreters the caller named
        [*command, "--rounds", str(rounds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    threading.Thread(target=watch_memory, args=(process.pid, stop, peak), daemon=True).start()
    before = cpu_seconds(process.pid)
    for line in process.stdout or ():
        if line.startswith("round "):
            now = cpu_seconds(process.pid)
            took, own = float(line.split()[2]), now[0] - before[0]
            others = now[1] - before[1] - own
            seen.append((took, own, others))
            before = now
            print(f"{name:34} {took:6.2f} s, CPU {own:6.2f} s, others {others:5.2f} s", flush=True)
    failed = process.wait() != 0 or len(seen) != rounds
    stop.set()
    return {"name": name, "failed": failed, "rounds": seen, **peak}


def row(runs: list[dict[str, Any]], quiet: float, bare: float) -> tuple[list[str], float]:
    """A contestant's cells of the table, and its median; NaN if no round can be used."""
    good = [r for r in runs if not r["failed"]]
    later = [taken for r in good for taken in r["rounds"][1:]]
    kept = [taken for taken in later if taken[2] <= quiet * taken[0]]
    if not kept:
        return [f"no quiet round of {len(later)}, {len(runs) - len(good)} runs failed"], math.nan
    seconds = [taken[0] for taken in kept]
    median = statistics.median(seconds)
    cells = [
        f"{median:.2f}",
        f"{min(seconds):.2f}–{max(seconds):.2f}",
        f"{len(kept)} of {len(later)}",
        f"{median / bare:.2f}" if bare else "1",
        f"{statistics.median(taken[1] for taken in kept):.2f}",
        f"{min(r['rounds'][0][0] for r in good):.1f}",
        f"{max(r['megabytes'] for r in good):.0f} in {max(r['processes'] for r in good):.0f}",
    ]
    return cells, median


def table(records: list[dict[str, Any]], quiet: float) -> str:
    """A Markdown table over all runs that did not fail."""
    lines = [
        "| | s/round | range | rounds | ratio | CPU s/round | first round | peak MB, processes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    bare = 0.0
    for name in dict.fromkeys([BARE, *(record["name"] for record in records)]):
        cells, median = row([r for r in records if r["name"] == name], quiet, bare)
        lines.append(f"| {' | '.join([name, *cells])} |")
        bare = bare or median
    return "\n".join(lines)


def compare(arguments: argparse.Namespace) -> None:
    """Run the passes, keep the records, print the table."""
    records: list[dict[str, Any]] = []
    if arguments.out and arguments.out.exists():
        records = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    order = list(commands(arguments.flower, arguments.pfl).items())
    for _ in range(arguments.passes):
        for name, command in order[:: -1 if arguments.reverse else 1]:
            records.append(run(name, command, arguments.rounds))
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
        arguments.reverse = not arguments.reverse
    print(table(records, arguments.quiet))


def main() -> None:
    """Compare all, or run one of our own contestants for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flower", help="interpreter of Flower's environment")
    parser.add_argument("--pfl", help="interpreter of pfl's environment")
    parser.add_argument("--rounds", type=int, default=4, help="of which the first is left out")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--reverse", action="store_true", help="begin with the last contestant")
    parser.add_argument("--quiet", type=float, default=0.2, help="cores others may take in a round")
    parser.add_argument("--out", type=Path, help="JSON-lines file to append the runs to")
    parser.add_argument("--own", choices=(BARE, *OWN), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.own:
        compare(arguments)
        return
    seconds = own_rounds(arguments.own)
    for number in range(1, arguments.rounds + 1):
        print(f"round {number} {next(seconds):.4f}", flush=True)


if __name__ == "__main__":
    main()
