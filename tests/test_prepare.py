"""Preparation is fitted on sums that add up, and applied alike wherever samples are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anycostfl.data.prepare import (
    STANDARDIZE,
    VOCABULARY,
    PreparedModule,
    add_sums,
    is_unscaled,
    prepare_dataset,
)
from anycostfl.data.samples import Dataset, Samples
from anycostfl.errors import ConfigError


def samples_of(inputs: torch.Tensor) -> Samples:
    return Samples(inputs, torch.zeros(len(inputs), dtype=torch.long))


def test_every_channel_has_mean_0_and_deviation_1() -> None:
    inputs = torch.randn(200, 3, 5, 4) * torch.tensor([0.1, 4, 900]).view(1, 3, 1, 1) + 7
    dataset = Dataset(samples_of(inputs), samples_of(inputs[:3]))
    prepared = prepare_dataset(STANDARDIZE, dataset)
    channels = prepared.train.inputs.movedim(1, 0).flatten(1)
    assert torch.allclose(channels.mean(1), torch.zeros(3), atol=1e-4)
    assert torch.allclose(channels.std(1), torch.ones(3), atol=1e-4)
    assert torch.equal(prepared.test.inputs, prepared.train.inputs[:3])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_a_server_fits_the_same_from_the_sums_of_its_devices(sizes: list[int]) -> None:
    inputs = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(1)) * 50 + 20
    whole = STANDARDIZE.fit(STANDARDIZE.measure(samples_of(inputs)))
    parts = [STANDARDIZE.measure(samples_of(part)) for part in torch.split(inputs, sizes)]
    fitted = STANDARDIZE.fit(add_sums(parts))
    assert fitted.keys() == whole.keys()
    assert all(torch.allclose(fitted[name], whole[name], rtol=1e-4) for name in whole)


def test_bytes_are_shares_of_255_and_a_constant_channel_stays_finite() -> None:
    inputs = torch.zeros(4, 2, 3, dtype=torch.uint8)
    inputs[:, 0] = torch.tensor([0, 255, 0])
    fitted = STANDARDIZE.fit(STANDARDIZE.measure(samples_of(inputs)))
    assert float(fitted["mean"][0]) == pytest.approx(1 / 3)
    prepared = STANDARDIZE.apply(samples_of(inputs), fitted)
    assert prepared.inputs.isfinite().all()
    assert not prepared.inputs[:, 1].any()


def test_whole_numbers_stay_and_each_input_has_its_own_statistics() -> None:
    tree = {"ids": torch.arange(6).view(3, 2), "size": torch.tensor([[1.0], [2.0], [6.0]])}
    samples = Samples(tree, torch.zeros(3))
    prepared = STANDARDIZE.apply(samples, STANDARDIZE.fit(STANDARDIZE.measure(samples)))
    assert torch.equal(prepared.inputs["ids"], tree["ids"])
    assert abs(float(prepared.inputs["size"].mean())) < 1e-6


def test_other_channels_than_fitted_are_refused() -> None:
    fitted = STANDARDIZE.fit(STANDARDIZE.measure(samples_of(torch.randn(5, 3))))
    with pytest.raises(ConfigError, match="given 2 channels, must have 3"):
        STANDARDIZE.apply(samples_of(torch.randn(5, 2)), fitted)


def test_characters_are_places_in_a_common_vocabulary() -> None:
    def text(words: str) -> Samples:
        codes = torch.tensor([list(words.encode())])
        return Samples(codes[:, :-1], codes[:, 1:])

    fitted = VOCABULARY.fit(add_sums([VOCABULARY.measure(text(t)) for t in ("abba", "cab ")]))
    assert bytes(fitted["codes"].tolist()) == b" abc"
    prepared = VOCABULARY.apply(text("cabx"), fitted)
    assert prepared.inputs.tolist() == [[4, 2, 3]]
    assert prepared.targets.tolist() == [[2, 3, 0]]  # x is unknown


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        (torch.randn(300, 3), False),
        (torch.randn(300, 3) * torch.tensor([1, 1, 200.0]), True),
        (torch.randn(300, 3) + torch.tensor([0, 50.0, 0]), True),
        (torch.cat([torch.randn(300, 2), torch.ones(300, 1)], 1), False),
        (torch.randint(255, (20, 1, 4, 4), dtype=torch.uint8), True),
        (torch.randint(64, (20, 9)), False),
    ],
)
def test_unusual_scales_are_noticed(inputs: torch.Tensor, *, wanted: bool) -> None:
    assert is_unscaled(samples_of(inputs)) is wanted


def test_a_prepared_module_takes_what_the_task_has() -> None:
    inputs = torch.from_numpy(np.random.default_rng(0).normal(40, 9, (50, 4))).float()
    fitted = STANDARDIZE.fit(STANDARDIZE.measure(samples_of(inputs)))
    module = nn.Linear(4, 2)
    wanted = module(STANDARDIZE.apply(samples_of(inputs), fitted).inputs)
    assert torch.equal(PreparedModule(module, STANDARDIZE, fitted)(inputs), wanted)
