"""Real updates to measure on: a model after some steps, then one device's local epoch."""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import models

EMBEDDED = Path(models.__file__).parents[1] / "embedded" / "fashion-mnist"
BLOCKS = {"cnn": {"fc1.weight": 49}, "vgg9": {"fc1.weight": 16}}
LR = 0.01
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LocalEpoch:
    """An update and the seconds its epoch took."""

    update: dict[str, Tensor]
    seconds: float


def fashion_mnist(folder: Path = EMBEDDED) -> Data:
    """The training images (n, 1, 28, 28) in [0, 1] and labels of a folder of idx.gz files."""
    images = _idx(folder / "train-images-idx3-ubyte.gz")
    labels = _idx(folder / "train-labels-idx1-ubyte.gz")
    return torch.tensor(images).float().div(255).unsqueeze(1), torch.tensor(labels).long()


def _idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">u4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy()


def cifar10(parquet: Path, count: int) -> Data:
    """The first images (n, 3, 32, 32) in [0, 1] and labels of a parquet file of PNG images."""
    import pyarrow.parquet  # noqa: PLC0415 - only for this data set
    from PIL import Image  # noqa: PLC0415

    rows = pyarrow.parquet.read_table(parquet).slice(0, count).to_pylist()
    images = [np.asarray(Image.open(io.BytesIO(row["img"]["bytes"]))) for row in rows]
    pixels = torch.tensor(np.stack(images)).float().div(255).permute(0, 3, 1, 2)
    return pixels.contiguous(), torch.tensor([row["label"] for row in rows])


def train(net: nn.Module, data: Data, batches: Sequence[Tensor], lr: float) -> None:
    """Plain SGD over the batches of indices."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(data[0][batch]), data[1][batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def local_epoch(data: Data) -> LocalEpoch:
    """Train the CNN for 500 steps, then one epoch over 1000 samples."""
    torch.manual_seed(0)
    net = models.load("cnn").build()
    draw = torch.Generator().manual_seed(0)
    count = len(data[0])
    train(net, data, [torch.randint(count, (32,), generator=draw) for _ in range(500)], LR)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    own = torch.randperm(count, generator=draw)[:1000]
    started = time.perf_counter()
    train(net, data, torch.split(own, 32), LR)
    seconds = time.perf_counter() - started
    return LocalEpoch({n: v - before[n] for n, v in net.state_dict().items()}, seconds)


def epoch_timer(data: Data) -> Callable[[], float]:
    """A function that trains one epoch over 1000 samples and returns its processor seconds."""
    net = models.load("cnn").build()

    def epoch() -> float:
        started = time.process_time()
        train(net, data, torch.split(torch.arange(1000), 32), LR)
        return time.process_time() - started

    return epoch
