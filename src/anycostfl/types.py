"""The records that travel between layers: devices, strategies, updates, rounds."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from anycostfl.checks import (
    POSITIVE,
    AtLeastZero,
    AtMost,
    Count,
    FloatArray,
    Interval,
    Positive,
    PositiveArray,
    check_fields,
)
from anycostfl.errors import ConfigError
from anycostfl.state import Update, with_full_mask

counting_all = with_full_mask  # like Update, only for codec/ until its imports are merged

__all__ = ["Update", "counting_all"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture of `anycostfl.models`: how to build it and what it eats."""

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    summary: str


@dataclass(frozen=True, slots=True)
class Scale:
    """What images are normalised by, each colour: minus `mean`, divided by `std`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round of the full model asks of a device: W per sample, S per upload, τ."""

    flops_per_sample: Positive
    size_bits: Positive
    epochs: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Caps:
    """The caps on α and β of (P1); those on f belong to each device.

    `rate` is for methods that plan no β: αβ, what a device uploads relative to S.
    """

    alpha_min: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 0.25
    beta_min: Annotated[float, Interval(0.0, 1.0), AtMost("beta_max")] = 0.0
    beta_max: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 1 / 15
    rate: Annotated[float | None, Interval(0.0, 1.0, open_low=True)] = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Limits(Caps):
    """The caps, and what updates are coded with: a measured codec has a gain of its own."""

    codec: str = "kernel"


@dataclass(frozen=True, slots=True)
class Devices:
    """Many devices as one array per quantity; build it with `make_devices`.

    `overhead` is what does not shrink with the width, as a share of the full model's cycles.
    """

    samples: PositiveArray
    flops_per_cycle: PositiveArray
    energy_coefficient: PositiveArray
    frequency_min_hz: Annotated[PositiveArray, AtMost("frequency_max_hz")]
    frequency_max_hz: PositiveArray
    rate_bps: PositiveArray
    power_w: PositiveArray
    latency_s: PositiveArray
    energy_j: PositiveArray
    overhead: Annotated[FloatArray, AtLeastZero]

    def __post_init__(self) -> None:
        check_fields(self)

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, index: slice | npt.NDArray[np.intp]) -> Devices:
        """The devices at these positions."""
        return Devices(*(getattr(self, item.name)[index] for item in fields(self)))


def make_devices(**quantities: npt.ArrayLike) -> Devices:
    """Devices from numbers and arrays, every one repeated to the common length; no overhead."""
    given = {"overhead": 0.0, **quantities}
    columns = {name: np.asarray(value, np.float64) for name, value in given.items()}
    several = {name: c.shape for name, c in columns.items() if c.shape not in ((), (1,))}
    shape, *others = {*several.values()} or {(1,)}
    if others or len(shape) > 1:
        words = ", ".join(f"{name} {shape}" for name, shape in several.items())
        raise ConfigError([f"given shapes {words}; allowed one length for all"], "devices")
    return Devices(**{name: np.broadcast_to(column, shape) for name, column in columns.items()})


class Reason(enum.IntEnum):
    """Why a device sits a round out."""

    FEASIBLE = 0
    LATENCY = 1  # even at f^max the smallest strategy takes too long
    ENERGY = 2  # even at f^min the smallest strategy takes too much energy
    BOTH = 3  # fast enough or frugal enough, but not at the same clock
    RADIO = 4  # the smallest upload alone breaks a budget

    def __str__(self) -> str:
        return "latency and energy together" if self is Reason.BOTH else self.name.lower()


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

    def words(self) -> list[str]:
        """The constraints in words."""
        return [str(flag.name).lower().replace("_", " ") for flag in Binds if flag in self]


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one device does this round."""

    alpha: float
    beta: float
    frequency_hz: float
    gain: float
    latency_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class Strategies:
    """One strategy per device, as arrays; a device that sits out has zeros everywhere.

    `quality` is what β is worth with the codec: β itself for the paper's, so that the gain is
    α⁴·quality.

    `latency_floor_s` and `energy_floor_j` are the least time (at f^max) and the least energy (at
    f^min) of any strategy. `least_latency_s` is the least latency budget under which the device
    could take part with its energy budget, raised to the floor if it is below, and
    `least_energy_j` the same with the roles exchanged.
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
    binds: npt.NDArray[np.uint8]
    least_latency_s: FloatArray
    least_energy_j: FloatArray
    latency_floor_s: FloatArray
    energy_floor_j: FloatArray

    def __len__(self) -> int:
        return len(self.alpha)

    def __getitem__(self, device: int) -> Strategy:
        return Strategy(*(float(getattr(self, item.name)[device]) for item in fields(Strategy)))


