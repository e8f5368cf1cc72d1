"""Fashion-MNIST's files: gzipped idx arrays of bytes, images and labels of two parts."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from anycostfl.data.samples import Dataset, make_dataset
from anycostfl.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
CLOTHES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


def read_idx_folder(folder: Traversable) -> Dataset:
    """The four files of a folder."""
    return make_dataset(_part(folder, "train"), _part(folder, "t10k"))


def _part(folder: Traversable, name: str) -> tuple[Bytes, npt.NDArray[np.int64]]:
    images = _read(folder.joinpath(f"{name}-images-idx3-ubyte.gz"))
    labels = _read(folder.joinpath(f"{name}-labels-idx1-ubyte.gz"))
    return images[:, None], labels.astype(np.int64)


def _read(file: Traversable) -> Bytes:
    try:
        return read_idx(file.read_bytes())
    except (OSError, EOFError, zlib.error, ConfigError) as error:  # missing, or not whole
        raise ConfigError([f"data: {file} cannot be read: {error}"]) from error


def read_idx(data: bytes) -> Bytes:
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
