"""Splits are partitions, and look as they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.data.samples import Samples
from anycostfl.data.split import Data, split_samples
from anycostfl.errors import ConfigError

KINDS = ("iid", "dirichlet", "shards", "skew", "owner")


def samples_with(count: int, owners: int = 40) -> Samples:
    labels = torch.arange(count) % 10
    return Samples(torch.zeros(count, 1), labels, torch.arange(count) % owners)


def parts_of(
    kind: str, samples: Samples, devices: int, seed: int = 0, **more: float
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    how = Data("any", partition=kind, **more)  # type: ignore[arg-type]
    return split_samples(how, samples, devices, np.random.default_rng(seed))


@given(st.sampled_from(KINDS), st.integers(1, 12), st.integers(0, 5))
def test_every_split_is_a_partition(kind: str, devices: int, seed: int) -> None:
    parts = parts_of(kind, samples_with(2000), devices, seed, concentration=0.5)
    assert len(parts) == devices
    assert sorted(np.concatenate(parts).tolist()) == list(range(2000))
    assert min(map(len, parts)) >= 1


@given(st.sampled_from(("iid", "skew", "shards")), st.integers(1, 40))
def test_equal_sizes_differ_by_one_sample_per_piece(kind: str, devices: int) -> None:
    sizes = list(map(len, parts_of(kind, samples_with(400), devices)))
    assert max(sizes) - min(sizes) <= 2


def test_a_small_concentration_is_more_uneven() -> None:
    def unevenness(kind: str, concentration: float) -> float:
        samples = samples_with(6000)
        parts = parts_of(kind, samples, 20, concentration=concentration)
        labels = samples.targets.numpy()
        shares = np.stack([np.bincount(labels[p], minlength=10) / len(p) for p in parts])
        return float(shares.std())

    for kind in ("dirichlet", "skew"):
        assert unevenness(kind, 0.3) > 2 * unevenness(kind, 10)


def test_a_device_of_two_shards_has_few_classes() -> None:
    samples = samples_with(2000)
    for part in parts_of("shards", samples, 20, shards=2):
        assert len(torch.unique(samples.targets[part])) <= 4
    assert len(torch.unique(samples.targets[parts_of("shards", samples, 10, shards=1)[0]])) <= 2


def test_owners_stay_whole_and_loads_are_even() -> None:
    owners = torch.tensor([5] * 10 + [7] * 6 + [9] * 5 + [11] * 1)
    samples = Samples(torch.zeros(22, 1), torch.zeros(22), owners)
    one_each = parts_of("owner", samples, 4)
    assert [len(part) for part in one_each] == [10, 6, 5, 1]
    two = parts_of("owner", samples, 2)
    assert sorted(map(len, two)) == [11, 11]
    assert all(len(set(owners[p].tolist()) & set(owners[q].tolist())) == 0 for p, q in [two])


@pytest.mark.parametrize(
    ("kind", "samples", "devices", "told"),
    [
        ("iid", samples_with(5), 6, "devices: given 6, must be at most 5"),
        ("owner", samples_with(50, owners=3), 4, "fleet.devices: given 4, must be at most 3"),
        ("owner", Samples(torch.zeros(5), torch.zeros(5)), 2, "the data does not name owners"),
        ("dirichlet", Samples(torch.zeros(50), torch.rand(50)), 2, "not one class for each"),
        ("skew", Samples(torch.zeros(50), torch.zeros(50, 3).long()), 2, "must be iid or owner"),
        ("shards", samples_with(30), 20, "data.shards: given 2 for 20 devices, must be at most 1"),
    ],
)
def test_impossible_splits_say_why(kind: str, samples: Samples, devices: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parts_of(kind, samples, devices)
