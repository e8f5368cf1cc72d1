"""Error feedback: what a payload could not carry is kept and goes with a later one.

    v = u + r[plan],   payload = encode(v),   r[plan] ← v − decode(payload)

The residual r of a device lives in the coordinates of the global model: it moves with the channels
whenever they are sorted, and what a narrow plan does not reach stays until a wider one does.
Nothing decays, so what has been decoded so far plus r is what the device has learnt so far,
whatever its widths were (docs/decisions/0012).

r stays bounded if a payload brings v closer to what has arrived: ‖v − ũ‖ < ‖v‖. An unbiased
quantizer may be too noisy for that. Then encode(s·v) is sent instead, s = ⟨v, ũ⟩ / ‖ũ‖², which is
the best that can be said with the same draws: ‖v − s·ũ‖² = ‖v‖² − ⟨v, ũ⟩² / ‖ũ‖².
"""

from __future__ import annotations

import torch
from torch import Tensor

from anycostfl.methods import Method, Upload
from anycostfl.shrink.widths import WidthPlan, put, take
from anycostfl.state import State

NOISY = 0.75  # s below which a payload is sent anew: then a third of ‖v‖² and more is noise


def encode_with_feedback(
    method: Method, update: State, upload: Upload, residual: State, plan: WidthPlan
) -> tuple[bytes, dict[str, Tensor]]:
    """The payload of a sub-model's update, and the residual that is left after it."""
    wanted = {n: u + take(residual[n], plan.index[n]) for n, u in update.items()}
    payload, sent = _encode(method, wanted, upload)
    scale = _dot(wanted, sent) / max(_dot(sent, sent), 1e-300)
    if 0 < scale < NOISY:
        payload, sent = _encode(method, {n: v * scale for n, v in wanted.items()}, upload)
    left = {name: tensor.clone() for name, tensor in residual.items()}
    for name, value in wanted.items():
        put(left[name], plan.index[name], value - sent[name])
    return payload, left


def no_residual(state: State) -> dict[str, Tensor]:
    """What a device has left over before its first round; like the global state."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _encode(method: Method, update: State, upload: Upload) -> tuple[bytes, State]:
    """A payload, and what the server will read from it."""
    payload = method.encode(update, upload)
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    return payload, method.decode(payload, shapes, upload).values


def _dot(one: State, other: State) -> float:
    return sum(float((t.double() * other[n]).sum()) for n, t in one.items())
