"""The words every module shares: the errors, then the records that travel between layers."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

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


class UnknownName(AnycostError, LookupError):  # noqa: N818 - reads as what happened
    """A model, preset, method or profile that does not exist."""


class ConfigError(AnycostError, ValueError):
    """Values that are not allowed; every problem of one source at once."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        where = f"{source}: " if source else ""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  - ".join([f"{where}{count}", *self.problems]))


class InfeasibleBudget(AnycostError):  # noqa: N818 - reads as what happened
    """A device that cannot afford even the smallest strategy; says the least that would do."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture of `anycostfl.models`: how to build it and what it eats."""

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    summary: str


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


def bounded(
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    at_most: str | None = None,
    default: float | None = MISSING,  # type: ignore[assignment]  # dataclasses type it as a sentinel
) -> Any:  # noqa: ANN401 - like dataclasses.field, it stands for a value of any type
    """Make a dataclass field whose value must lie in [low, high], or in (low, high] with `above`.

    `at_most` names a field of the same dataclass that this one may not exceed.
    """
    rules = {"allowed": Interval(low, high, above), "at_most": at_most}
    return field(metadata=rules) if default is MISSING else field(default=default, metadata=rules)


def one_of(*choices: str, default: str) -> Any:  # noqa: ANN401 - like dataclasses.field
    """Make a dataclass field that takes one of these words."""
    return field(default=default, metadata={"choices": choices})


def check_fields(record: Any, extra: Sequence[str] = ()) -> None:  # noqa: ANN401 - any dataclass
    """Raise one ConfigError with every field of the record that breaks its own rule."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    if problems := [*rule_problems(type(record), values), *extra]:
        raise ConfigError(problems, source=type(record).__name__)


def rule_problems(kind: Any, values: Mapping[str, Any]) -> list[str]:  # noqa: ANN401 - a dataclass
    """Every given value that breaks the rule of its field in this dataclass."""
    found = (_problem(item, values) for item in fields(kind) if values.get(item.name) is not None)
    return [problem for problem in found if problem]


def _problem(item: Field[Any], values: Mapping[str, Any]) -> str:
    value, rules = values[item.name], item.metadata
    if "choices" in rules and value not in rules["choices"]:
        return f"{item.name}: given {value!r}, allowed {', '.join(rules['choices'])}"
    if "allowed" not in rules:
        return ""
    if np.any(bad := ~rules["allowed"].contains(value)):
        return f"{item.name}: given {_first(value, bad)}, allowed {rules['allowed']}"
    other = values.get(rules["at_most"])
    if other is not None and np.any(bad := np.asarray(value) > np.asarray(other)):
        limit = f"at most {rules['at_most']} ({_first(other, bad)})"
        return f"{item.name}: given {_first(value, bad)}, allowed {limit}"
    return ""


def _first(value: npt.ArrayLike, bad: npt.NDArray[np.bool_]) -> str:
    if np.ndim(value) == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    index = int(np.argmax(bad))
    return f"{np.asarray(value)[index]:g} for device {index}"


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round of the full model asks of a device: W per sample, S per upload, τ."""

    flops_per_sample: float = bounded(0, above=True)
    size_bits: float = bounded(0, above=True)
    epochs: int = bounded(1, default=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """The caps on α and β of (P1); those on f belong to each device."""

    alpha_min: float = bounded(0, 1, above=True, default=0.25)
    beta_min: float = bounded(0, 1, at_most="beta_max", default=0.0)
    beta_max: float = bounded(0, 1, above=True, default=1 / 15)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Devices:
    """Many devices as one array per quantity; build it with `make_devices`."""

    samples: FloatArray = bounded(0, above=True)
    flops_per_cycle: FloatArray = bounded(0, above=True)
    energy_coefficient: FloatArray = bounded(0, above=True)
    frequency_min_hz: FloatArray = bounded(0, above=True, at_most="frequency_max_hz")
    frequency_max_hz: FloatArray = bounded(0, above=True)
    rate_bps: FloatArray = bounded(0, above=True)
    power_w: FloatArray = bounded(0, above=True)
    latency_s: FloatArray = bounded(0, above=True)
    energy_j: FloatArray = bounded(0, above=True)

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
        return self.name.lower()


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

    def names(self) -> list[str]:
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

    `least_latency_s` is the least latency budget under which the device could take part with its
    energy budget (raised to the least energy of any strategy, if it is below that), and
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

    def __len__(self) -> int:
        return len(self.alpha)

    def __getitem__(self, device: int) -> Strategy:
        return Strategy(
            *(float(getattr(self, item.name)[device]) for item in fields(Strategy))
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """One real device type: its compute unit, clock range and radio."""

    name: str
    flops_per_cycle: float = bounded(0, above=True)
    energy_coefficient: float = bounded(0, above=True)
    frequency_min_hz: float = bounded(0, above=True, at_most="frequency_max_hz")
    frequency_max_hz: float = bounded(0, above=True)
    power_w: float = bounded(0, above=True)
    sources: tuple[str, ...] = ()
    guess: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if unknown := sorted(set(self.guess) - {item.name for item in fields(self)}):
            raise ConfigError([f"guess: no such field {name!r}" for name in unknown], "Profile")


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A simulated fleet (paper V-A); ranges are uniform, positions fill a disk.

    The last five fields make fleets of other kinds: unequal sample counts, as a Dirichlet split of
    every class over the fleet leaves them; real device profiles in turn instead of drawn hardware;
    a spread around the same mean ε; distances around a mean instead of the disk.
    """

    devices: int = bounded(1)
    cohort: int = bounded(1, at_most="devices")
    samples: float = bounded(0, above=True)
    flops_per_cycle: float = bounded(0, above=True)
    frequency_min_hz: float = bounded(0, above=True, at_most="frequency_max_hz")
    frequency_max_hz: float = bounded(0, above=True)
    energy_coefficient_min: float = bounded(0, above=True, at_most="energy_coefficient_max")
    energy_coefficient_max: float = bounded(0, above=True)
    latency_s: float = bounded(0, above=True)
    energy_min_j: float = bounded(0, above=True, at_most="energy_max_j")
    energy_max_j: float = bounded(0, above=True)
    radius_m: float = bounded(0, above=True)
    bandwidth_hz: float = bounded(0, above=True)
    bandwidth_shared: bool
    power_w: float = bounded(0, above=True)
    noise_dbm_per_hz: float = bounded(-300, 0)
    path_loss_1km_db: float = bounded(0, 300)
    path_loss_exponent: float = bounded(0, above=True)
    samples_concentration: float | None = bounded(0, above=True, default=None)
    profiles: tuple[str, ...] = ()
    energy_coefficient_std: float | None = bounded(0, default=None)
    distance_mean_m: float | None = bounded(0, above=True, default=None)
    distance_std_m: float = bounded(0, default=0.0)

    def __post_init__(self) -> None:
        mean = (self.energy_coefficient_min + self.energy_coefficient_max) / 2
        knobs = (
            ("energy_coefficient_std", self.energy_coefficient_std, mean),
            ("distance_std_m", self.distance_std_m, self.distance_mean_m),
        )
        check_fields(self, [text for knob in knobs if (text := _too_spread(*knob))])


def _too_spread(name: str, std: float | None, mean: float | None) -> str:
    """A uniform distribution around a positive mean reaches zero at a deviation of mean/√3."""
    if not std:
        return ""
    if mean is None:
        return f"{name}: given {std:g}, allowed only with distance_mean_m"
    limit = mean / math.sqrt(3.0)
    return "" if std < limit else f"{name}: given {std:g}, allowed less than {limit:.4g} (mean/√3)"