@dataclass(frozen=True, slots=True)
class Profile:
    """One real device type: its compute unit, clock range and radio.

    `rate_bps` is its uplink where that was measured; otherwise the cell's channel decides.
    `overhead` is what training at any width takes beside the FLOPs, relative to the full model's.
    """

    name: str
    flops_per_cycle: Positive
    energy_coefficient: Positive
    frequency_min_hz: Annotated[Positive, AtMost("frequency_max_hz")]
    frequency_max_hz: Positive
    power_w: Positive
    overhead: Annotated[float, AtLeastZero] = 0.0
    rate_bps: Annotated[float | None, POSITIVE] = None
    guess: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def cross_check(values: Mapping[str, Any]) -> list[str]:
        """A guess names a field."""
        unknown = sorted(set(values.get("guess") or ()) - {item.name for item in fields(Profile)})
        return [f"guess: given {name!r}, allowed names of fields" for name in unknown]


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A simulated fleet (paper V-A); ranges are uniform, positions fill a disk.

    The last five fields make fleets of other kinds: unequal sample counts, as a Dirichlet split of
    every class over the fleet leaves them; real device profiles in turn instead of drawn hardware;
    a spread around the same mean ε; distances around a mean instead of the disk.
    """

    devices: Count
    cohort: Annotated[Count, AtMost("devices")]
    samples: Positive
    flops_per_cycle: Positive
    frequency_min_hz: Annotated[Positive, AtMost("frequency_max_hz")]
    frequency_max_hz: Positive
    energy_coefficient_min: Annotated[Positive, AtMost("energy_coefficient_max")]
    energy_coefficient_max: Positive
    latency_s: Positive
    energy_min_j: Annotated[Positive, AtMost("energy_max_j")]
    energy_max_j: Positive
    radius_m: Positive
    bandwidth_hz: Positive
    bandwidth_shared: bool
    power_w: Positive
    noise_dbm_per_hz: Annotated[float, Interval(-300.0, 0.0)]
    path_loss_1km_db: Annotated[float, Interval(0.0, 300.0)]
    path_loss_exponent: Positive
    samples_concentration: Annotated[float | None, POSITIVE] = None
    profiles: tuple[str, ...] = ()
    energy_coefficient_std: Annotated[float | None, Interval(0.0)] = None
    distance_mean_m: Annotated[float | None, POSITIVE] = None
    distance_std_m: Annotated[float, Interval(0.0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def cross_check(values: Mapping[str, Any]) -> list[str]:
        """A spread around a mean stays above zero."""
        low, high = values.get("energy_coefficient_min"), values.get("energy_coefficient_max")
        mean = (low + high) / 2 if low and high else None
        distance = values.get("distance_mean_m")
        ignored = values.get("profiles") and values.get("energy_coefficient_std") is not None
        return [
            "energy_coefficient_std: given beside profiles, which have an ε of their own; allowed "
            "one of them"
            if ignored
            else "",
            _too_spread("energy_coefficient_std", values.get("energy_coefficient_std"), mean),
            _too_spread("distance_std_m", values.get("distance_std_m"), distance),
        ]


def _too_spread(name: str, std: float | None, mean: float | None) -> str:
    """A uniform distribution around a positive mean reaches zero at a deviation of mean/√3."""
    if not std:
        return ""
    if mean is None:
        return f"{name}: given {std:g}, allowed only beside a mean"
    limit = mean / math.sqrt(3.0)
    return "" if std < limit else f"{name}: given {std:g}, allowed less than {limit:.4g} (mean/√3)"


STATUSES: Mapping[str, str] = {
    "ok": "the update was used",
    "sat out": "no strategy is within its budgets",
    "benched": "it was refused too often",
    "missing": "nothing came, or not in time",
    "failed": "the device says itself that it has no update",
    "refused": "what came is not an update of what was asked",
    "left out": "its updates point away from those of the others",
    "unused": "the update is fine, but too few came to use it",
}
"""How the status of a device begins (`DeviceRecord.kind`), and what that means."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What one device of a cohort did, and what it paid."""

    device: int
    status: str  # one of `STATUSES`, mostly with the cause, as in "refused: damaged: …"
    samples: int = 0
    distance_m: float = 0.0
    rate_bps: float = 0.0
    budget_j: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    frequency_hz: float = 0.0
    gain: float = 0.0
    flops_ratio: float = 0.0
    weight: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    wire_bytes_up: int = 0  # of whole messages; 0 where none are sent (the simulator)
    wire_bytes_down: int = 0
    compute_s: float = 0.0
    upload_s: float = 0.0
    compute_j: float = 0.0
    upload_j: float = 0.0
    binds: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()  # why further replies of the device in this round are refused
    agreement: float | None = None  # cosine with the others' updates, where somebody looks at it

    @property
    def kind(self) -> str:
        """What became of it, as one of `STATUSES`."""
        return self.status.partition(":")[0]

    @property
    def latency_s(self) -> float:
        """Computing, then uploading."""
        return self.compute_s + self.upload_s

    @property
    def energy_j(self) -> float:
        """Of computing and of uploading."""
        return self.compute_j + self.upload_j


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round: how good the model is after it, and what each device of the cohort did."""

    round: int
    accuracy: float | None
    devices: tuple[DeviceRecord, ...]
    step_bytes: int = 0  # of the step to the next public model, if there is one (`downlink`)

    @property
    def latency_s(self) -> float:
        """The round lasts as long as its slowest device."""
        return max((d.latency_s for d in self.devices), default=0.0)

    @property
    def energy_j(self) -> float:
        """Of all devices together."""
        return sum(d.energy_j for d in self.devices)

    @property
    def bytes_up(self) -> int:
        """All payloads."""
        return sum(d.bytes_up for d in self.devices)

    @property
    def bytes_down(self) -> int:
        """All sub-models, or steps to the public model."""
        return sum(d.bytes_down for d in self.devices)
