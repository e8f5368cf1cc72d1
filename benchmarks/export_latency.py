"""Does inference get faster as the model gets narrower?

Exports the CNN, VGG-9 and ResNet-18 at ten widths to ONNX, as `anycostfl export` does, and runs one
sample on one thread of onnxruntime, all widths of a model in turns, medians of that thread's CPU
time. Prints the latency of each width relative to the full one, and draws it.

    python benchmarks/export_latency.py [--repeats 100] [--plot docs/figures/export-latency.png]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import matplotlib as mpl

from anycostfl import models
from anycostfl.export.formats import write_onnx
from anycostfl.export.widths import measure_latency_ms
from anycostfl.shrink import ElasticModel

mpl.use("agg")
import matplotlib.pyplot as plt

MODELS = ("cnn", "vgg9", "resnet18")
ALPHAS = tuple(i / 10 for i in range(1, 11))


def latencies(model: str, rule: str, repeats: int, folder: Path) -> list[float]:
    """Median milliseconds at every width."""
    spec = models.load(model)
    net = ElasticModel(spec.build(), spec.example(2), rule=rule)
    paths = [folder / f"{model}-{alpha}.onnx" for alpha in ALPHAS]
    for alpha, path in zip(ALPHAS, paths, strict=True):
        write_onnx(net.shrink(alpha).module.eval(), spec.example(2), path, {})
    return measure_latency_ms(paths, spec.example(1), repeats=repeats, clock=time.thread_time)


def draw(found: dict[str, list[float]], path: Path) -> None:
    """One line a model, and where latency would lie if it were proportional to α."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for model, times in found.items():
        ratios = [ms / times[-1] for ms in times]
        axis.plot(ALPHAS, ratios, marker="o", markersize=4, label=models.load(model).summary)
    axis.plot([0, 1], [0, 1], color="0.6", linestyle="--", label="proportional to α")
    axis.set_xlabel("width factor α")
    axis.set_ylabel("latency / latency of the full model")
    axis.set_xlim(0, 1.02)
    axis.set_ylim(0, 1.1)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--rule", default="even")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    print("         α", *(f"{alpha:6.1f}" for alpha in ALPHAS))
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            times = latencies(model, arguments.rule, arguments.repeats, Path(folder))
            found[model] = times
            print(f"{model:>10}", *(f"{ms / times[-1]:6.3f}" for ms in times), flush=True)
    if arguments.plot:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
