"""Samples from files: arrays, tables, folders of recordings or images, or a function by its name.

    mine.npz            train_inputs, train_targets, perhaps train_owners, and the same of test_;
                        or inputs and targets; images may be train_images and train_labels
    mine.csv            a row for each sample; the column `target`, or else the last, is the target
    folder/CLASS/FILE   .wav, or .png and .jpg where Pillow is installed
    package.module:function   called without arguments: (inputs, targets), or a `Dataset`

Nothing is unpickled. Only the owner of a device names a function or a file.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
import wave
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anycostfl.data.samples import Dataset, Tree, make_dataset
from anycostfl.errors import ConfigError, MissingExtraError, UnknownNameError
from anycostfl.files import memory_bytes

Array = npt.NDArray[Any]
Transform = Callable[[Array, int], Array]
"""A recording and its rate in Hz → the input of a sample."""

LARGEST_FILE = min(4 << 30, memory_bytes() // 2)  # bytes of all arrays of a file, unpacked
UNREADABLE = (  # MemoryError: an array that claims to be larger than the file
    OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
IMAGES = (".png", ".jpg", ".jpeg")
PARTS = ("train", "test")


class DataMissingError(UnknownNameError):
    """A dataset that is not on this machine; says how to get it."""


def find_folder(path: str, usual: Sequence[str], holds: Callable[[Path], bool]) -> Path | None:
    """The folder of a dataset: the one that was given and only it, or else a usual place.

    Each may hold it below a usual name.
    """
    usual_places = [os.environ.get("ANYCOSTFL_DATA", ""), *(p for p in usual if "/" in p)]
    names = ["", *(name for name in usual if "/" not in name)]
    found = (
        Path(place, name) for place in ([path] if path else usual_places) if place for name in names
    )
    return next(filter(holds, found), None)


def missing(what: str, path: str, instead: str) -> DataMissingError:
    """The error for a dataset that is not there, with where it was looked for."""
    given = os.environ.get("ANYCOSTFL_DATA")
    also = f" (looked in ANYCOSTFL_DATA={given} too)" if given else ""
    where = f"in {path}" if path else f"on this machine{also}"
    how = "name it with --set data.path=FOLDER or ANYCOSTFL_DATA"
    return DataMissingError(f"{what} is not {where}. {instead}, {how}")


# --- arrays ---------------------------------------------------------------------------------------


def read_npz(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Those of the named arrays that a file holds; ConfigError if it is no file of plain arrays."""
    if not path.is_file():
        raise DataMissingError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(item.file_size for item in packed.infolist())
        if size > LARGEST_FILE:
            most = LARGEST_FILE / 1e9
            raise ConfigError(
                [f"given {size / 1e9:.1f} GB unpacked, must be at most {most:.1f}"], str(path)
            )
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        # Where numpy finds anything but plain numbers, it advises to trust the file.
        reason = "it must hold plain numbers" if isinstance(error, ValueError) else error
        why = f"not an .npz file ({reason}); numpy.savez makes one of train_inputs, train_targets"
        raise ConfigError([why], str(path)) from error


def read_arrays(path: Path | str) -> Dataset:
    """The dataset in an .npz file; what it lacks to test on is left empty."""
    path = Path(path)
    kinds = ("inputs", "targets", "owners", "images", "labels")
    names = [*(f"{part}_{kind}" for part in PARTS for kind in kinds), *kinds, "owner_names"]
    found = read_npz(path, names)
    train = _pair(found, "train") or _pair(found, "")
    if train is None:
        raise ConfigError(["train_inputs and train_targets: missing"], str(path))
    test = _pair(found, "test") or (train[0][:0], train[1][:0])
    owners = tuple(found.get(f"{part}_owners", found.get("owners")) for part in PARTS)
    try:
        made = make_dataset(train, test, (owners[0], owners[1] if len(test[1]) else None))
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from error
    called = dict(enumerate(map(str, found.get("owner_names", ()))))
    if called:  # the owners are numbers of these names
        return replace(made, owner_names=[called.get(int(n), n) for n in made.owner_names])
    return made


def read_embedded(name: str) -> Dataset:
    """Arrays that come with the package."""
    packed = resources.files("anycostfl").joinpath("embedded", name, "data.npz")
    with resources.as_file(packed) as file:
        return read_arrays(file)


def _pair(found: dict[str, Array], part: str) -> tuple[Array, Array] | None:
    """Inputs and targets of one part; images are stored with channels last."""
    begin = f"{part}_" if part else ""
    inputs, targets = found.get(f"{begin}inputs"), found.get(f"{begin}targets")
    if inputs is None:
        images, targets = found.get(f"{begin}images"), found.get(f"{begin}labels", targets)
        if images is not None:
            inputs = channels_first(images)
    return None if inputs is None or targets is None else (inputs, targets)


def channels_first(images: Array) -> Array:
    """Images (sample, height, width[, channel]) as (sample, channel, height, width)."""
    if images.ndim == 3:
        return images[:, None]
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if images.ndim == 4 else images


# --- tables ---------------------------------------------------------------------------------------


