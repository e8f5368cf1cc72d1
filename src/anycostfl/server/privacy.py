"""Differential privacy of a whole device: updates are clipped, sums or updates get noise.

central   ũ = (1/K)·(Σ_i clip_C(u_i) + N(0, (σC)²)),   clip_C(u) = u·min(1, C/‖u‖₂)
local     u_i ← clip_C(u_i) + N(0, (σC)²) on the device, before the update is encoded

**Sensitivity.** Let two fleets differ in one device: in one its data is whatever it is, in the
other its reply is missing. K, the size of the cohort, is fixed by the configuration, and who is
asked to take part does not depend on data.

*Central.* A decoded update has a value for every element of its sub-model and 0 where nothing was
sent. Its place in global coordinates is an injection of elements, so its norm there is the same,
whatever its width and mask: after clipping at most C. The sum of all moves by at most C. It is
divided by K, not by how many sent an element: the masks of kernels depend on data, so a mean over
the senders of an element has no useful bound, for an element that a single device sends is its own.
For the same reason all weigh the same, and no rule compares updates with each other (`clip` and
`agree` of `Robustness` let one device change how others count; they are not used or refused). Noise
goes to all elements, also those that nobody sent, so a mask shows nothing. Rounds compose: a device
that takes part m times has met m Gaussian mechanisms of noise multiplier σ. It sees models, which
are post-processing: momentum, the sort of channels and the compressed downlink cost nothing.

*Local.* Two updates of one device differ by at most 2C after clipping, so one reply is a Gaussian
mechanism of noise multiplier σ/2. Codec, mask and widths come after the noise and cost nothing.

**Refused.** Error feedback: the residual returns what clipping cut off in later rounds, so C does
not bound what one round's data adds to the model. Sums for the preparation of samples, sample
counts, seconds and metrics that devices report are not covered; with `data.evaluate = "devices"` a
private run is refused. Being drawn is public, for the seed is, so no amplification is counted.

Noise is drawn in float64 and is no defence against an attack on its last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from anycostfl.checks import Interval, OneOf, Positive, check_fields
from anycostfl.errors import MissingExtraError
from anycostfl.server.aggregate import Contribution, Move
from anycostfl.shrink.widths import add
from anycostfl.state import State

NOISE = 401  # the purpose of the generator of noise in simulations


@dataclass(frozen=True, slots=True)
class Privacy:
    """Where noise is added, and how much; ε follows for every round (`epsilon`).

    clip: C, the norm to which updates are scaled down.
    noise: σ, the noise as a multiple of C.
    delta: δ, at which ε is told.
    secret: draw noise from the system instead of the seed, which devices know; unset, from the
        seed in simulation and from the system for real devices.
    """

    mode: Annotated[str, OneOf(("none", "central", "local"))] = "none"
    clip: Positive = 1.0
    noise: Positive = 1.0
    delta: Annotated[float, Interval(1e-15, 0.5)] = 1e-5
    secret: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def multiplier(self) -> float:
        """The noise of one reply or round relative to its sensitivity; infinite if none is seen."""
        return {"central": self.noise, "local": self.noise / 2}.get(self.mode, math.inf)

    def spent(self, rounds: int) -> float | None:
        """ε at δ of a device that took part in that number of rounds; None without privacy."""
        if self.mode == "none":
            return None
        return epsilon(self.multiplier, rounds, self.delta) if rounds else 0.0


@functools.lru_cache(maxsize=4096)
def epsilon(multiplier: float, rounds: int, delta: float) -> float:
    """ε at δ of so many Gaussian mechanisms; their composition is one of multiplier σ/√m."""
    try:
        from dp_accounting import dp_event  # noqa: PLC0415 - optional
        from dp_accounting.pld import PLDAccountant  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("privacy needs: pip install 'anycostfl[privacy]'") from error
    accountant = PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(multiplier / math.sqrt(rounds)))
    return float(accountant.get_epsilon(delta))


def clip_to(values: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Tensors scaled down together, if they are longer than a norm."""
    length = math.sqrt(sum(float(v.double().square().sum()) for v in values.values()))
    scale = min(1.0, norm / length) if length > 0 else 1.0
    return {name: v.double() * scale for name, v in values.items()}  # rounded, it were longer


def private_means(
    like: State,
    contributions: Iterable[Contribution],
    privacy: Privacy,
    cohort: int,
    random: torch.Generator,
) -> dict[str, Move]:
    """The clipped updates' sum with noise, divided by the size of a cohort, on all of `like`."""
    sums = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in like.items()}
    for one in contributions:
        for name, values in clip_to(one.update.values, privacy.clip).items():
            add(sums[name], one.plan.index[name], values, 1.0)
    scale = privacy.noise * privacy.clip
    moves = {}
    for name, total in sums.items():
        drawn = torch.randn(total.shape, generator=random, dtype=torch.float64)
        moves[name] = Move(
            (total + scale * drawn) / cohort, torch.ones_like(total, dtype=torch.bool)
        )
    return moves


def privatise(update: State, privacy: Privacy, random: torch.Generator) -> dict[str, Tensor]:
    """A device's update, clipped and with noise on every element, before it is encoded."""
    scale = privacy.noise * privacy.clip
    clipped = clip_to(update, privacy.clip)
    return {
        name: (v + scale * torch.randn(v.shape, generator=random, dtype=v.dtype)).to(
            update[name].dtype
        )
        for name, v in clipped.items()
    }


def system_noise() -> torch.Generator:
    """A generator that nobody can repeat."""
    random = torch.Generator()
    random.seed()
    return random
