"""Peak bytes of a process that trains the testbed's model at one width: `-m testbed.peak ALPHA`."""

from __future__ import annotations

import sys

import anycostfl.flower.device  # noqa: F401 - what a device holds besides
from anycostfl.codec import Upload
from anycostfl.config import load_preset
from anycostfl.device import Job, learn_honestly, return_memory, threads
from anycostfl.experiment import build_experiment, load_data
from anycostfl.machine.usage import memory_bytes, release_memory, reset_peak

SAMPLES, BATCH = 1000, 50  # of a device


def main(alpha: float) -> float:
    """Once to load and compile everything, then measured."""
    config = load_preset("demo", [f"training.batch={BATCH}"])
    experiment = build_experiment(config)
    runtime, blocks = experiment.runtime, experiment.net.blocks()
    samples = load_data(config).train.take(slice(0, SAMPLES))
    job = Job(0, alpha, Upload(0.03, 0, b"", blocks=blocks), 0, 0.05)
    return_memory()
    for width in (0.25, alpha):
        release_memory()
        reset_peak()
        with threads(1):
            runtime.perform(runtime.net.shrink(width), samples, job, learn_honestly)
    return memory_bytes()[1] or 0.0


if __name__ == "__main__":
    sys.stdout.write(f"{main(float(sys.argv[1])):.0f}\n")
