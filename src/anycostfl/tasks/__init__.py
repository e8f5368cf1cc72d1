"""Tasks: what is learnt from which samples. One file each: `tasks/NAME.py` has a constant `TASK`.

From Python, a task needs no file:

    Task(train=(x, y), test=(xt, yt), owners=ids, loss=F.cross_entropy, metric="accuracy")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from anycostfl.data.files import DataMissingError, Transform, read_arrays
from anycostfl.data.prepare import STANDARDIZE, Prepare, is_unscaled
from anycostfl.data.samples import Dataset, Tree, make_dataset
from anycostfl.errors import ConfigError, TaskError, UnknownNameError
from anycostfl.metrics import Loss, Metric, cross_entropy, find_metric, squared_error
from anycostfl.registry import IN_MEMORY, load_file, modules_in, own_folders, unknown

__path__ = [*__path__, *own_folders("tasks")]

Augment = Callable[[Tree, Tree, torch.Generator], tuple[Tree, Tree]]
"""Inputs and targets of a batch → the same, changed at random; on the device, while training."""

HELD_OUT = 10  # every tenth sample of an owner, where there is no test set
HOLD_OUT = 211  # the purpose of the generator that draws them


@dataclass(frozen=True, eq=False)
class Task:
    """One task: samples, how they are prepared, the loss and the metrics.

    train, test: inputs and targets of any shape and structure; several inputs are a tuple (passed
        by position) or a dict (by name). Without `test`, a tenth of every owner's samples is held
        out.
    owners, test_owners: for every sample, whom it belongs to, as a number or a name.
    load: a folder or "" → the dataset; instead of the arrays above.
    loss: outputs and targets → a scalar.
    metric: a name, a `Metric`, or several; the first one is what targets and tables mean.
    prepare: what is fitted once on all samples and applied by every holder; "auto" standardizes
        arrays of bytes, and of numbers whose channels have very different scales.
    augment: changes batches while training, if the configuration says so.
    transform: turns a recording into an input, where devices have wav files of their own.
    classes: the names of classes, such as the folders of a device's own files.
    """

    train: tuple[Tree, Tree] | None = None
    test: tuple[Tree, Tree] | None = None
    owners: Any = None
    test_owners: Any = None
    load: Callable[[str], Dataset] | None = None
    loss: Loss = cross_entropy
    metric: Metric | str | Sequence[Metric | str] = "accuracy"
    prepare: Prepare | str | None = "auto"
    augment: Augment | None = None
    transform: Transform | None = None
    classes: Sequence[str] = ()
    summary: str = ""
    metrics: tuple[Metric, ...] = field(init=False)
    preparation: Prepare | None = field(init=False)
    _given: Dataset | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise TaskError(
                f"loss: given {self.loss!r:.80}, must be a function of outputs and targets, such "
                "as torch.nn.functional.cross_entropy"
            )
        several = bool(self.metric) and isinstance(self.metric, list | tuple)
        given: Any = self.metric if several else (self.metric,)
        metrics = tuple(map(find_metric, given))
        if (self.train is None) == (self.load is None):
            raise TaskError("Task: must have either train=(inputs, targets) or load=function")
        dataset = None if self.train is None else _dataset_of(self)
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "preparation", _preparation(self.prepare, dataset))
        object.__setattr__(self, "_given", dataset)

    def dataset(self, path: str = "") -> Dataset:
        """The samples as they are, before preparation."""
        if self._given is not None:
            return self._given
        return (self.load or no_data)(path)

    def without_data(self) -> Task:
        """The same task for a process that is given its samples otherwise."""
        return replace(self, train=None, test=None, owners=None, test_owners=None, load=no_data)


def _preparation(asked: Prepare | str | None, given: Dataset | None) -> Prepare | None:
    if asked not in (None, "auto") and not isinstance(asked, Prepare):
        raise TaskError(f'prepare: given {asked!r:.80}, must be "auto", None or a Prepare')
    if isinstance(asked, Prepare):
        return asked
    is_raw = asked == "auto" and given is not None and is_unscaled(given.train)
    return STANDARDIZE if is_raw else None


def no_data(_path: str) -> Dataset:
    """The dataset of a task that is given its samples otherwise."""
    raise TaskError("this task has no samples of its own")


def _dataset_of(task: Task) -> Dataset:
    """The samples that were given as arrays."""
    for name in ("train", "test"):
        pair = getattr(task, name)
        if pair is not None and (not isinstance(pair, tuple) or len(pair) != 2):
            raise TaskError(f"{name}: given {type(pair).__name__}, must be (inputs, targets)")
    assert task.train is not None  # noqa: S101
    if task.test is not None:
        return make_dataset(task.train, task.test, (task.owners, task.test_owners))
    whole = make_dataset(task.train, task.train, (task.owners, None))
    return hold_out_tenth(whole)


def hold_out_tenth(whole: Dataset) -> Dataset:
    """Every tenth sample, owner after owner, becomes a test sample; an only sample does not."""
    samples, random = whole.train, np.random.default_rng(HOLD_OUT)
    owners = np.zeros(len(samples)) if samples.owners is None else samples.owners.numpy()
    order = random.permutation(len(samples))
    order = order[np.argsort(owners[order], kind="stable")]  # at random within each owner
    _, own, counts = np.unique(owners[order], return_inverse=True, return_counts=True)
    is_test = (np.arange(len(order)) % HELD_OUT == HELD_OUT - 1) & (counts[own] > 1)
    if not is_test.any():
        raise ConfigError(
            [f"test: missing, and {len(samples)} training samples are too few to hold some out; "
             "give test=(inputs, targets)"]
        )  # fmt: skip
    train, test = (torch.from_numpy(np.sort(order[chosen])) for chosen in (~is_test, is_test))
    return Dataset(samples.take(train), samples.take(test), whole.owner_names)


def names() -> list[str]:
    """Every task that can be loaded by name."""
    return [name.replace("_", "-") for name in modules_in("tasks", __path__)]


def find(name: str) -> None:
    """Raise if there is no task of that name; files of arrays are looked for when they are read."""
    if name == IN_MEMORY:
        raise UnknownNameError("the task was given as a Python object; give it again, by run(…)")
    if not name.endswith(".npz") and name not in names():
        raise unknown("task", name, names())


def load(name: str) -> Task:
    """The task of that name, or one of the arrays in a file that ends in .npz."""
    find(name)
    if name.endswith(".npz"):
        return array_task(name)
    module = load_file(__name__, name.replace("-", "_"), "TASK")
    if not isinstance(module.TASK, Task):
        raise UnknownNameError(f"{module.__file__}: TASK must be a Task")
    return module.TASK


def file_of(name: str) -> str:
    """The file of a task, in the package or in a custom folder."""
    return name if name.endswith(".npz") else f"tasks/{name.replace('-', '_')}.py"


def array_task(name: str) -> Task:
    """The task of the arrays in a file."""
    path = Path(name)
    if not path.is_file():
        raise DataMissingError(f"there is no file {path}")
    return task_of(_arrays(path, path.stat().st_mtime_ns), name)


def task_of(dataset: Dataset, name: str) -> Task:
    """The task of some arrays: classes where targets are whole numbers, else numbers to predict."""
    kinds = [leaf.is_floating_point() for leaf in tree_leaves(dataset.train.targets)]
    return Task(
        load=partial(_as_read, dataset, name),
        loss=squared_error if any(kinds) else cross_entropy,
        metric="mae" if any(kinds) else "accuracy",
        prepare=STANDARDIZE,
        summary=Path(name).stem,
    )


@lru_cache(maxsize=1)
def _arrays(path: Path, _changed: int) -> Dataset:
    return read_arrays(path)


def _as_read(dataset: Dataset, name: str, path: str) -> Dataset:
    if path:
        raise ConfigError([f"data.path: given {path!r}, but {name} needs none"])
    return dataset
