"""Datasets and how they are split over a fleet (Sec. V-A).

A dataset is four tensors, ready for training: images as normalised float32, labels as int64.
Nothing is downloaded. Fashion-MNIST is read from idx files (Debian's package puts them where they
are found), CIFAR-10 from the hub's parquet files or the original batches, anything else from an
.npz file. `embedded` is a class-balanced part of Fashion-MNIST that comes with the package.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anycostfl.errors import ConfigError, MissingExtraError, UnknownNameError

Images = npt.NDArray[np.uint8]  # (sample, height, width[, channel])
Labels = npt.NDArray[np.int64]
Part = tuple[Images, Labels]

FASHION_MNIST_PLACES = ("/usr/share/datasets/fashion-mnist",)
"""Where packages put it: Debian's `dataset-fashion-mnist`."""
MOST = 2**31 - 1  # of a label
LARGEST = 1e18  # of a pixel; its square is finite in single precision


class DataMissingError(UnknownNameError):
    """A dataset that is not on this machine; says how to get it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What images are normalised by, each channel: minus `mean`, divided by `std`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images (sample, channel, height, width) and labels, to train on and to test on.

    Each channel was normalised: minus `mean`, divided by `std`.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(name: str, path: str = "", scale: Scale | None = None) -> Dataset:
    """A dataset by its name, or a file that ends in .npz.

    With the `scale` of an experiment it is the data of one of its devices: normalised as the
    others' is, and a file needs nothing to test on.
    """
    if path and (name.endswith(".npz") or name == "embedded"):
        raise ConfigError([f"data.path: given {path!r}, but {name} needs none"])
    if name.endswith(".npz"):
        parts = _read_npz(Path(name), tests=scale is None)
        return _dataset(Path(name).stem, *parts, scale)
    if name not in READERS:
        raise UnknownNameError(
            f"no dataset {name!r}; there are {', '.join(READERS)}, or an .npz file"
        )
    return _dataset(name, *READERS[name](path), scale)


def _dataset(name: str, train: Part, test: Part, scale: Scale | None) -> Dataset:
    """Normalise each channel, if not said otherwise to mean 0 and deviation 1 in training."""
    images, tests = (_as_tensor(part[0]) for part in (train, test))
    mean, std = _given(scale, images.shape[1], name) if scale else _statistics(images)
    labels, test_labels = (torch.from_numpy(part[1]) for part in (train, test))
    std = std.clamp(min=1e-6)
    return Dataset(
        name=name,
        train_images=(images - mean) / std,
        train_labels=labels,
        test_images=(tests - mean) / std,
        test_labels=test_labels,
        classes=int(torch.cat([labels, test_labels]).max()) + 1,
        mean=tuple(mean.flatten().tolist()),
        std=tuple(std.flatten().tolist()),
    )


def _given(scale: Scale, channels: int, name: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, as the experiment says."""
    if len(scale.mean) != channels:
        raise ConfigError(
            [f"{name}: given images of {channels} channels, must have {len(scale.mean)} here"]
        )
    mean, std = torch.tensor(scale.mean), torch.tensor(scale.std)
    return mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)


