"""Does a profile made here predict how long a local epoch takes?

Measures this machine as `anycostfl profile` does, writes the profile, then for α = 1, 1/2 and 1/4:
sets the latency budget under which the planner gives exactly that α, simulates a round of such a
fleet, and compares what the planner and the simulator say with the measured time of the same epoch
(widths in turns, lower quartiles, one thread; half of the epochs before the profile is made and
half after it, for the speed of a machine drifts). Fails (exit code 1) if either is off by more than
15 %. Wants a quiet machine, and says so (exit code 2) if others took part of the core; there
`--cpu` takes processor time throughout, which shows at least how good the model is.

    python benchmarks/device_profile.py [--repeats 15] [--models cnn vgg9] [--cpu]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anycostfl import models, profile
from anycostfl.config import Config, load_preset, load_profile
from anycostfl.experiment import resolve
from anycostfl.planning import cost, draw, planner
from anycostfl.profile.speed import elastic_model, timed_epoch
from anycostfl.records.round import DeviceRecord
from anycostfl.simulate import simulate

ALPHAS = (1.0, 0.5, 0.25)
PRESETS = {"cnn": ("fmnist-iid", 320), "vgg9": ("cifar10-iid", 192)}
"""A preset for each model, and how many samples a device has here."""
ALLOWED = 0.15
QUIET = 0.93
"""The least share of a core that has to be left for this process."""
DEVICES = 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one α should take, according to the planner and to the simulator."""

    alpha: float
    planned_s: float
    simulated: DeviceRecord


def made_up_data(model: str, samples: int, folder: Path) -> Path:
    """Random pixels in the model's shape: time does not depend on what they show."""
    _, channels, height, width = models.load(model).example(1).shape
    random = np.random.default_rng(0)
    shape = (samples * DEVICES, height, width, channels)
    images = random.integers(0, 256, shape[:3] if channels == 1 else shape).astype(np.uint8)
    labels = np.arange(len(images)) % 10
    path = folder / f"{model}.npz"
    np.savez(
        path,
        train_images=images,
        train_labels=labels,
        test_images=images[:10],
        test_labels=labels[:10],
    )
    return path


def configure(model: str, folder: Path, *more: str) -> Config:
    """The preset of a model, with few samples, a pinned β and no energy budget to speak of."""
    preset, samples = PRESETS[model]
    settings = [
        f'data.name="{made_up_data(model, samples, folder)}"',
        "data.partition=iid",
        f"fleet.devices={DEVICES}",
        "fleet.cohort=1",
        f"fleet.samples={samples}",
        "fleet.energy_min_j=1e9",
        "fleet.energy_max_j=1e9",
        "fleet.distance_mean_m=100",
        "limits.alpha_min=0.25",
        "limits.beta_min=0.01",
        "limits.beta_max=0.01",
        "run.rounds=1",
        "training.precision=fp32",
    ]
    return resolve(load_preset(preset, [*settings, *more]))


def predict(model: str, alpha: float, path: Path, folder: Path) -> Prediction:
    """Give the fleet just enough time for this α; plan one device, simulate one round."""
    config = configure(model, folder)
    wanted, spec = np.array([alpha]), config.fleet
    device = draw.place_device(
        load_profile(str(path)), spec, distance_m=100.0, latency_s=1.0, energy_j=1e9
    )
    clock, beta = device.frequency_max_hz, np.array([config.limits.beta_max])
    seconds, _ = cost.round_cost(device, config.workload, wanted, beta, clock)
    budget = float(seconds[0]) * (1 + 1e-9)
    timed = configure(model, folder, f"fleet.latency_s={budget}", f'fleet.profiles=["{path}"]')
    device = draw.place_device(
        load_profile(str(path)), spec, distance_m=100.0, latency_s=budget, energy_j=1e9
    )
    planned = planner.plan_strategies(device, config.workload, config.limits_of("anycostfl"))[0]
    upload = cost.upload_time_s(
        np.array([planned.alpha]), beta, config.workload.size_bits, device.rate_bps
    )
    record = next(simulate(timed)).record
    return Prediction(planned.alpha, planned.latency_s - float(upload[0]), record.devices[0])


def measure_epochs(config: Config, repeats: int, clock: Callable[[], float]) -> list[list[float]]:
    """Seconds of local epochs at each α, run in turns."""
    net = elastic_model(config)
    epochs = [timed_epoch(config, net, alpha, clock) for alpha in ALPHAS]
    seen: list[list[float]] = [[] for _ in ALPHAS]
    for _ in range(repeats + 1):
        for epoch, seconds in zip(epochs, seen, strict=True):
            seconds.append(epoch(int(config.fleet.samples)))
    return [seconds[1:] for seconds in seen]


def check(model: str, repeats: int, folder: Path, clock: Callable[[], float]) -> str:
    """Print the table of one model; ok, MISSED or BUSY."""
    config = configure(model, folder)
    start, used = clock(), time.process_time()
    before = measure_epochs(config, repeats, clock)
    measured = profile.measure(config, repeats=repeats, threads=1, seconds=clock)
    path = folder / f"{model}.toml"
    path.write_text(profile.to_toml(profile.as_profile(measured), measured))
    found = [predict(model, alpha, path, folder) for alpha in ALPHAS]
    after = measure_epochs(config, repeats, clock)
    real = [float(np.percentile(one + other, 25)) for one, other in zip(before, after, strict=True)]
    share = (time.process_time() - used) / (clock() - start)
    print(f"{model}: {measured.flops_per_cycle:.2f} FLOPs per cycle at {measured.clock.now_hz:.3g}")
    print("      α  FLOPs  measured s   planner s  error  simulator s  error")
    good = True
    for p, seconds in zip(found, real, strict=True):
        errors = [guess / seconds - 1 for guess in (p.planned_s, p.simulated.compute_s)]
        good &= all(abs(error) <= ALLOWED for error in errors)
        print(
            f"  {p.alpha:.3f}  {p.simulated.flops_ratio:.3f}  {seconds:10.4f}  {p.planned_s:10.4f} "
            f"{errors[0]:+6.1%}  {p.simulated.compute_s:11.4f} {errors[1]:+6.1%}"
        )
    verdict = "ok" if good else "MISSED"
    if share < QUIET:
        verdict = "BUSY"
    print(
        f"  {verdict}: allowed ±{ALLOWED:.0%}; this process had {share:.0%} of a core", flush=True
    )
    return verdict


def main() -> None:
    """Check every model that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=sorted(PRESETS), default=sorted(PRESETS))
    parser.add_argument("--cpu", action="store_true", help="processor time instead of the wall's")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, repeats = Path(name), arguments.repeats
        verdicts = [check(model, repeats, folder, clock) for model in arguments.models]
    sys.exit(1 if "MISSED" in verdicts else 2 if "BUSY" in verdicts else 0)


if __name__ == "__main__":
    main()
