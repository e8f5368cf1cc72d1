"""Workload W1 on Flower's simulation engine; runs in Flower's own environment (see README.md).

Two client actors with one CPU and one thread each. Data and model stay resident in each actor,
which is kinder than Flower's examples: they build a new model for every message.

    python flower_w1.py [--rounds 4] [--kernels ours]

Prints `round K SECONDS`. Round 1 contains the start of Ray.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Set before the import, which reads them: nothing is reported to anyone.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

DEVICES, COHORT, SAMPLES, BATCH, RATE, ACTORS = 60, 15, 1000, 32, 0.01, 2


class Cnn(nn.Module):
    """The CNN of McMahan et al.; `pool_first` swaps ReLU and pooling, which changes no value."""

    def __init__(self, *, pool_first: bool) -> None:
        super().__init__()
        self.pool_first = pool_first
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 28, 28) to logits (batch, 10)."""
        for conv in (self.conv1, self.conv2):
            if self.pool_first:
                x = F.relu(F.max_pool2d(conv(x), 2))
            else:
                x = F.max_pool2d(F.relu(conv(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


@functools.cache
def fashion_mnist() -> tuple[Tensor, Tensor]:
    """Training images, normalised, and labels; once per process."""
    folder = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
    pixels, labels = (
        np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=offset)
        for name, offset in (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8))
    )
    images = torch.from_numpy(pixels.astype(np.float32)).view(-1, 1, 28, 28) / 255
    return (images - images.mean()) / images.std(), torch.from_numpy(labels.astype(np.int64))


@functools.cache
def resident_model(kernels: str) -> Cnn:
    """The model an actor keeps."""
    torch.set_num_threads(1)
    model = Cnn(pool_first=kernels == "ours")
    if kernels == "ours":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def train(message: Message, context: Context) -> Message:
    """One local epoch of SGD on the device's own samples."""
    model = resident_model(str(message.content.config_records["config"]["kernels"]))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    images, labels = fashion_mnist()
    order = torch.randperm(SAMPLES) + int(context.node_config["partition-id"]) * SAMPLES
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in range(0, SAMPLES, BATCH):
        chosen = order[start : start + BATCH]
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    content = RecordDict()
    content["arrays"] = ArrayRecord(model.state_dict())
    content["metrics"] = MetricRecord({"num-examples": SAMPLES})
    return Message(content=content, reply_to=message)


def client_app() -> ClientApp:
    """The app of every device."""
    app = ClientApp()
    app.train()(train)
    return app


def server_app(rounds: int, kernels: str) -> ServerApp:
    """FedAvg over a quarter of the fleet; evaluates nothing, but looks at the clock."""
    app = ServerApp()
    clock = [0.0]

    def tick(number: int, arrays: Any) -> None:
        del arrays
        now = time.perf_counter()
        if number:
            print(f"round {number} {now - clock[0]:.4f}", flush=True)
        clock[0] = now

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        strategy = FedAvg(
            fraction_train=COHORT / DEVICES, fraction_evaluate=0.0, min_available_nodes=DEVICES
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(Cnn(pool_first=False).state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"kernels": kernels}),
            evaluate_fn=tick,
        )

    return app


def main() -> None:
    """Run the rounds asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kernels", choices=("plain", "ours"), default="plain")
    arguments = parser.parse_args()
    # Imported by its name, so that actors import this file as well and keep its caches; what lives
    # in __main__ would travel by value with every message.
    import flower_w1  # noqa: PLC0415

    run_simulation(
        server_app=flower_w1.server_app(arguments.rounds, arguments.kernels),
        client_app=flower_w1.client_app(),
        num_supernodes=DEVICES,
        backend_config={
            "init_args": {"num_cpus": ACTORS},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