def _statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, to the last bit the same with any number of threads."""
    mean = torch.zeros(images.shape[1], dtype=torch.float64)
    square = torch.zeros_like(mean)
    for start in range(0, len(images), 1000):  # float64, but not of all images at once
        wide = images[start : start + 1000].double()
        mean += wide.sum(dim=(0, 2, 3))
        square += wide.square().sum(dim=(0, 2, 3))
    count = images.numel() / images.shape[1]
    mean /= count
    std = ((square - count * mean.square()) / (count - 1)).clamp(min=0).sqrt()
    return mean.float().view(1, -1, 1, 1), std.float().view(1, -1, 1, 1)


def _as_tensor(images: npt.NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.array(images, np.float32))
    if images.dtype == np.uint8:
        tensor = tensor / 255
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2).contiguous()


# --- readers ------------------------------------------------------------------------------------


def _read_embedded(path: str) -> tuple[Part, Part]:
    del path
    return _read_idx_folder(resources.files("anycostfl").joinpath("embedded", "fashion-mnist"))


def _read_fashion_mnist(path: str) -> tuple[Part, Part]:
    for folder in _folders(path, FASHION_MNIST_PLACES, ("fashion-mnist",)):
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            return _read_idx_folder(folder)
    raise DataMissingError(
        f"Fashion-MNIST is not {_there(path)}. Install Debian's package dataset-fashion-mnist, or "
        "put its four .gz files into a folder and name it with --set data.path=FOLDER or "
        "ANYCOSTFL_DATA. The embedded part needs nothing: --set data.name=embedded"
    )


def _folders(path: str, usual: Sequence[str], names: Sequence[str]) -> Iterator[Path]:
    """Where a dataset may be: in the folder that was given, and only there, or in a usual place.

    Each of them may hold it below a name of its own.
    """
    for place in [path] if path else [os.environ.get("ANYCOSTFL_DATA", ""), *usual]:
        yield from (Path(place, name) for name in ("", *names) if place)


def _there(path: str) -> str:
    given = os.environ.get("ANYCOSTFL_DATA")
    also = f" (looked in ANYCOSTFL_DATA={given} too)" if given else ""
    return f"in {path}" if path else f"on this machine{also}"


def _unreadable(file: Traversable, error: Exception) -> ConfigError:
    return ConfigError([f"data: {file} cannot be read: {error}"])


def _read_idx_folder(folder: Traversable) -> tuple[Part, Part]:
    def read(name: str) -> Images:
        try:
            return read_idx(folder.joinpath(name).read_bytes())
        except (OSError, EOFError, zlib.error, ConfigError) as error:  # missing, or not whole
            raise _unreadable(folder.joinpath(name), error) from error

    def part(name: str) -> Part:
        images = read(f"{name}-images-idx3-ubyte.gz")
        labels = read(f"{name}-labels-idx1-ubyte.gz")
        if len(images) != len(labels):
            raise ConfigError([f"{name}: {len(images)} images but {len(labels)} labels"])
        return images, labels.astype(np.int64)

    return part("train"), part("t10k")


def read_idx(data: bytes) -> Images:
    """The array of one (gzipped) idx file of bytes."""
    raw = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ConfigError(["not an idx file of bytes"])
    head = 4 + 4 * raw[3]
    if len(raw) < head:
        raise ConfigError(["an idx file that ends within its header"])
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    values = np.frombuffer(raw, np.uint8, offset=head)
    if values.size != math.prod(shape):
        raise ConfigError([f"an idx file of shape {shape} with {values.size} bytes"])
    return values.reshape(shape)


def _read_cifar10(path: str) -> tuple[Part, Part]:
    for folder in _folders(path, (), ("cifar10", "cifar-10-batches-bin")):
        if list(folder.glob("train-*.parquet")):
            return _read_parquet(folder, "train"), _read_parquet(folder, "test")
        if (folder / "data_batch_1.bin").is_file():
            names = [f"data_batch_{i}.bin" for i in range(1, 6)]
            return _read_batches(folder, names), _read_batches(folder, ["test_batch.bin"])
    raise DataMissingError(
        f"CIFAR-10 is not {_there(path)}. Name a folder with the hub's train-*.parquet and "
        "test-*.parquet, or with the original data_batch_*.bin files, by "
        "--set data.path=FOLDER or ANYCOSTFL_DATA"
    )


def _read_batches(folder: Path, names: list[str]) -> Part:
    """The original binary version: one label byte, then 3 × 32 × 32 bytes, per image."""
    rows = np.concatenate([_read_rows(folder / name) for name in names])
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, rows[:, 0].astype(np.int64)


def _read_rows(file: Path) -> Images:
    try:
        return np.fromfile(file, np.uint8).reshape(-1, 3073)
    except (OSError, ValueError) as error:  # missing, or not whole
        raise _unreadable(file, error) from error


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
            raise _unreadable(file, error) from error
    if not images:
        raise ConfigError([f"data: {folder} has no {split}-*.parquet with images"])
    return np.stack(images), np.array(labels, np.int64)


def _read_npz(path: Path, *, tests: bool = True) -> tuple[Part, Part]:
    """Four arrays; where no tests are needed, two are enough."""
    if not path.is_file():
        raise DataMissingError(f"there is no file {path}")
    names = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in names if name in arrays}
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        # Where numpy finds anything but plain numbers, it advises to trust the file.
        reason = "it must hold plain numbers" if isinstance(error, ValueError) else error
        why = f"not an .npz file ({reason}); numpy.savez makes one of {', '.join(names)}"
        raise ConfigError([why], str(path)) from error
    wanted = names if tests else names[:2]
    if missing := [name for name in wanted if name not in found]:
        raise ConfigError([f"{name}: missing" for name in missing], str(path))
    pairs = list(zip(wanted[::2], wanted[1::2], strict=True))
    problems = [text for pair in pairs for text in _array_problems(found, *pair)]
    shapes = {name: found[name].shape[1:] for name in wanted[::2]}
    if not problems and len(set(shapes.values())) > 1:
        given = " and ".join(f"{name} of {shape}" for name, shape in shapes.items())
        problems.append(f"images: given {given}, must have one size")
    if problems:
        raise ConfigError(problems, str(path))
    train, *test = [(found[x], found[y].astype(np.int64)) for x, y in pairs]
    return train, test[0] if tests else (train[0][:0], train[1][:0])


def _array_problems(arrays: Mapping[str, npt.NDArray[Any]], x: str, y: str) -> Iterator[str]:
    """What is wrong with some images and their labels."""
    images, labels = arrays[x], arrays[y]
    if images.ndim not in (3, 4):
        allowed = "(sample, height, width[, channel])"
        yield f"{x}: given shape {images.shape}, allowed {allowed}"
    elif len(images) and not images.size:
        yield f"{x}: given shape {images.shape}, must have pixels"
    if images.dtype.kind not in "iufb":
        yield f"{x}: given {images.dtype}, allowed real numbers"
    elif images.dtype.kind == "f" and not np.abs(images).max(initial=0.0) < LARGEST:
        yield f"{x}: given a number that is not finite, or beyond {LARGEST:g}"
    count = len(images) if images.ndim else 0
    if not count or labels.shape != (count,):
        given = f"{count} images but labels of shape {labels.shape}"
        yield f"{y}: given {given}, allowed one label for each image, at least one"
    if labels.dtype.kind not in "iu":
        yield f"{y}: given {labels.dtype}, allowed whole numbers from 0 on"
    elif labels.size and not 0 <= labels.min() <= labels.max() <= MOST:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        yield f"{y}: given {wrong}, allowed whole numbers from 0 on, up to {MOST}"


READERS: dict[str, Callable[[str], tuple[Part, Part]]] = {
    "embedded": _read_embedded,
    "fashion-mnist": _read_fashion_mnist,
    "cifar10": _read_cifar10,
}


# --- partitions -----------------------------------------------------------------------------------

Partition = list[npt.NDArray[np.int64]]
"""For every device, the indices of its training samples."""

LEAST_SAMPLES = 10
"""As in FedMA's partition, nobody is left with fewer (where the data suffices)."""


