"""How close is the simulator to a bare loop written by an expert, on workload W1?

W1: Fashion-MNIST, 60 devices × 1000 samples IID, 15 a round, McMahan CNN, SGD lr .01, batch 32, one
local epoch. The bare loop keeps two processes with one thread each, all data in one tensor, a
resident channels_last model, weights in shared memory, and sums of updates instead of updates;
a process that is idle takes the next device. It plans nothing, encodes nothing and records nothing.
Rounds of the bare loop and of the simulator alternate in one run, without evaluation; the median is
reported, the first round left out.

    python benchmarks/simulator.py [--rounds 4] [--growth]

`--growth` instead measures peak memory for fleets of 60 to 10,000 devices and seconds for cohorts
of 5 to 60.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

import torch
import torch.nn.functional as F
from torch import Tensor

from anycostfl import models
from anycostfl.config import load_preset
from anycostfl.data.samples import Dataset
from anycostfl.experiment import load_data
from anycostfl.simulate import simulate

WORKERS, COHORT, SAMPLES, BATCH, RATE = 2, 15, 1000, 32, 0.01


def bare_worker(
    pipe: Connection, images: Tensor, labels: Tensor, weights: list[Tensor], total: list[Tensor]
) -> None:
    """Train each device that the pipe names; add its update to a shared sum."""
    torch.set_num_threads(1)
    module = models.load("cnn").build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own = list(module.parameters())
    with contextlib.suppress(EOFError):  # the benchmark is over
        while True:
            first = pipe.recv() * SAMPLES
            with torch.no_grad():
                for parameter, weight in zip(own, weights, strict=True):
                    parameter.copy_(weight)
            order = torch.randperm(SAMPLES) + first
            for start in range(0, SAMPLES, BATCH):
                chosen = order[start : start + BATCH]
                loss = F.cross_entropy(module(images[chosen]), labels[chosen])
                gradients = torch.autograd.grad(loss, own)
                with torch.no_grad():
                    torch._foreach_add_(own, gradients, alpha=-RATE)
            with torch.no_grad():
                for buffer, parameter, weight in zip(total, own, weights, strict=True):
                    buffer.add_(weight - parameter)
            pipe.send(True)


def shared(tensor: Tensor) -> Tensor:
    """The tensor in memory that other processes see."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def bare_rounds(dataset: Dataset) -> Iterator[float]:
    """Seconds per round of the bare loop, forever."""
    weights = [shared(p.detach().clone()) for p in models.load("cnn").build().parameters()]
    images, labels = shared(dataset.train.inputs), shared(dataset.train.targets)
    context = multiprocessing.get_context("forkserver")
    pipes, sums = [], []
    for _ in range(WORKERS):
        mine, theirs = context.Pipe()
        total = [shared(torch.zeros_like(w)) for w in weights]
        context.Process(
            target=bare_worker, args=(theirs, images, labels, weights, total), daemon=True
        ).start()
        pipes.append(mine)
        sums.append(total)
    while True:
        start = time.perf_counter()
        waiting: list[int] = torch.randperm(60)[:COHORT].tolist()
        busy: list[Connection] = []
        idle = list(pipes)
        while waiting or busy:
            while waiting and idle:  # an idle process takes the next device
                busy.append(idle.pop())
                busy[-1].send(waiting.pop())
            for pipe in [p for p in wait(busy) if isinstance(p, Connection)]:
                pipe.recv()
                busy.remove(pipe)
                idle.append(pipe)
        for index, weight in enumerate(weights):
            weight.sub_(sum(total[index] for total in sums) / COHORT)
            for total in sums:
                total[index].zero_()
        yield time.perf_counter() - start


def simulated_rounds(*overrides: str, workers: int = WORKERS) -> Iterator[float]:
    """Seconds per round of the simulator."""
    common = ("run.rounds=100000", "run.evaluate_every=100000", "training.precision=fp32")
    rounds = simulate(load_preset("fmnist-iid", [*common, *overrides]), workers=workers)
    while True:
        start = time.perf_counter()
        next(rounds)
        yield time.perf_counter() - start


def side_by_side(rounds: int) -> None:
    """Alternate rounds of all contestants; print medians and ratios."""
    dataset = load_data(load_preset("fmnist-iid"))
    contestants: dict[str, Iterator[float]] = {
        "bare loop": bare_rounds(dataset),
        "simulator, FedAvg": simulated_rounds("run.method=fedavg"),
        "simulator, AnycostFL, widths sqrt": simulated_rounds("model.widths=sqrt"),
        "simulator, AnycostFL, widths fast": simulated_rounds(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, taken in contestants.items():
            took = next(taken)
            if number:  # the first round pays for processes and compilation
                seconds[name].append(took)
            print(f"round {number} {name:36} {took:7.2f} s", flush=True)
    bare = statistics.median(seconds["bare loop"])
    for name, seen in seconds.items():
        median = statistics.median(seen)
        print(f"{name:36} {median:7.2f} s/round  ratio to the bare loop {median / bare:.3f}")


def peak_megabytes(devices: int) -> float:
    """Peak memory of a process that simulates three rounds of a fleet of this size."""
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); from simulator import small_fleet; "
        f"small_fleet({devices}, 15)"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


def small_fleet(devices: int, cohort: int) -> None:
    """Three rounds in this process; prints seconds per round and peak megabytes."""
    overrides = (f"fleet.devices={devices}", f"fleet.cohort={cohort}")
    seconds = simulated_rounds(*overrides, workers=1)
    times = [next(seconds) for _ in range(3)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{statistics.median(times[1:]):.3f} {peak:.1f}")


def growth() -> None:
    """Print peak memory over fleet size, and time over cohort size at equal samples."""
    for devices in (60, 600, 6000, 10000):
        print(f"fleet of {devices:6d}: peak {peak_megabytes(devices):8.1f} MB", flush=True)
    for cohort in (5, 10, 20, 40, 60):
        seconds = simulated_rounds("fleet.devices=600", f"fleet.cohort={cohort}", workers=1)
        times = [next(seconds) for _ in range(4)]
        median = statistics.median(times[1:])
        print(f"cohort of {cohort:4d}: {median:6.2f} s/round, {median / cohort * 1e3:6.1f} ms each")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--growth", action="store_true")
    arguments = parser.parse_args()
    if arguments.growth:
        growth()
    else:
        side_by_side(arguments.rounds)


if __name__ == "__main__":
    main()
