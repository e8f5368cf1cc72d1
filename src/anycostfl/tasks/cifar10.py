"""CIFAR-10 (Krizhevsky, 2009): 50,000 and 10,000 images of things, 32×32, 3 channels, 10 classes.

Augmentation is the usual: shifted by up to four pixels, mirrored half of the time.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from anycostfl.data.files import channels_first, find_folder, missing
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset, make_dataset
from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.tasks import Task

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDERS = ("cifar10", "cifar-10-batches-bin")
BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)]
MARGIN = 4  # pixels


def load(path: str) -> Dataset:
    """The hub's parquet files, or the original binary batches."""
    folder = find_folder(path, FOLDERS, lambda f: _is_hub(f) or (f / BATCHES[0]).is_file())
    if folder is None:
        instead = "Get the hub's train-*.parquet and test-*.parquet, or data_batch_*.bin"
        raise missing("CIFAR-10", path, instead)
    if _is_hub(folder):
        parts = _read_parquet(folder, "train"), _read_parquet(folder, "test")
    else:
        parts = _read_batches(folder, BATCHES), _read_batches(folder, ["test_batch.bin"])
    return make_dataset(*parts)


def _is_hub(folder: Path) -> bool:
    return any(folder.glob("train-*.parquet"))


def _read_batches(folder: Path, names: list[str]) -> Part:
    """The original binary version: one label byte, then 3 × 32 × 32 bytes, per image."""
    rows = np.concatenate([_read_rows(folder / name) for name in names])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def _read_rows(file: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.fromfile(file, np.uint8).reshape(-1, 3073)
    except (OSError, ValueError) as error:  # missing, or not whole
        raise ConfigError([f"data: {file} cannot be read: {error}"]) from error


def _read_parquet(folder: Path, split: str) -> Part:
    """The hub's layout: `img` (or `image`) with encoded bytes, `label`."""
    try:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an optional dependency
        from PIL import Image  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise MissingExtraError("parquet files need: pip install 'anycostfl[data]'") from error
    images, labels = [], []
    for file in sorted(folder.glob(f"{split}-*.parquet")):
        try:
            table = pq.read_table(file)
            column = "img" if "img" in table.column_names else "image"
            cells = (io.BytesIO(cell["bytes"]) for cell in table.column(column).to_pylist())
            images += [np.asarray(Image.open(cell).convert("RGB")) for cell in cells]
            labels += table.column("label").to_pylist()
        except (OSError, ValueError, KeyError, TypeError) as error:  # ArrowInvalid is a ValueError
            raise ConfigError([f"data: {file} cannot be read: {error}"]) from error
    if not images:
        raise ConfigError([f"data: {folder} has no {split}-*.parquet with images"])
    return channels_first(np.stack(images)), np.array(labels, np.int64)


def augment(images: Tensor, labels: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shift every image by up to four pixels, filled with zeros, and mirror half of them."""
    count, _, height, width = images.shape
    padded = F.pad(images, (MARGIN,) * 4)
    top, left = torch.randint(2 * MARGIN + 1, (2, count, 1, 1), generator=random)
    mirrored = torch.randint(2, (count, 1), generator=random).bool()
    columns = torch.arange(width).expand(count, width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows = torch.arange(height).expand(count, height)
    at = torch.arange(count).view(-1, 1, 1)
    shifted = padded.permute(0, 2, 3, 1)[
        at, (rows + top.view(-1, 1))[:, :, None], (columns + left.view(-1, 1))[:, None, :]
    ]
    return shifted.permute(0, 3, 1, 2), labels


TASK = Task(
    load=load,
    prepare=STANDARDIZE,
    augment=augment,
    classes=CLASSES,
    summary="things, 32×32, 3 channels",
)