def split_iid(labels: npt.ArrayLike, devices: int, random: np.random.Generator) -> Partition:
    """Equal random parts; the remainder goes to the first devices."""
    count = len(np.asarray(labels))
    _check_enough(count, devices)
    return [np.sort(part) for part in np.array_split(random.permutation(count), devices)]


def split_dirichlet(
    labels: npt.ArrayLike, devices: int, concentration: float, random: np.random.Generator
) -> Partition:
    """Every class split over the devices by a Dirichlet draw, as the paper of FedMA has it.

    FedMA's program besides gives no more of the next classes to a device that holds its equal part
    already: there sizes differ less (a deviation of 0.31 of the mean at 0.5 and 60 devices, here
    0.44), labels more.
    """
    kinds = np.asarray(labels)
    _check_enough(len(kinds), devices)
    least = min(LEAST_SAMPLES, len(kinds) // (10 * devices) + 1)
    for _ in range(100):  # one or two will do, unless none will
        parts: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(devices)]
        for kind in np.unique(kinds):
            members = random.permutation(np.flatnonzero(kinds == kind))
            shares = random.dirichlet(np.full(devices, concentration))
            ends = np.floor(np.cumsum(shares)[:-1] * len(members) + 0.5).astype(int)
            for part, members_of in zip(parts, np.split(members, ends), strict=True):
                part.append(members_of)
        joined = [np.sort(np.concatenate(part)) for part in parts]
        if min(map(len, joined)) >= least:
            return joined
    raise ConfigError(
        [f"concentration: given {concentration:g} for {devices} devices; some device always "
         f"has fewer than {least} samples; use a larger one, or fewer devices"]
    )  # fmt: skip


def _check_enough(samples: int, devices: int) -> None:
    if devices > samples:
        raise ConfigError([f"devices: given {devices}, must be at most {samples}, one sample each"])
