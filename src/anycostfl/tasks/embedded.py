"""A class-balanced part of Fashion-MNIST that comes with the package: 8,000 and 2,000 images."""

from __future__ import annotations

from importlib import resources

from anycostfl.data.idx import CLOTHES, read_idx_folder
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset
from anycostfl.errors import ConfigError
from anycostfl.tasks import Task


def load(path: str) -> Dataset:
    """The images of the package."""
    if path:
        raise ConfigError([f"data.path: given {path!r}, but embedded needs none"])
    return read_idx_folder(resources.files("anycostfl").joinpath("embedded", "fashion-mnist"))


TASK = Task(
    load=load, prepare=STANDARDIZE, classes=CLOTHES, summary="clothes, 28×28 grey (embedded)"
)
