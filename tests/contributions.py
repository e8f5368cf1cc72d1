"""Decoded updates of small models, as aggregation gets them."""

from __future__ import annotations

import functools

import torch
from torch import nn

from anycostfl import ElasticModel
from anycostfl.server.aggregate import Contribution
from anycostfl.state import Update


@functools.cache
def small_net() -> ElasticModel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    return ElasticModel(layers, torch.randn(2, 3))


def small_zeros() -> dict[str, torch.Tensor]:
    """A state of the small model in which every parameter is zero."""
    return {n: torch.zeros_like(p) for n, p in small_net().module.named_parameters()}


def random_contribution(alpha: float, density: float, seed: int) -> Contribution:
    """An update as a decoder returns it: zero outside its mask."""
    generator = torch.Generator().manual_seed(seed)
    plan = small_net().plan(alpha)
    values, masks = {}, {}
    for name, _ in small_net().module.named_parameters():
        mask = torch.rand(plan.shapes[name], generator=generator) < density
        values[name] = torch.randn(plan.shapes[name], generator=generator) * mask
        masks[name] = mask
    weight = float(torch.rand(1, generator=generator)) + 0.1
    return Contribution(plan, Update(values, masks), weight)


@functools.cache
def one_layer() -> ElasticModel:
    return ElasticModel(nn.Sequential(nn.Linear(3, 1))[0], torch.randn(2, 3))


def three_weights(values: list[float], sent: list[int]) -> Contribution:
    """An update of the three weights of `one_layer`, with its mask; nothing of the bias."""
    update = Update(
        {"weight": torch.tensor([values]), "bias": torch.zeros(1)},
        {"weight": torch.tensor([sent], dtype=torch.bool), "bias": torch.zeros(1) > 0},
    )
    return Contribution(one_layer().plan(1.0), update, 1.0)
