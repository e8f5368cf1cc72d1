"""Adaptive server optimizers: FedAdam and FedYogi (Reddi et al., 2021, Algorithm 2).

    m ← β₁m + (1 − β₁)Δ
    v ← β₂v + (1 − β₂)Δ²                        FedAdam
    v ← v − (1 − β₂)Δ²·sgn(v − Δ²)              FedYogi
    w ← w − η·m / (√v + τ)

β₁ is the server's momentum, Δ what devices agree on, and v begins at τ². As with momentum, an
element that nobody sent neither moves nor changes its m and v: for masked updates, the paper's are
dense. No bias correction, as there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anycostfl.server.aggregate import Move
from anycostfl.state import State

SECOND_DECAY = 0.99  # β₂
FLOOR = 1e-3  # τ, which the authors found best for most tasks


def adapt(
    kind: str, beta: float, moves: Mapping[str, Move], first: State, second: State
) -> tuple[dict[str, Move], dict[str, Tensor], dict[str, Tensor]]:
    """The moves of the optimizer, and its two moments after them; empty before the first round."""
    first, second, found = dict(first), dict(second), {}
    for name, move in moves.items():
        delta = move.step.double()
        m = first.get(name, torch.zeros_like(delta)).double()
        v = second.get(name, torch.full_like(delta, FLOOR**2)).double()
        m = torch.where(move.sent, beta * m + (1 - beta) * delta, m)
        v = torch.where(move.sent, _second(kind, v, delta.square()), v)
        found[name] = Move(torch.where(move.sent, m / (v.sqrt() + FLOOR), 0.0), move.sent)
        first[name], second[name] = m.float(), v.float()
    return found, first, second


def _second(kind: str, v: Tensor, square: Tensor) -> Tensor:
    if kind == "adam":
        return SECOND_DECAY * v + (1 - SECOND_DECAY) * square
    return v - (1 - SECOND_DECAY) * square * torch.sign(v - square)
