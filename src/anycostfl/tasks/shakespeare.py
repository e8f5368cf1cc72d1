"""The next character of Shakespeare's plays, by role (as in McMahan et al., 2017, and LEAF).

Windows of 80 characters of 156 roles; of each role, the first 80 % to train on and the rest to test
on. Every tenth role is never trained on.
"""

from __future__ import annotations

from pathlib import Path

from anycostfl.data.files import missing, read_arrays, read_embedded
from anycostfl.data.prepare import VOCABULARY
from anycostfl.data.samples import Dataset, hold_out
from anycostfl.tasks import Task

ARRAYS = "shakespeare_roles.npz"
HELD_OUT = 10


def load(path: str) -> Dataset:
    """Windows of ASCII codes with their roles."""
    if path and not Path(path, ARRAYS).is_file():
        raise missing(ARRAYS, path, "The package has all of it: leave data.path out. Or")
    dataset = read_arrays(Path(path, ARRAYS)) if path else read_embedded("shakespeare")
    assert dataset.train.owners is not None  # noqa: S101
    return hold_out(dataset, dataset.train.owners % HELD_OUT == HELD_OUT - 1, drop=True)


TASK = Task(
    load=load,
    prepare=VOCABULARY,
    metric=("perplexity", "accuracy"),
    summary="next character by role",
)
