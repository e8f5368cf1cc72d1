"""Which pixels show which kind of garment: two pieces of clothing on a textured ground, 48 × 48.

Made from the embedded part of Fashion-MNIST: every picture holds two images at random places, the
second in front of the first, on a ground that differs from owner to owner (its brightness, and the
direction and width of its stripes). Targets are one class for each pixel: 0 is the ground, the
others are tops, trousers, dresses and coats, shoes, and bags.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anycostfl import tasks
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset, Samples, make_dataset
from anycostfl.errors import ConfigError
from anycostfl.tasks import Task

Array = Any  # of numpy

SIDE, OWNERS, SEED = 48, 40, 217
KINDS = ("ground", "top", "trousers", "dress or coat", "shoe", "bag")
KIND_OF = np.array([1, 2, 1, 3, 3, 4, 1, 4, 5, 4])  # of the ten classes of Fashion-MNIST
VISIBLE = 30  # from this brightness of 255 on, a pixel is part of the garment


def load(path: str) -> Dataset:
    """Pictures with their masks; the last eight owners are held out."""
    if path:
        raise ConfigError([f"data.path: given {path!r}, but fashion-masks needs none"])
    clothes = tasks.load("embedded").dataset()
    train = _compose(clothes.train, 0, np.arange(OWNERS - 8))
    test = _compose(clothes.test, 1, np.arange(OWNERS))
    return make_dataset(train[:2], test[:2], (train[2], test[2]))


def _compose(clothes: Samples, part: int, owners: Array) -> tuple[Array, Array, Array]:
    """One picture for every two images: pictures, masks and owners."""
    random = np.random.default_rng([SEED, part])
    images, labels = clothes.inputs.numpy()[:, 0], clothes.targets.numpy()
    pairs = random.permutation(len(images)).reshape(-1, 2)
    whose = owners[random.integers(len(owners), size=len(pairs))]
    places = random.integers(0, SIDE - 28 + 1, (len(pairs), 2, 2))
    pictures = _grounds(whose, random)
    masks = np.zeros((len(pairs), SIDE, SIDE), np.uint8)
    for i, pair in enumerate(pairs):
        for image, label, (top, left) in zip(images[pair], labels[pair], places[i], strict=True):
            area = (i, slice(top, top + 28), slice(left, left + 28))
            shown = image >= VISIBLE
            pictures[area][shown] = image[shown]
            masks[area][shown] = KIND_OF[label]
    return pictures[:, None], masks, whose


def _grounds(owners: Array, random: np.random.Generator) -> Array:
    """Stripes and noise in the manner of each picture's owner."""
    styles = np.random.default_rng(SEED).random((OWNERS, 3))[owners]
    angle, width, level = np.pi * styles[:, 0], 2 + 6 * styles[:, 1], 20 + 100 * styles[:, 2]
    y, x = np.mgrid[:SIDE, :SIDE]
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    waves = np.sin(along / width[:, None, None] + random.uniform(0, 6.3, (len(owners), 1, 1)))
    noise = random.normal(0, 12, (len(owners), SIDE, SIDE))
    return (level[:, None, None] + 25 * waves + noise).clip(0, 255).astype(np.uint8)


TASK = Task(
    load=load,
    prepare=STANDARDIZE,
    metric=("iou", "accuracy"),
    summary="garments pixel by pixel, 48×48 grey",
)
