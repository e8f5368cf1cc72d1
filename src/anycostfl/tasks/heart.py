"""Heart disease or none from 13 numbers, at four hospitals (UCI 45; as in FLamby, 2022)."""

from __future__ import annotations

from anycostfl.data.files import read_embedded
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset
from anycostfl.errors import ConfigError
from anycostfl.tasks import Task


def load(path: str) -> Dataset:
    """Patients with their hospitals."""
    if path:
        raise ConfigError([f"data.path: given {path!r}, but heart needs none"])
    return read_embedded("heart")


TASK = Task(load=load, prepare=STANDARDIZE, summary="heart disease by hospital, 13 numbers")
