"""Does time fall with α? And what do sorting and cutting cost?

One SGD step (forward, backward, update; batch 32, one thread) of sub-models against the full model,
all widths interleaved in one process, CPU time, median over the repetitions. Also sort + cut of
VGG-9, 1,000 plans of the CNN, and the time to trace every model.

    python benchmarks/shrink.py [--repeats 15] [--bf16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import models
from anycostfl.shrink import ElasticModel

ALPHAS = (1.0, 0.75, 0.5, 0.25)
BATCH = 32
LIMITS = {"vgg9": (1.10, 1.10, 1.10), "cnn": (1.25, 1.25, 1.40)}
"""The most that time(α) / time(1) may exceed α, at .75, .5 and .25."""


def sgd_step(
    module: nn.Module, images: Tensor, labels: Tensor, *, channels_last: bool, bf16: bool
) -> Callable[[], None]:
    """One training step, ready to be timed."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    images = images.contiguous(memory_format=layout)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(module(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def interleaved(steps: list[Callable[[], None]], repeats: int) -> list[float]:
    """Median CPU seconds of each function, run in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats + 2):  # two rounds to warm up
        for step, seen in zip(steps, times, strict=True):
            start = time.process_time()
            step()
            seen.append(time.process_time() - start)
    return [statistics.median(seen[2:]) for seen in times]


def time_by_alpha(name: str, rule: str, repeats: int, *, channels_last: bool, bf16: bool) -> None:
    """Print time(α) / time(1) of one model in one setting."""
    spec = models.load(name)
    net = ElasticModel(spec.build(), spec.example(2), rule=rule)
    net.sort_channels()
    images, labels = spec.example(BATCH), torch.randint(10, (BATCH,))
    subs = [net.shrink(alpha) for alpha in ALPHAS]
    full, *times = interleaved(
        [sgd_step(s.module, images, labels, channels_last=channels_last, bf16=bf16) for s in subs],
        repeats,
    )
    setting = (
        f"{'channels_last' if channels_last else 'contiguous':13} {'bf16' if bf16 else 'fp32'}"
    )
    print(f"{name:5} {rule:5} {setting}  full {full / BATCH * 1e3:6.3f} ms/sample")
    for sub, seconds, limit in zip(subs[1:], times, LIMITS[name], strict=True):
        ratio = seconds / full
        verdict = ("ok" if ratio <= limit * sub.plan.alpha else "MISSED") if rule == "fast" else ""
        print(
            f"    alpha {sub.plan.alpha:4.2f}  flops {sub.plan.flops_ratio:.3f}  time {ratio:.3f}"
            f"  time/alpha {ratio / sub.plan.alpha:.2f} (limit {limit:.2f}) {verdict}"
        )


def sort_and_cut(repeats: int) -> None:
    """Print the CPU time of sorting VGG-9's channels and of cutting a sub-model."""
    spec = models.load("vgg9")
    net = ElasticModel(spec.build(), spec.example(2), rule="fast")
    sorts, cuts = [], []
    for _ in range(repeats + 2):
        with torch.no_grad():
            for parameter in net.module.parameters():  # a new order to find every time
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        start = time.process_time()
        net.sort_channels()
        middle = time.process_time()
        net.shrink(0.5)
        sorts.append(middle - start)
        cuts.append(time.process_time() - middle)
    sort, cut = (statistics.median(seen[2:]) * 1e3 for seen in (sorts, cuts))
    verdict = "ok" if sort + cut < 20 else "MISSED"
    print(f"vgg9  sort {sort:.1f} ms + cut {cut:.1f} ms = {sort + cut:.1f} ms (limit 20) {verdict}")


def plan_times() -> None:
    """Print the CPU time of 1,000 plans of the CNN, once every width has been planned."""
    spec = models.load("cnn")
    alphas = (0.25 + 0.75 * torch.rand(1000)).tolist()
    for rule in ("sqrt", "fast"):
        net = ElasticModel(spec.build(), spec.example(2), rule=rule)
        widths = {tuple(net.plan(alpha).widths.items()) for alpha in alphas}
        start = time.process_time()
        for alpha in alphas:
            net.plan(alpha)
        seconds = time.process_time() - start
        verdict = "ok" if seconds < 0.1 else "MISSED"
        print(f"cnn   {rule:5} 1,000 plans of {len(widths)} widths {seconds:.4f} s {verdict}")


def trace_times() -> None:
    """Print how long each model takes to become elastic."""
    for name in models.names():
        spec = models.load(name)
        module = spec.build()
        start = time.process_time()
        ElasticModel(module, spec.example(2))
        print(f"trace {name:12} {1e3 * (time.process_time() - start):6.0f} ms")


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bf16", action="store_true", help="also bf16 (slow without CPU support)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ElasticModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))  # lazy imports
    trace_times()
    sort_and_cut(arguments.repeats)
    plan_times()
    for name in LIMITS:
        for rule in ("sqrt", "fast"):
            time_by_alpha(name, rule, arguments.repeats, channels_last=False, bf16=False)
            time_by_alpha(name, rule, arguments.repeats, channels_last=True, bf16=False)
            if arguments.bf16:
                time_by_alpha(name, rule, arguments.repeats, channels_last=True, bf16=True)


if __name__ == "__main__":
    main()
