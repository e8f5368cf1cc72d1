"""Datasets of samples: inputs and targets as trees of tensors that share their first dimension.

A tree is a tensor, or a tuple or dict of trees. A sample may be an image, a window of sensor
values, a row of a table, token ids, or a pair of image and mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from anycostfl.errors import ConfigError
from anycostfl.state import Samples, State, Tree, call

__all__ = [
    "Dataset",
    "Samples",
    "Tree",
    "call",
    "describe",
    "hold_out",
    "make_dataset",
    "make_samples",
    "places",
]

LARGEST = 1e18  # of a number; its square is finite in single precision


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples to train on and to test on; an owner has the same number in both.

    `fitted` is what they were prepared by (`prepare`), if they were.
    """

    train: Samples
    test: Samples
    owner_names: Sequence[str] = ()
    fitted: State = field(default_factory=dict)


def hold_out(dataset: Dataset, held: Tensor, *, drop: bool = False) -> Dataset:
    """A dataset whose training samples of a mask become test samples, or are left out."""
    train, moved = dataset.train.take(~held), dataset.train.take(held)
    test = dataset.test if drop else _joined(moved, dataset.test)
    return replace(dataset, train=train, test=test)


def _joined(one: Samples, other: Samples) -> Samples:
    def cat(*leaves: Tensor) -> Tensor:
        return torch.cat(leaves)

    both = one.owners is not None and other.owners is not None
    return Samples(
        tree_map(cat, one.inputs, other.inputs),
        tree_map(cat, one.targets, other.targets),
        torch.cat([one.owners, other.owners]) if both else None,  # type: ignore[list-item]
    )


def places(tree: Tree) -> list[tuple[str, Any]]:
    """The tensors of a tree, each with its place in it: "" if the tree is one tensor."""
    found, _ = tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, list))
    return [(keystr(path), leaf) for path, leaf in found]


def describe(tree: Tree) -> str:
    """Type and shape of one sample, for messages."""
    return ", ".join(f"{place} {_describe_leaf(leaf)}".strip() for place, leaf in places(tree))


def _describe_leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):  # models may return anything beside tensors
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape[1:])}"


# --- what a person gives --------------------------------------------------------------------------


def make_dataset(
    train: tuple[Tree, Tree],
    test: tuple[Tree, Tree],
    owners: tuple[Any, Any] = (None, None),
) -> Dataset:
    """A dataset from arrays, tensors or lists; ConfigError lists all that is wrong with them."""
    problems: list[str] = []
    names, numbers = _number(owners)
    made = [
        _samples(part, numbers[i], what, problems)
        for i, (what, part) in enumerate((("train", train), ("test", test)))
    ]
    if not problems:
        problems += _differences(*made)
    if problems:
        raise ConfigError(problems)
    return Dataset(made[0], made[1], names)


def make_samples(inputs: Tree, targets: Tree, owners: Any = None, what: str = "data") -> Samples:
    """Samples from arrays, tensors or lists; ConfigError lists all that is wrong with them."""
    problems: list[str] = []
    samples = _samples((inputs, targets), owners, what, problems)
    if problems:
        raise ConfigError(problems)
    return samples


def _differences(train: Samples, test: Samples) -> list[str]:
    """How test samples differ from training samples; lengths of sequences may."""
    pairs = (("inputs", train.inputs, test.inputs), ("targets", train.targets, test.targets))
    return [
        f"test {key}: given {describe(other)}, must be {describe(one)} as in training"
        for key, one, other in pairs
        if len(test) and describe(one) != describe(other)
    ]


def _number(owners: tuple[Any, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Names of all owners, and each sample's owner by its place among them."""
    given = [None if one is None else np.asarray(one) for one in owners]
    present = [one for one in given if one is not None]
    if not present or any(one.ndim != 1 or one.dtype.kind not in "iuUS" for one in present):
        return (), given
    kinds = np.unique(np.concatenate(present))
    numbers = [None if one is None else np.searchsorted(kinds, one) for one in given]
    return tuple(map(str, kinds)), numbers


def _samples(pair: tuple[Tree, Tree], owners: Any, what: str, problems: list[str]) -> Samples:
    """The samples as tensors, after adding to the problems."""
    before = len(problems)
    trees = [_tensors(t, f"{what} {k}", problems) for k, t in zip(KEYS, pair, strict=True)]
    trees[1] = tree_map(_as_target, trees[1])
    counts = {
        f"{key}{place}": len(leaf)
        for key, tree in zip(KEYS, trees, strict=True)
        for place, leaf in places(tree)
        if leaf.dim()
    }
    owned = None
    if owners is not None:
        owned = _tensor(owners, f"{what} owners", problems)
        if owned.dim() != 1 or owned.is_floating_point():
            problems.append(
                f"{what} owners: given {np.asarray(owners).dtype} of shape {tuple(owned.shape)}, "
                "must be one whole number or name for each sample"
            )
        else:
            counts["owners"] = len(owned)
    if len(problems) == before and len(set(counts.values())) > 1:
        told = ", ".join(f"{count} {key}" for key, count in counts.items())
        problems.append(f"{what}: given {told}; must be as many of each")
    return Samples(trees[0], trees[1], owned)


KEYS = ("inputs", "targets")


def _as_target(tensor: Tensor) -> Tensor:
    """Classes as losses take them, and a yes or no as a number."""
    if tensor.dtype == torch.bool:
        return tensor.float()
    return tensor.long() if tensor.dtype == torch.uint8 else tensor


def _tensors(tree: Tree, what: str, problems: list[str]) -> Tree:
    """The tree with every array as a tensor in main memory."""
    leaves = iter([_tensor(leaf, f"{what}{place}", problems) for place, leaf in places(tree)])
    return tree_map(lambda _: next(leaves), tree, is_leaf=lambda node: isinstance(node, list))


def _tensor(leaf: Any, what: str, problems: list[str]) -> Tensor:
    """An array as a tensor of a type that models and losses take, after adding to the problems."""
    if isinstance(leaf, Tensor):
        tensor = leaf.detach().cpu()
    else:
        try:
            array = np.asarray(leaf)
            if array.dtype.kind not in "biuf":
                raise TypeError(f"{array.dtype}")
        except (TypeError, ValueError) as error:
            problems.append(f"{what}: given {error}, must be numbers, as many for each sample")
            return torch.zeros(0)
        kind = {"f": np.float32, "i": np.int64}.get(array.dtype.kind, array.dtype.type)
        kind = np.int64 if array.dtype.kind == "u" and array.itemsize > 1 else kind
        tensor = torch.from_numpy(np.array(array, kind))
    if tensor.is_floating_point():
        tensor = tensor.float()
    elif tensor.dtype not in (torch.uint8, torch.bool):
        tensor = tensor.long()
    if not tensor.dim():
        problems.append(f"{what}: given one number, must be one for each sample")
    elif len(tensor) and not tensor.numel():
        problems.append(f"{what}: given shape {tuple(tensor.shape)}, must hold values")
    elif tensor.is_floating_point() and not (fine := tensor.abs() < LARGEST).all():
        at = tuple((~fine).nonzero()[0].tolist())
        problems.append(
            f"{what}: sample {at[0]} holds {float(tensor[at]):g}, must be finite and below "
            f"{LARGEST:g}; drop the sample or fill the gap"
        )
    return tensor
