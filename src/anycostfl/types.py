"""The words every module shares: the errors, then the records that travel between layers."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

FloatArray = npt.NDArray[np.float64]


class AnycostError(Exception):
    """Base of every error this package raises on purpose."""


class AlphaError(AnycostError, ValueError):
    """A shrinking factor outside (0, 1]."""


class TraceError(AnycostError):
    """The model could not be run on its example input."""


class NotShrinkable(AnycostError):  # noqa: N818 - reads as what happened
    """A narrower sub-model was asked of a model that has no free channel."""


class ShapeMismatch(AnycostError, ValueError):  # noqa: N818 - reads as what happened
    """A state whose keys or shapes are not those of the model."""


class BetaError(AnycostError, ValueError):
    """A compression rate outside (0, 1], or too low for even an empty payload."""


class UpdateError(AnycostError, ValueError):
    """An update that cannot be sent: not floating point, or not finite."""


class PayloadError(AnycostError, ValueError):
    """Bytes that are not a payload of the expected plan."""


class UnknownName(AnycostError, LookupError):  # noqa: N818 - reads as what happened
    """A model, preset, method or profile that does not exist."""


class ConfigError(AnycostError, ValueError):
    """Values that are not allowed; every problem of one source at once."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        where = f"{source}: " if source else ""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  - ".join([f"{where}{count}", *self.problems]))


class MissingExtra(AnycostError, ImportError):  # noqa: N818 - reads as what happened
    """A feature whose optional dependencies are not installed."""


class InfeasibleBudget(AnycostError):  # noqa: N818 - reads as what happened
    """A device that cannot afford even the smallest strategy; says the least that would do."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture of `anycostfl.models`: how to build it and what it eats."""

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    summary: str


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A decoded update ũ and its mask m: both by parameter name, values 0 outside the mask."""

    values: dict[str, Tensor]
    masks: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers a field allows; NaN and infinity are in none."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def contains(self, value: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each value lies inside."""
        x = np.asarray(value, dtype=np.float64)
        above = x > self.low if self.open_low else x >= self.low
        below: npt.NDArray[np.bool_] = np.isfinite(x) & above & (x <= self.high)
        return below

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"a finite number {'>' if self.open_low else '>='} {self.low:g}"
        return f"a number in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """A field that may not exceed another field of the same record."""

    other: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """A field that takes one of these words."""

    choices: tuple[str, ...]


POSITIVE = Interval(0.0, open_low=True)
Positive = Annotated[float, POSITIVE]
Count = Annotated[int, Interval(1.0)]
PositiveArray = Annotated[FloatArray, POSITIVE]


def check_fields(record: object) -> None:
    """Raise one ConfigError with every field of a dataclass that breaks its annotated rule."""
    kind: Any = type(record)
    values = {name: getattr(record, name) for name in rules_of(kind)}
    if problems := rule_problems(kind, values):
        raise ConfigError(problems, source=kind.__name__)


@functools.cache
def rules_of(kind: type) -> Mapping[str, tuple[object, ...]]:
    """The rules in the annotations of a dataclass, by field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def rule_problems(kind: type, values: Mapping[str, Any]) -> list[str]:
    """Every given value that breaks the rule of its field in this dataclass.

    A dataclass may add a static method `cross_check(values)` for rules over several fields; it has
    to bear with values that are missing.
    """
    found = [
        _problem(name, rule, values)
        for name, rules in rules_of(kind).items()
        for rule in rules
        if values.get(name) is not None
    ]
    if cross_check := getattr(kind, "cross_check", None):
        found += cross_check(values)
    return [problem for problem in found if problem]


def _problem(name: str, rule: object, values: Mapping[str, Any]) -> str:
    value = values[name]
    if isinstance(rule, OneOf) and value not in rule.choices:
        return f"{name}: given {value!r}, allowed {', '.join(rule.choices)}"
    if isinstance(rule, Interval) and np.any(bad := ~rule.contains(value)):
        return f"{name}: given {_first(value, bad)}, allowed {rule}"
    if isinstance(rule, AtMost) and values.get(rule.other) is not None:
        other = values[rule.other]
        if np.any(bad := np.asarray(value) > np.asarray(other)):
            limit = f"at most {rule.other} ({_first(other, bad)})"
            return f"{name}: given {_first(value, bad)}, allowed {limit}"
    return ""


def _first(value: npt.ArrayLike, bad: npt.NDArray[np.bool_]) -> str:
    if np.ndim(value) == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    index = int(np.argmax(bad))
    return f"{np.asarray(value)[index]:g} for device {index}"


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round of the full model asks of a device: W per sample, S per upload, τ."""

    flops_per_sample: Positive
    size_bits: Positive
    epochs: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """The caps on α and β of (P1); those on f belong to each device."""

    alpha_min: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 0.25
    beta_min: Annotated[float, Interval(0.0, 1.0), AtMost("beta_max")] = 0.0
    beta_max: Annotated[float, Interval(0.0, 1.0, open_low=True)] = 1 / 15

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Devices:
    """Many devices as one array per quantity; build it with `make_devices`."""

    samples: PositiveArray
    flops_per_cycle: PositiveArray
    energy_coefficient: PositiveArray
    frequency_min_hz: Annotated[PositiveArray, AtMost("frequency_max_hz")]
    frequency_max_hz: PositiveArray
    rate_bps: PositiveArray
    power_w: PositiveArray
    latency_s: PositiveArray
    energy_j: PositiveArray

    def __post_init__(self) -> None:
        check_fields(self)

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, index: slice | npt.NDArray[np.intp]) -> Devices:
        """The devices at these positions."""
        return Devices(*(getattr(self, item.name)[index] for item in fields(self)))


def make_devices(**quantities: npt.ArrayLike) -> Devices:
    """Devices from numbers and arrays, every one repeated to the common length."""
    columns = {name: np.asarray(value, np.float64) for name, value in quantities.items()}
    shape = np.broadcast_shapes((1,), *(column.shape for column in columns.values()))
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

    `latency_floor_s` and `energy_floor_j` are the least time (at f^max) and the least energy (at
    f^min) of any strategy. `least_latency_s` is the least latency budget under which the device
    could take part with its energy budget, raised to the floor if it is below, and
    `least_energy_j` the same with the roles exchanged.
    """

    alpha: FloatArray
    beta: FloatArray
    frequency_hz: FloatArray
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
    """One real device type: its compute unit, clock range and radio."""

    name: str
    flops_per_cycle: Positive
    energy_coefficient: Positive
    frequency_min_hz: Annotated[Positive, AtMost("frequency_max_hz")]
    frequency_max_hz: Positive
    power_w: Positive
    sources: tuple[str, ...] = ()
    guess: tuple[str, ...] = ()

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
        return [
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


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What one device of a cohort did, and what it paid."""

    device: int
    status: str  # "ok", "sat out: …" or "refused: …"
    samples: int
    distance_m: float
    rate_bps: float
    budget_j: float
    alpha: float = 0.0
    beta: float = 0.0
    frequency_hz: float = 0.0
    gain: float = 0.0
    flops_ratio: float = 0.0
    weight: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    compute_s: float = 0.0
    upload_s: float = 0.0
    compute_j: float = 0.0
    upload_j: float = 0.0
    binds: tuple[str, ...] = ()

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
        """All sub-models."""
        return sum(d.bytes_down for d in self.devices)

    @property
    def gain(self) -> float:
        """The global learning gain g_t: the mean over the cohort (Definition 3)."""
        return sum(d.gain for d in self.devices) / max(len(self.devices), 1)
