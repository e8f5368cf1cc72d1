"""Strategies: what every device does in a round, within which limits, and what holds it back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import numpy.typing as npt

from anycostfl.checks import AtMost, FloatArray, Interval, OneOf, check_fields


@dataclass(frozen=True, slots=True)
class Caps:
    """The caps on α and β of (P1); those on f belong to each device.

    `upload_ratio` is for methods that plan no β: αβ, what a device uploads relative to S. `claims`
    is for methods that plan from what the whole cohort says: its mean, or its median, which no
    single device moves far; unset, the mean in simulation and the median for real devices.
    """

    alpha_min: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 0.25
    beta_min: Annotated[float, Interval(0.0, 1.0), AtMost("beta_max")] = 0.0
    beta_max: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 1 / 15
    upload_ratio: Annotated[float | None, Interval(0.0, 1.0, open_low=True)] = None
    claims: Annotated[str | None, OneOf(("mean", "median"))] = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Limits(Caps):
    """The caps, and what updates are coded with: a measured codec has a gain of its own."""

    codec: str = "kernel"


class Reason(enum.IntEnum):
    """Why no strategy fits a device's budgets."""

    FEASIBLE = 0
    LATENCY = 1  # even at f^max the smallest strategy takes too long
    ENERGY = 2  # even at f^min the smallest strategy takes too much energy
    BOTH = 3  # fast enough or frugal enough, but not at the same clock
    RADIO = 4  # the smallest upload alone breaks a budget
    MEMORY = 5  # even the narrowest sub-model does not fit

    def __str__(self) -> str:
        return REASON_WORDS[self]


class Binds(enum.IntFlag):
    """The constraints that hold with equality."""

    LATENCY = 1
    ENERGY = 2
    ALPHA_MIN = 4
    ALPHA_MAX = 8
    BETA_MIN = 16
    BETA_MAX = 32
    FREQUENCY_MIN = 64
    FREQUENCY_MAX = 128
    MEMORY = 256

    def words(self) -> list[str]:
        """The constraints as text."""
        return [word for flag, word in BIND_WORDS.items() if flag in self]


OFFERED_WITHIN = 1e-9  # of a limit, relative: rounding differs between processors
REASON_WORDS = {int(reason): reason.name.lower() for reason in Reason}
REASON_WORDS[Reason.BOTH] = "latency and energy"
BIND_WORDS = {flag: str(flag.name).lower().replace("_", " ") for flag in Binds}
"""What a code of a plan means, as text."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one device does this round."""

    alpha: float
    beta: float
    frequency_hz: float
    gain: float
    latency_s: float
    energy_j: float
    work: float


@dataclass(frozen=True, slots=True)
class Offer:
    """What a device that plans itself will do in a round; α, β and clock are 0 if it sits out."""

    alpha: Annotated[float, Interval(0.0, 1.0)]
    beta: Annotated[float, Interval(0.0, 1.0)]
    frequency_hz: Annotated[float, Interval(0.0, 1e18)]
    binds: Annotated[int, Interval(0, 511)]
    reason: Annotated[int, Interval(0, 5)]  # why it sits out, else 0

    @classmethod
    def of(cls, planned: Strategies) -> Offer:
        """What the plan of one device comes to."""
        return cls(
            alpha=float(planned.alpha[0]),
            beta=float(planned.beta[0]),
            frequency_hz=float(planned.frequency_hz[0]),
            binds=int(planned.binds[0]),
            reason=int(planned.reason[0]),
        )

    def problem(self, limits: Limits) -> str:
        """Why a server cannot take this offer; empty if it can."""
        low, high = 1.0 - OFFERED_WITHIN, 1.0 + OFFERED_WITHIN
        if self.reason:
            sits_out = self.alpha == self.beta == self.frequency_hz == 0.0
            return "" if sits_out else "an offer that says both what is done and why it is not"
        if not low * limits.alpha_min <= self.alpha <= 1.0:
            return f"alpha: offered {self.alpha:g}, must be {limits.alpha_min:g} to 1"
        if not low * limits.beta_min <= self.beta <= high * limits.beta_max or self.beta == 0.0:
            ends = f"{limits.beta_min:g} to {limits.beta_max:g}"
            return f"beta: offered {self.beta:g}, must be {ends}"
        return "" if self.frequency_hz > 0 else "frequency_hz: offered 0, must be > 0"


@dataclass(frozen=True, slots=True)
class Strategies:
    """One strategy per device, as arrays; a device that sits out has zeros everywhere.

    `work` is a factor on the local steps: 1 is the configured epochs, 0.5 half of them.

    `quality` is what β is worth with the codec: β itself for the paper's, so that the gain is
    α⁴·quality.

    `latency_floor_s` and `energy_floor_j` are the least time (at f^max) and the least energy (at
    f^min) of any strategy. `least_latency_s` is the least latency budget under which the device
    could take part with its energy budget, raised to the floor if it is below, and
    `least_energy_j` the same with the roles exchanged. `least_memory_bytes` is the peak of the
    narrowest sub-model.
    """

    alpha: FloatArray
    beta: FloatArray
    frequency_hz: FloatArray
    quality: FloatArray
    gain: FloatArray
    latency_s: FloatArray
    energy_j: FloatArray
    latency_slack_s: FloatArray
    energy_slack_j: FloatArray
    feasible: npt.NDArray[np.bool_]
    reason: npt.NDArray[np.uint8]
    binds: npt.NDArray[np.uint16]
    least_latency_s: FloatArray
    least_energy_j: FloatArray
    latency_floor_s: FloatArray
    energy_floor_j: FloatArray
    least_memory_bytes: FloatArray
    work: FloatArray

    def __len__(self) -> int:
        return len(self.alpha)

    def __getitem__(self, device: int) -> Strategy:
        return Strategy(*(float(getattr(self, item.name)[device]) for item in fields(Strategy)))
