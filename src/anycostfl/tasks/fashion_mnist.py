"""Fashion-MNIST (Xiao et al., 2017): 60,000 and 10,000 grey images of clothes, 10 classes."""

from __future__ import annotations

from anycostfl.data.files import find_folder, missing
from anycostfl.data.idx import CLOTHES, read_idx_folder
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset
from anycostfl.tasks import Task

PLACES = ("/usr/share/datasets/fashion-mnist", "fashion-mnist")
"""Where Debian's `dataset-fashion-mnist` puts it, and what its folder is called elsewhere."""


def load(path: str) -> Dataset:
    """The four files of a folder."""
    folder = find_folder(path, PLACES, lambda f: (f / "train-images-idx3-ubyte.gz").is_file())
    if folder is None:
        raise missing(
            "Fashion-MNIST",
            path,
            "Install Debian's package dataset-fashion-mnist, or put its four .gz files into a "
            "folder (the embedded part needs nothing: --set data.name=embedded) and",
        )
    return read_idx_folder(folder)


TASK = Task(load=load, prepare=STANDARDIZE, classes=CLOTHES, summary="clothes, 28×28 grey")