def read_csv(path: Path) -> tuple[Array, Array]:
    """Rows of numbers; the column `target`, or else the last one, is what to predict."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"cannot be read: {error}"], str(path)) from error
    header = rows.pop(0) if rows and not all(map(_is_number, rows[0][:-1] or rows[0])) else []
    if not rows:
        raise ConfigError(["given no rows, must have one for each sample"], str(path))
    width = len(rows[0])
    target = header.index("target") if "target" in header else width - 1
    problems = [
        f"row {number + 1}: given {len(row)} values, must be {width}"
        for number, row in enumerate(rows)
        if len(row) != width
    ]
    problems += [
        f"row {number + 1}: given {cell!r:.40}, must be a number"
        for number, row in enumerate(rows)
        for column, cell in enumerate(row)
        if column != target and not _is_number(cell)
    ]
    if problems or width < 2:
        raise ConfigError(problems[:10] or ["given one column, must be at least two"], str(path))
    inputs = [[float(cell) for i, cell in enumerate(row) if i != target] for row in rows]
    words = [row[target] for row in rows]
    return np.array(inputs, np.float32), _targets(words)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _targets(words: Sequence[str]) -> Array:
    """Whole numbers are classes, other numbers are what to predict."""
    if not all(map(_is_number, words)):
        raise ConfigError([f"target: given {words[0]!r:.40}, must be a number; number the classes"])
    numbers = np.array([float(word) for word in words], np.float32)
    whole = np.array([word.strip().lstrip("-").isdigit() for word in words]).all()
    return numbers.astype(np.int64) if whole else numbers


# --- folders --------------------------------------------------------------------------------------


def read_folder(
    folder: Path, classes: Sequence[str], transform: Transform | None
) -> tuple[Array, Array]:
    """Recordings or images in a folder for each class, in the order of the classes."""
    there = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if unknown := [name for name in there if classes and name not in classes]:
        raise ConfigError(
            [f"{name}: must be a class of this task, {', '.join(classes)}" for name in unknown],
            str(folder),
        )
    order, inputs, targets = list(classes or there), [], []
    for name in there:
        for path in sorted((folder / name).iterdir()):
            if path.suffix.lower() in (".wav", *IMAGES):
                inputs.append(_read_sample(path, transform))
                targets.append(order.index(name))
    if not inputs:
        raise ConfigError(["given no CLASS/*.wav, *.png or *.jpg, must have some"], str(folder))
    if len(shapes := {sample.shape for sample in inputs}) > 1:
        raise ConfigError([f"given samples of {sorted(shapes)}, must be of one shape"], str(folder))
    return np.stack(inputs), np.array(targets)


def _read_sample(path: Path, transform: Transform | None) -> Array:
    if path.suffix.lower() in IMAGES:
        return _read_image(path)
    if transform is None:
        raise ConfigError(["a recording, but the task has no transform for recordings"], str(path))
    return transform(*read_wav(path))


def read_wav(path: Path) -> tuple[Array, int]:
    """A recording as numbers from -1 to 1, its channels averaged, and its rate in Hz."""
    try:
        with wave.open(io.BytesIO(path.read_bytes())) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError([f"not a .wav file of plain samples: {error}"], str(path)) from error
    if width not in (1, 2, 4):
        raise ConfigError([f"given {8 * width} bits a value, must be 8, 16 or 32"], str(path))
    plain = np.frombuffer(content, {1: "<u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    values: Array = (plain - 128) / 128 if width == 1 else plain / 2.0 ** (8 * width - 1)
    return values.reshape(-1, channels).mean(1), rate


def _read_image(path: Path) -> Array:
    try:
        from PIL import Image  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise MissingExtraError("images need: pip install 'anycostfl[data]'") from error
    try:
        pixels = np.asarray(Image.open(path))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError([f"cannot be read as an image: {error}"], str(path)) from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


# --- a device's own data --------------------------------------------------------------------------


def read_own(name: str, classes: Sequence[str] = (), transform: Transform | None = None) -> Dataset:
    """What the owner of a device calls its data; see the module's docstring."""
    path = Path(name)
    if path.is_dir():
        return _untested(read_folder(path, classes, transform))
    if path.suffix == ".csv" and path.is_file():
        return _untested(read_csv(path))
    if path.suffix == ".npz":
        return read_arrays(path)
    module, _, function = name.partition(":")
    if not function:
        raise ConfigError(
            [f"data: given {name}, must be an .npz or .csv file, a folder of classes, or "
             "package.module:function"]
        )  # fmt: skip
    try:
        found = getattr(importlib.import_module(module), function)()
    except Exception as error:  # whatever the owner's code raises
        raise ConfigError([f"{name} failed: {type(error).__name__}: {error}"]) from error
    if isinstance(found, Dataset):
        return found
    if not isinstance(found, tuple) or len(found) != 2:
        what = type(found).__name__
        raise ConfigError([f"{name} returned {what}, must be (inputs, targets) or a Dataset"])
    return _untested(found)


def _untested(pair: tuple[Tree, Tree]) -> Dataset:
    """Samples to train on, and none to test on."""
    samples = make_dataset(pair, pair).train
    return Dataset(samples, samples.take(slice(0, 0)))
