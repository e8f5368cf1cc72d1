"""Samples of any structure; what a person gives is checked, each mistake with its own sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anycostfl.data.samples import (
    Dataset,
    call,
    describe,
    hold_out,
    make_dataset,
    make_samples,
)
from anycostfl.errors import ConfigError


def test_samples_of_any_structure_are_picked_together() -> None:
    inputs = {"tokens": torch.arange(12).view(4, 3), "pair": (torch.ones(4, 2), torch.zeros(4))}
    samples = make_samples(inputs, torch.arange(4), [7, 7, 9, 9])
    some = samples.take(torch.tensor([3, 0]))
    assert len(some) == 2
    assert some.inputs["tokens"].tolist() == [[9, 10, 11], [0, 1, 2]]
    assert some.inputs["pair"][0].shape == (2, 2)
    assert some.targets.tolist() == [3, 0]
    assert some.owners is not None
    assert some.owners.tolist() == [9, 7]


def test_several_inputs_go_in_by_position_and_a_dict_by_name() -> None:
    class Net(nn.Module):
        def forward(self, one: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
            return one if other is None else one - other

    one, other = torch.tensor([3.0]), torch.tensor([1.0])
    assert call(Net(), one) == 3
    assert call(Net(), (one, other)) == 2
    assert call(Net(), {"other": other, "one": one}) == 2


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (np.zeros((2, 3), np.float64), torch.float32),
        (np.zeros((2, 3), ">f4"), torch.float32),
        (np.zeros((2, 3), np.float16), torch.float32),
        (np.zeros((2, 3), ">i2"), torch.int64),
        (np.zeros((2, 3), np.uint16), torch.int64),
        (np.zeros((2, 3), np.uint8), torch.uint8),
        (np.zeros((2, 3), bool), torch.bool),
        ([[1, 2], [3, 4]], torch.int64),
        (torch.zeros(2, 3, dtype=torch.float64), torch.float32),
        (torch.zeros(2, 3, dtype=torch.int32), torch.int64),
    ],
)
def test_numbers_become_types_that_models_take(given: Any, kind: torch.dtype) -> None:
    assert make_samples(given, [0, 1]).inputs.dtype is kind


def test_targets_become_types_that_losses_take() -> None:
    assert make_samples(np.zeros(2), np.zeros(2, np.uint8)).targets.dtype is torch.int64
    assert make_samples(np.zeros(2), np.array([True, False])).targets.tolist() == [1.0, 0.0]


def bad(value: float) -> np.ndarray[Any, Any]:
    array = np.zeros((5, 2, 3))
    array[3, 1, 2] = value
    return array


@pytest.mark.parametrize(
    ("inputs", "targets", "owners", "told"),
    [
        (bad(np.nan), np.zeros(5), None, "data inputs: sample 3 holds nan, must be finite"),
        (bad(1e30), np.zeros(5), None, "sample 3 holds 1e"),
        (np.zeros((5, 2)), np.zeros(4), None, "given 5 inputs, 4 targets; must be as many of each"),
        (np.zeros((5, 2)), np.zeros(5), [1, 2], "5 inputs, 5 targets, 2 owners"),
        (np.zeros((5, 2)), np.zeros(5), np.zeros(5), "owners: given float64"),
        (np.array(["a", "b"]), np.zeros(2), None, "data inputs: given <U1, must be numbers"),
        (np.zeros(2, complex), np.zeros(2), None, "data inputs: given complex128"),
        ([[1, 2], [3]], np.zeros(2), None, "data inputs: .* as many for each sample"),
        (np.float32(3), np.zeros(1), None, "inputs: given one number, must be one for each"),
        (np.zeros((5, 0)), np.zeros(5), None, r"given shape \(5, 0\), must hold values"),
        ({"a": bad(np.inf)}, np.zeros(5), None, r"inputs\['a'\]: sample 3 holds inf"),
    ],
)
def test_what_cannot_be_used_is_named(inputs: Any, targets: Any, owners: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_samples(inputs, targets, owners)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        make_dataset((bad(np.nan), ["x"] * 5), (np.zeros((2, 3)), np.zeros(2)))
    assert len(raised.value.problems) == 2


def test_tests_look_like_training() -> None:
    with pytest.raises(ConfigError, match=r"test inputs: given float32 \(4,\), must be float32"):
        make_dataset((np.zeros((5, 3)), np.zeros(5)), (np.zeros((2, 4)), np.zeros(2)))


def test_owners_have_one_number_in_both_parts() -> None:
    train, test = ["ann", "bob", "ann"], ["cid", "bob"]
    dataset = make_dataset((np.zeros(3), np.zeros(3)), (np.zeros(2), np.zeros(2)), (train, test))
    assert dataset.owner_names == ("ann", "bob", "cid")
    assert dataset.train.owners is not None
    assert dataset.test.owners is not None
    assert dataset.train.owners.tolist() == [0, 1, 0]
    assert dataset.test.owners.tolist() == [2, 1]


def test_samples_are_held_out_or_dropped() -> None:
    train = make_samples(np.arange(6), np.arange(6), [0, 0, 1, 1, 2, 2])
    dataset = Dataset(train, train.take(slice(0, 1)))
    mask = torch.tensor([False, True] * 3)
    moved = hold_out(dataset, mask)
    assert moved.train.inputs.tolist() == [0, 2, 4]
    assert moved.test.inputs.tolist() == [1, 3, 5, 0]
    assert moved.test.owners is not None
    assert moved.test.owners.tolist() == [0, 1, 2, 0]
    assert len(hold_out(dataset, mask, drop=True).test) == 1


def test_shapes_are_described() -> None:
    tree = (torch.zeros(2, 3, 4), {"ids": torch.zeros(2, 5, dtype=torch.long)})
    assert describe(tree) == "[0] float32 (3, 4), [1]['ids'] int64 (5,)"
    assert describe(torch.zeros(2, dtype=torch.uint8)) == "uint8 ()"
