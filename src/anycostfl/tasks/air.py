"""PM2.5 six hours ahead at twelve stations, from 24 hours of 13 measurements (UCI 501, Chen, 2017).

A third of the windows come with the package; a folder may hold all, as `air_stations.npz`. The last
year of every station is there to test on. Inputs are standardised; targets are standardised
logarithms, and the error is in µg/m³.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anycostfl.data.files import missing, read_arrays, read_embedded
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset, Samples
from anycostfl.metrics import RMSE, Metric, MetricInfo, main_output, ratio, squared_error
from anycostfl.tasks import Task

ARRAYS = "air_stations.npz"
STEP = 0.05  # standard deviations, of the inputs in the package
TARGET_MEAN, TARGET_STD = 3.82380, 1.10849  # of log(1 + PM2.5) over all training windows


def load(path: str) -> Dataset:
    """Windows with their stations."""
    if path and not Path(path, ARRAYS).is_file():
        raise missing(ARRAYS, path, "A part comes with the package: leave data.path out. Or")
    if path:
        return read_arrays(Path(path, ARRAYS))
    packed = read_embedded("air")
    parts = [Samples(s.inputs * STEP, s.targets, s.owners) for s in (packed.train, packed.test)]
    return replace(packed, train=parts[0], test=parts[1])


def _concentration(standardised: Tensor) -> Tensor:
    return torch.expm1(standardised.double() * TARGET_STD + TARGET_MEAN)


def _rows(outputs: Any, targets: Tensor) -> Tensor:
    """Absolute error in µg/m³, and one for the count."""
    predicted = main_output(outputs).reshape(targets.shape)
    error = (_concentration(predicted) - _concentration(targets)).abs()
    return torch.stack([error, torch.ones_like(error)], dim=1)


MAE = Metric(MetricInfo("mae", "µg/m³", 1.0, higher_is_better=False), _rows, ratio)

TASK = Task(
    load=load,
    prepare=STANDARDIZE,
    loss=squared_error,
    metric=(MAE, RMSE),
    summary="PM2.5 in six hours, by station",
)
