"""Simulated attackers, for experiments with robust aggregation (docs/security.md).

sign-flip   the opposite of what was learned
scale       a hundred times what was learned
random      noise, ten times as large
poison      only the last quarter of every layer's channels, which few devices hold, so that
            their mean is the attackers'; all of the update's size goes there
inflate     noise on a few channels, large enough to win the next sort of the channels
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from anycostfl.config import Attack
from anycostfl.data.samples import Samples
from anycostfl.device import DeviceRuntime, Job, Trained, learn_honestly
from anycostfl.errors import ConfigError
from anycostfl.shrink import SubModel
from anycostfl.state import State

ATTACKERS = 301  # the purpose of the generator that chooses them


def _noise(like: Tensor, size: float, random: torch.Generator) -> Tensor:
    return size * torch.randn(like.shape, generator=random)


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _poison(tensor: Tensor, random: torch.Generator) -> Tensor:
    poisoned = torch.zeros_like(tensor)
    rows = max(1, len(tensor) // 4)
    size = _rms(tensor) * (len(tensor) / rows) ** 0.5
    poisoned[-rows:] = _noise(poisoned[-rows:], size, random)
    return poisoned


def _inflate(tensor: Tensor, random: torch.Generator) -> Tensor:
    inflated = tensor.clone()
    rows = max(1, len(tensor) // 16)
    inflated[-rows:] = _noise(inflated[-rows:], 50 * _rms(tensor), random)
    return inflated


ATTACKS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "sign-flip": lambda tensor, _: -tensor,
    "scale": lambda tensor, _: 100 * tensor,
    "random": lambda tensor, random: _noise(tensor, 10 * _rms(tensor), random),
    "poison": _poison,
    "inflate": _inflate,
}


@dataclass(frozen=True, slots=True)
class Attackers:
    """Which devices attack, and how; they train as others do and send something else."""

    kinds: Mapping[int, str]

    def learn(self, runtime: DeviceRuntime, sub: SubModel, samples: Samples, job: Job) -> Trained:
        """The update of local training, corrupted if the device is an attacker."""
        trained = learn_honestly(runtime, sub, samples, job)
        kind = self.kinds.get(job.device)
        return replace(trained, update=corrupt(trained.update, kind, job.seed)) if kind else trained


def choose_attackers(attack: Attack, devices: int, seed: int) -> Attackers | None:
    """Which devices attack, if any; the same in every round."""
    if attack.kind == "none":
        return None
    order = np.random.default_rng([seed, ATTACKERS]).permutation(devices)
    chosen = order[: round(attack.share * devices)].tolist()
    return Attackers(dict.fromkeys(chosen, attack.kind))


def corrupt(update: State, kind: str, seed: int) -> dict[str, Tensor]:
    """What an attacker sends instead of its update."""
    random = torch.Generator().manual_seed(seed)
    rows = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in update.items()}
    corrupted = {name: ATTACKS[kind](tensor, random) for name, tensor in rows.items()}
    return {name: tensor.view(update[name].shape) for name, tensor in corrupted.items()}


def reject_attacks(attack: Attack) -> None:
    """Refuse an attack where it would not take place: only simulated devices attack."""
    if attack.kind != "none":
        raise ConfigError(
            [f"attack.kind: given {attack.kind}, must be none: only simulated devices attack"]
        )
