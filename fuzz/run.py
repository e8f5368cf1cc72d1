"""Corrupt inputs of parsers at random, many times, and count what happens.

python fuzz/run.py --cases 10000000                        # all parsers, in turn
python fuzz/run.py --target journal --cases 1000000        # one of them (targets.py)
python fuzz/run.py --cases 200000 --keep fuzz/corpus       # keep an input for every answer
NUMBA_DISABLE_JIT=1 python fuzz/run.py --target kernel --cases 50000  # a stray index raises
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kept
from mutations import ACCEPTED
from targets import SLOW, Target, targets

TURN = 20_000  # cases of one parser before it is the next one's turn, fewer of slow ones


@dataclass(slots=True)
class Tally:
    """What happened to one parser so far."""

    cases: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    grown_kib: int = 0  # growth of the process's peak memory in its turns
    kept: dict[str, Any] = field(default_factory=dict)  # an input for every answer

    def turn(self, target: Target, count: int, dice: random.Random) -> None:
        """Run N more cases."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        clock, corrupt, says = time.thread_time, target.corrupt, target.says
        for _ in range(count):
            corrupted, begun = corrupt(dice), clock()
            said = says(corrupted)
            self.slowest_s = max(self.slowest_s, clock() - begun)
            self.accepted += said == ACCEPTED
            self.kept.setdefault(kept.kind_of(said), corrupted)
        self.cases += count
        self.grown_kib += resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def main() -> None:
    """Run the cases; any exception but the parser's own, or a warning, ends the run."""
    known = targets()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=["all", *known], default="all")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for inputs worth replaying")
    parser.add_argument("--out", type=Path, help="a file for the table, written after every turn")
    args = parser.parse_args()
    chosen = {name: known[name]() for name in known if args.target in ("all", name)}
    warnings.simplefilter("error")
    for name, target in chosen.items():  # loading and compiling at first use is no growth
        Tally().turn(target, 100, random.Random(f"{name} warm"))
    tallies = {name: Tally() for name in chosen}
    run_cases(chosen, tallies, args)
    if args.keep:
        for name, tally in tallies.items():
            kept.write(args.keep, name, chosen[name], tally.kept)
    print(table(tallies))


def run_cases(
    chosen: Mapping[str, Target], tallies: Mapping[str, Tally], args: argparse.Namespace
) -> None:
    """All cases, the parsers in turns."""
    done, seed = 0, args.seed
    while done < args.cases:
        for name, target in chosen.items():
            count = min(TURN // SLOW.get(name, 1), args.cases - done)
            tallies[name].turn(target, count, random.Random(f"{name} {seed}"))
            done += count
        seed += 1
        print(f"{done} cases, seeds {args.seed} to {seed - 1}", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(table(tallies) + "\n")


def table(tallies: Mapping[str, Tally]) -> str:
    """One line a parser, and all of them together."""
    rows = [
        f"| {name} | {t.cases:,} | {t.accepted:,} | {len(t.kept)} | {1e3 * t.slowest_s:.0f} | "
        f"{t.grown_kib / 1024:.1f} |"
        for name, t in tallies.items()
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    every = tallies.values()
    total = (
        f"| all | {sum(t.cases for t in every):,} | {sum(t.accepted for t in every):,} | "
        f"{sum(len(t.kept) for t in every)} | {1e3 * max(t.slowest_s for t in every):.0f} | "
        f"{sum(t.grown_kib for t in every) / 1024:.1f} of {peak:.0f} |"
    )
    head = "| parser | cases | accepted | different answers | slowest, ms | memory grew, MiB |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows, total])


if __name__ == "__main__":
    main()
