"""Spoil payloads at random, many times, and count what happens.

python fuzz/run.py --cases 1000000 --seed 0 [--codec kernel+]
NUMBA_DISABLE_JIT=1 python -W ignore fuzz/run.py --cases 50000  # a stray index raises
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter

from anycostfl.codec import CODECS
from mutations import spoil, survives, valid_payloads


def main() -> None:
    """Run the cases; any exception but `PayloadError` ends the run with the payload in hex."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codec", choices=CODECS, default="kernel")
    args = parser.parse_args()
    payloads, draw = valid_payloads(args.codec), random.Random(args.seed)
    if not all(survives(payload) for payload in payloads):
        raise SystemExit("a valid payload was refused")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, decoded, slowest, started = Counter[str](), Counter[str](), 0.0, time.monotonic()
    for _ in range(args.cases):
        name, spoilt = spoil(draw.choice(payloads), draw)
        begun = time.perf_counter()
        try:
            good = survives(spoilt)
        except BaseException:
            print(f"seed {args.seed}, {name}: {spoilt.hex()}")
            raise
        slowest = max(slowest, time.perf_counter() - begun)
        (decoded if good else refused)[name] += 1
    seconds = time.monotonic() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    print(f"{args.cases} cases in {seconds:.0f} s, slowest {slowest * 1e3:.1f} ms, +{grown} KiB")
    for name in sorted(refused | decoded):
        print(f"  {name:22} refused {refused[name]:8} decoded {decoded[name]:8}")


if __name__ == "__main__":
    main()
