"""What Winograd's convolutions save: one local epoch with and without, in turns, one thread.

    python benchmarks/winograd.py [--repeats 5]

Prints seconds per sample, the ratio, and time(α)/time(1)/α both ways, by model and width.
"""

from __future__ import annotations

import argparse
import time

import torch

from anycostfl import models, tasks
from anycostfl.data.samples import Samples
from anycostfl.device import Training, reuse_memory, train
from anycostfl.shrink import ElasticModel

ALPHAS = (1.0, 0.75, 0.5, 0.25)
BATCHES = {"vgg9": (64, 192), "resnet18": (32, 64)}  # batch size, samples


def epoch_s(net: ElasticModel, name: str, alpha: float, *, winograd: bool) -> float:
    """Seconds per sample of one epoch on made-up data."""
    batch, samples = BATCHES[name]
    made_up = Samples(models.load(name).example(samples), torch.randint(10, (samples,)))
    module, task = net.shrink(alpha).module, tasks.load("cifar10")
    start = time.perf_counter()
    train(module, made_up, task, Training(0.01, batch, winograd=winograd), seed=0)
    return (time.perf_counter() - start) / samples


def main() -> None:
    """Alternate both ways and all widths; report the least of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    reuse_memory()
    for name in BATCHES:
        spec = models.load(name)
        net = ElasticModel(spec.build(), spec.example(2), rule="fast")
        least: dict[tuple[float, bool], float] = {}
        for number in range(repeats + 1):
            for alpha in ALPHAS:
                for way in (False, True):
                    took = epoch_s(net, name, alpha, winograd=way)
                    if number:  # the first compiles
                        least[alpha, way] = min(took, least.get((alpha, way), took))
        for alpha in ALPHAS:
            plain, fast = least[alpha, False], least[alpha, True]
            shares = [least[alpha, way] / least[1.0, way] / alpha for way in (False, True)]
            print(
                f"{name:9} α {alpha:4} {1e3 * plain:6.2f} {1e3 * fast:6.2f} ms, "
                f"{plain / fast:.2f} × as fast; time(α)/time(1)/α {shares[0]:.2f}, {shares[1]:.2f}"
            )


if __name__ == "__main__":
    main()
