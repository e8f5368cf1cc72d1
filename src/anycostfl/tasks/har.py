"""Human activity by a phone at the waist: windows of 128 values at 50 Hz, 6 channels, 6 activities.

It reads the folder of UCI HAR ("Human Activity Recognition Using Smartphones", Anguita et al.,
2013; its licence allows no commercial use, so none of it is in the package), or an array file
`har_phone.npz`. Nine of thirty persons are held out, as there; of the others, the last bout of
every activity, since windows overlap by half.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from anycostfl.data.files import find_folder, missing, read_npz
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset, hold_out, make_dataset
from anycostfl.errors import ConfigError
from anycostfl.tasks import Task

Part = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]

ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "lying")
FOLDERS = ("har", "UCI HAR Dataset")
ARRAYS = "har_phone.npz"
SIGNALS = ("total_acc_x", "total_acc_y", "total_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z")


def load(path: str) -> Dataset:
    """Windows with their persons."""
    named = Path(path)
    folder = find_folder(
        str(named.parent) if named.name == ARRAYS else path,
        FOLDERS,
        lambda f: (f / ARRAYS).is_file() or (f / "train" / "y_train.txt").is_file(),
    )
    if folder is None:
        raise missing("HAR", path, "Unpack the archive of UCI HAR (UCI dataset 240)")
    parts = [_read_part(folder, name) for name in ("train", "test")]
    (x, y, who), (xt, yt, whot) = parts
    dataset = make_dataset((x, y), (xt, yt), (who, whot))
    return hold_out(dataset, torch.from_numpy(_last_bouts(y, who)))


def _read_part(folder: Path, part: str) -> Part:
    """Windows in g and rad/s, activities and persons."""
    if (folder / ARRAYS).is_file():
        names = [f"{part}_{kind}" for kind in ("inputs", "targets", "owners")]
        arrays = read_npz(folder / ARRAYS, [*names, "input_scale"])
        scaled = arrays[names[0]] * arrays["input_scale"][:, None]
        _, targets, owners = (arrays[name].astype(np.int64) for name in names)
        return scaled.astype(np.float32), targets, owners
    signals = [
        _read_table(folder / part / "Inertial Signals" / f"{signal}_{part}.txt")
        for signal in SIGNALS
    ]
    activities = _read_table(folder / part / f"y_{part}.txt")[:, 0].astype(np.int64) - 1
    persons = _read_table(folder / part / f"subject_{part}.txt")[:, 0].astype(np.int64)
    return np.stack(signals, axis=1), activities, persons


def _read_table(file: Path) -> npt.NDArray[np.float32]:
    try:
        return np.loadtxt(file, dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigError([f"data: {file} cannot be read: {error}"]) from error


def _last_bouts(
    activities: npt.NDArray[np.int64], persons: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """The windows of each person's last bout of every activity; a bout is a run of one activity."""
    kinds = activities + (activities.max() + 1) * persons
    bouts = np.concatenate([[0], (np.diff(kinds) != 0).cumsum()])
    last = dict(zip(kinds.tolist(), bouts.tolist(), strict=True))
    is_last: npt.NDArray[np.bool_] = np.array([last[kind] for kind in kinds.tolist()]) == bouts
    return is_last


TASK = Task(
    load=load,
    prepare=STANDARDIZE,
    classes=ACTIVITIES,
    summary="human activity, 6 sensor channels × 128",
)
