"""Winograd's convolution against torch's in double precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anycostfl import models
from anycostfl.contrib import winograd
from anycostfl.contrib.winograd import convolve, fast_convolutions
from anycostfl.data.samples import Samples
from anycostfl.device import Training, train
from anycostfl.tasks import Task, no_data

EXACT = 5e-6  # of the sum of all products' sizes; single precision itself is at 1e-7


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def distance(got: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    size = (wanted if scale is None else scale).norm().clamp(min=1e-30)
    return float((got.double() - wanted).norm() / size)


def exactly(
    of: Callable[[Tensor], Tensor], leaves: list[Tensor], back: Tensor, padding: int
) -> list[Tensor]:
    """Output and gradients in double precision, with `of` applied to all that goes in."""
    doubles = [of(leaf.detach().double()).requires_grad_() for leaf in leaves]
    bias = doubles[2] if len(doubles) == 3 else None
    output = F.conv2d(doubles[0], doubles[1], bias, padding=padding)
    return [output.detach(), *torch.autograd.grad(output, doubles, of(back.double()))]


@settings(max_examples=60)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (9, 70, 19, 19))),
    outputs=st.integers(1, 70),
    padding=st.sampled_from([0, 1]),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_output_and_gradients_are_those_of_a_convolution(
    *, shape: tuple[int, ...], outputs: int, padding: int, bias: bool, seed: int
) -> None:
    samples, inputs, height, width = shape
    assume(min(height, width) + 2 * padding >= 3)
    random = torch.Generator().manual_seed(seed)
    layout = torch.channels_last if seed % 2 else torch.contiguous_format
    image = torch.randn(samples, inputs, height, width, generator=random).to(memory_format=layout)
    weight = torch.randn(outputs, inputs, 3, 3, generator=random)
    given_bias = torch.randn(outputs, generator=random) if bias else None
    leaves = [t.requires_grad_() for t in (image, weight, given_bias) if t is not None]
    before = [leaf.detach().clone() for leaf in leaves]

    output = convolve(image, weight, given_bias, padding)
    back = torch.randn(output.shape, generator=random)
    got = [output.detach(), *torch.autograd.grad(output, leaves, back)]

    wanted = exactly(torch.clone, leaves, back, padding)
    scales = exactly(torch.abs, leaves, back, padding)  # a sum may cancel, its error does not
    for ours, theirs, scale in zip(got, wanted, scales, strict=True):
        assert ours.shape == theirs.shape
        assert distance(ours, theirs, scale) < EXACT
    for leaf, held in zip(leaves, before, strict=True):
        assert torch.equal(leaf, held)  # nothing that was given is written to


def test_a_bias_of_one_output_pixel_is_not_written_to() -> None:
    image, weight, bias = torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3), torch.ones(1)
    assert convolve(image, weight, bias).item() == pytest.approx(19)
    assert bias.item() == 1


def test_portions_do_not_show() -> None:
    image, weight = torch.randn(3, 40, 9, 9), torch.randn(33, 40, 3, 3)
    with patch.object(winograd, "PORTION", 5):
        parts = convolve(image, weight, padding=1)
    assert torch.allclose(parts, convolve(image, weight, padding=1), atol=1e-4)


def counted(module: nn.Module, image: Tensor, *, on: bool = True) -> tuple[Tensor, int]:
    """A module's output, and how many of its convolutions went the fast way."""
    with (
        patch.object(winograd, "convolve", side_effect=convolve) as fast,
        fast_convolutions() if on else nullcontext(),
    ):
        output = module(image)
    return output, fast.call_count


@pytest.mark.parametrize(
    ("layer", "fast"),
    [
        (nn.Conv2d(32, 48, 3, padding=1), True),
        (nn.Conv2d(32, 48, 3, bias=False), True),
        (nn.Conv2d(31, 48, 3, padding=1), False),  # narrow
        (nn.Conv2d(32, 48, 3, padding=1, stride=2), False),
        (nn.Conv2d(32, 48, 3, padding=2, dilation=2), False),
        (nn.Conv2d(64, 64, 3, padding=1, groups=2), False),
        (nn.Conv2d(32, 48, 5, padding=2), False),
        (nn.Conv2d(32, 48, (3, 1)), False),
        (nn.Conv2d(32, 48, 3, padding="same"), False),
        (nn.Conv2d(32, 48, 3, padding=1, padding_mode="circular"), True),
        (nn.Conv2d(32, 48, 3, padding=1).double(), False),
    ],
)
def test_only_what_it_can_and_should_do(layer: nn.Conv2d, fast: bool) -> None:
    image = torch.randn(2, layer.in_channels, 8, 8, dtype=layer.weight.dtype)
    output, count = counted(layer, image)
    assert count == fast
    assert distance(output.detach(), layer(image).detach().double()) < EXACT


def test_other_cases_are_left_to_torch() -> None:
    layer, image = nn.Conv2d(32, 48, 3, padding=1), torch.randn(2, 32, 8, 8)
    assert counted(layer, image)[1] == 1
    assert counted(layer, image, on=False)[1] == 0
    assert counted(layer, image[0])[1] == 0  # no batch
    assert counted(layer, image[..., :4])[1] == 0  # small
    with torch.autocast("cpu", torch.bfloat16):
        assert counted(layer, image)[1] == 0
    torch.set_num_threads(2)
    assert counted(layer, image)[1] == 0


class Follows(nn.Module):
    """A convolution whose output is written to in place, and one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        out: Tensor = self.conv(h)
        out += h
        out = checkpoint(self.conv, self.relu(out), use_reentrant=False)
        logits: Tensor = self.head(self.relu(out).mean((2, 3)))
        return logits


def test_what_follows_may_write_in_place_and_recompute() -> None:
    torch.manual_seed(0)
    module, images = Follows(), torch.randn(8, 1, 8, 8)
    plain, fast = (
        train(
            copy.deepcopy(module),
            Samples(images, torch.arange(8) % 3),
            Task(load=no_data),
            Training(0.05, 8, winograd=on),
            3,
        )
        for on in (False, True)
    )
    for name, update in plain.items():
        assert distance(fast[name], update.double()) < 1e-4


def test_another_default_dtype_does_not_matter() -> None:
    image, weight = torch.randn(2, 32, 8, 8), torch.randn(32, 32, 3, 3)
    torch.set_default_dtype(torch.float64)
    try:
        assert convolve(image, weight).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_frozen_layers_have_no_gradients() -> None:
    layer, image = nn.Conv2d(32, 48, 3), torch.randn(2, 32, 8, 8, requires_grad=True)
    layer.requires_grad_(False)
    with fast_convolutions():
        layer(image).sum().backward()
    assert image.grad is not None
    assert layer.weight.grad is None


def test_training_is_close_to_torchs_own_and_repeats_to_the_bit() -> None:
    torch.manual_seed(0)
    module = models.load("vgg9").build()
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    plain, fast, again = (
        train(
            copy.deepcopy(module),
            Samples(images, labels),
            Task(load=no_data),
            Training(0.05, 16, winograd=on),
            3,
        )
        for on in (False, True, True)
    )
    assert all(torch.equal(fast[name], again[name]) for name in fast)
    assert any(not torch.equal(fast[name], plain[name]) for name in fast)
    for name, update in plain.items():
        assert distance(fast[name], update.double()) < 0.02  # pooling may choose another of two
