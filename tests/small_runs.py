"""A complete experiment that takes a second: twelve devices, a few images each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anycostfl.config import Config, load_preset
from anycostfl.data.samples import Dataset
from anycostfl.experiment import Experiment, build_experiment, load_data, split
from anycostfl.fleets.simulated import Holdings, SimulatedFleet

DATA = "stripes.npz"


def small_dataset(folder: Path) -> Path:
    """Ten classes of noisy stripes, 240 to train on and 60 to test on."""
    random = np.random.default_rng(0)
    labels = random.permutation(np.arange(300) % 10)
    rows = np.arange(28)[None, :, None]
    images = 128 + 80 * np.sin(rows * (labels[:, None, None] + 1) / 4)
    images = np.clip(images + random.normal(0, 20, (300, 28, 28)), 0, 255).astype(np.uint8)
    path = folder / DATA
    np.savez(
        path,
        train_images=images[:240],
        train_labels=labels[:240],
        test_images=images[240:],
        test_labels=labels[240:],
    )
    return path


def small_overrides(folder: Path, *more: str) -> list[str]:
    """What turns the demo preset into a small run."""
    return [
        f'data.name="{folder / DATA if (folder / DATA).exists() else small_dataset(folder)}"',
        "data.partition=iid",
        "fleet.devices=12",
        "fleet.cohort=4",
        "fleet.samples=20",
        "fleet.latency_s=0.15",
        "fleet.energy_min_j=0.005",
        "fleet.energy_max_j=0.05",
        "fleet.bandwidth_hz=4e7",
        "limits.alpha_min=0.05",
        "run.rounds=6",
        "run.checkpoint_every=2",
        *more,
    ]


def small_config(folder: Path, *more: str) -> Config:
    """The configuration of a small run."""
    return load_preset("demo", small_overrides(folder, *more))


def small_holdings(config: Config, dataset: Dataset) -> Holdings:
    """The samples of every device of a small run."""
    parts = split(config, dataset.train)
    return Holdings.of(dataset, parts)


def small_fleet(config: Config) -> tuple[Experiment, SimulatedFleet]:
    """The experiment and the simulated fleet of a small run."""
    dataset = load_data(config)
    experiment = build_experiment(config, dataset)
    return experiment, SimulatedFleet(experiment, small_holdings(config, dataset))


OWN_MODEL = """
import torch
from torch import nn
from anycostfl.models import ModelSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = {layers}

    def forward(self, images):
        return self.out(self.norm(self.hidden(images.flatten(1).to(self.out.weight.dtype))))

MODEL = ModelSpec(build=Net, example=lambda batch: torch.randn(batch, 1, 28, 28), summary="own")
"""
"""The file of a custom model; `layers` are three."""
