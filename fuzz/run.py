"""Spoil inputs of parsers at random, many times, and count what happens.

python fuzz/run.py --cases 10000000                        # all parsers, in turns
python fuzz/run.py --target journal --cases 1000000        # one of them, see targets.py
NUMBA_DISABLE_JIT=1 python fuzz/run.py --target kernel --cases 50000  # a stray index raises
"""

from __future__ import annotations

import argparse
import random
import resource
import time
import warnings

from targets import SLOW, Case, targets

TURN = 20_000  # cases of one parser before it is the next one's turn; of slow ones a tenth


def main() -> None:
    """Run the cases; any exception but the parser's own, or a warning, ends the run."""
    known = targets()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=["all", *known], default="all")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cases = {name: known[name]() for name in known if args.target in ("all", name)}
    warnings.simplefilter("error")
    for name, case in cases.items():
        turn(case, name, 100, -1)  # what is loaded or compiled at first use is no growth
    print("| parser | seed | cases | taken | slowest, ms | memory, KiB | all cases |")
    print("|---|---|---|---|---|---|---|", flush=True)
    done, seed = 0, args.seed
    while done < args.cases:
        for name, case in cases.items():
            count = min(TURN // 10 if name in SLOW else TURN, args.cases - done)
            done += count
            if count:
                print(f"| {name} | {seed} | {count} | {turn(case, name, count, seed)} | {done} |")
        print(end="", flush=True)
        seed += 1


def turn(case: Case, name: str, count: int, seed: int) -> str:
    """So many cases by one seed: how many were taken, the slowest, how far memory rose."""
    dice = random.Random(f"{name} {seed}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken, slowest = 0, 0.0
    for _ in range(count):
        begun = time.thread_time()
        taken += case(dice)[1]
        slowest = max(slowest, time.thread_time() - begun)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    return f"{taken} | {1e3 * slowest:.1f} | {grown}"


if __name__ == "__main__":
    main()
