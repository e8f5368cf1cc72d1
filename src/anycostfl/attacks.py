"""Devices that lie, for experiments with robust aggregation (docs/security.md).

sign-flip   the opposite of what was learned
scale       a hundred times what was learned
random      noise, ten times as large
poison      only the last quarter of every layer's channels, which few devices hold, so that
their mean is the liars'; all of the update's size goes there
inflate     noise on a few channels, large enough to win the next sort of the channels
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from anycostfl.checks import Interval, OneOf, check_fields
from anycostfl.errors import ConfigError

Values = Mapping[str, Tensor]
LIARS = 301  # the purpose of the generator that chooses them


def _noise(like: Tensor, size: float, random: torch.Generator) -> Tensor:
    return size * torch.randn(like.shape, generator=random)


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _poison(tensor: Tensor, random: torch.Generator) -> Tensor:
    lie = torch.zeros_like(tensor)
    rows = max(1, len(tensor) // 4)
    lie[-rows:] = _noise(lie[-rows:], _rms(tensor) * (len(tensor) / rows) ** 0.5, random)
    return lie


def _inflate(tensor: Tensor, random: torch.Generator) -> Tensor:
    lie = tensor.clone()
    rows = max(1, len(tensor) // 16)
    lie[-rows:] = _noise(lie[-rows:], 50 * _rms(tensor), random)
    return lie


LIES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "sign-flip": lambda tensor, _: -tensor,
    "scale": lambda tensor, _: 100 * tensor,
    "random": lambda tensor, random: _noise(tensor, 10 * _rms(tensor), random),
    "poison": _poison,
    "inflate": _inflate,
}


@dataclass(frozen=True, slots=True)
class Attack:
    """How many devices lie, and how."""

    kind: Annotated[str, OneOf(("none", *LIES))] = "none"
    share: Annotated[float, Interval(0.0, 1.0)] = 0.2

    def __post_init__(self) -> None:
        check_fields(self)


def check_honest(attack: Attack) -> None:
    """Refuse an attack where it would not take place: only simulated devices lie."""
    if attack.kind != "none":
        raise ConfigError(
            [f"attack.kind: given {attack.kind}, allowed none: only simulated devices lie"]
        )


def liars(attack: Attack, devices: int, seed: int) -> dict[int, str]:
    """Which devices lie, and how; the same in every round."""
    if attack.kind == "none":
        return {}
    order = np.random.default_rng([seed, LIARS]).permutation(devices)
    return dict.fromkeys(order[: round(attack.share * devices)].tolist(), attack.kind)


def corrupt(update: Values, kind: str, seed: int) -> dict[str, Tensor]:
    """What a liar sends instead of its update."""
    random = torch.Generator().manual_seed(seed)
    rows = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in update.items()}
    lies = {name: LIES[kind](tensor, random) for name, tensor in rows.items()}
    return {name: lie.view(update[name].shape) for name, lie in lies.items()}
