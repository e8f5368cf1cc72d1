"""Simulated fleets: hardware, positions, channels and budgets of each round (Sec. V-A).

Every quantity has its own generator, seeded by (seed, round, quantity), and is drawn for the whole
fleet at once. So device i of round t draws the same numbers whatever the cohort, the order in which
devices are asked and the rounds before.

Deviations: the paper gives each device 1 MHz; its result table fits 1 MHz shared by the cohort
(`bandwidth_shared`). Spread distances and coefficients are uniform around their mean.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from anycostfl.checks import (
    POSITIVE,
    AtLeastZero,
    AtMost,
    Count,
    FloatArray,
    Interval,
    Positive,
    check_fields,
)
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.planning import cost
from anycostfl.planning.cost import Devices, make_devices, repeat_devices

ALIKE = ("flops_per_cycle", "frequency_min_hz", "frequency_max_hz", "power_w")  # where ε is drawn
HARDWARE = (*ALIKE, "overhead", "energy_coefficient")  # what never changes of a device
CLASSES = 10  # of the data that sample counts are drawn for
SHARE = Interval(0.0, 1.0, open_low=True)
NEAREST_M = 1.0  # nobody stands inside the antenna; path loss has no meaning at distance 0


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
class Group:
    """Devices of one kind in a simulated fleet; what is unset is as in the rest of it."""

    count: Count
    profile: str = ""
    latency_s: Annotated[float | None, POSITIVE] = None
    energy_min_j: Annotated[float | None, POSITIVE] = None
    energy_max_j: Annotated[float | None, POSITIVE] = None
    available_share: Annotated[float | None, SHARE] = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A simulated fleet (paper V-A); ranges are uniform, positions fill a disk.

    The optional fields make fleets of other kinds: unequal sample counts, as a Dirichlet split of
    every class over the fleet leaves them; real device profiles in turn instead of drawn hardware;
    a spread around the same mean ε; distances around a mean instead of the disk; groups of devices
    in the order of their numbers; devices that are there for a share of every day.
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
    budgets_per_sample: bool = False  # those above are for `samples`; who holds more has more
    group: tuple[Group, ...] = ()
    day_rounds: Annotated[int, Interval(0.0, whole=True)] = 0  # 0: every device is always there
    available_share: Annotated[float, SHARE] = 1.0  # of a day that a device is there

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def profile_names(self) -> tuple[str, ...]:
        """Every device profile that the fleet is made of."""
        return (*self.profiles, *(group.profile for group in self.group if group.profile))

    def of_group(self, name: str) -> FloatArray:
        """A quantity of every device: as its group has it, or else as the fleet."""
        of_all = float(getattr(self, name))
        found = [getattr(g, name) for g in self.group for _ in range(g.count)]
        return np.array([of_all if x is None else x for x in found or [None] * self.devices])

    @staticmethod
    def cross_check(values: Mapping[str, Any]) -> list[str]:
        """A spread around a mean stays above zero; groups are the whole fleet."""
        low, high = values.get("energy_coefficient_min"), values.get("energy_coefficient_max")
        mean = (low + high) / 2 if low and high else None
        distance = values.get("distance_mean_m")
        ignored = values.get("profiles") and values.get("energy_coefficient_std") is not None
        return [
            *_group_problems(values),
            "energy_coefficient_std: given beside profiles, which have their own ε; allowed "
            "one of them"
            if ignored
            else "",
            _too_spread("energy_coefficient_std", values.get("energy_coefficient_std"), mean),
            _too_spread("distance_std_m", values.get("distance_std_m"), distance),
        ]


def _group_problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the groups, of a fleet of which some values may be missing."""
    groups: tuple[Group, ...] = values.get("group") or ()
    if not groups:
        return []
    count, devices = sum(group.count for group in groups), values.get("devices")
    problems = [
        f"group {i}: energy_min_j = {low:g} is above energy_max_j = {high:g}"
        for i, group in enumerate(groups)
        if (low := group.energy_min_j or values.get("energy_min_j") or 0.0)
        > (high := group.energy_max_j or values.get("energy_max_j") or math.inf)
    ]
    if devices is not None and count != devices:
        problems.append(f"group: given {count} devices in all, must be fleet.devices ({devices})")
    if values.get("profiles"):
        problems.append("profiles: given beside group, whose members have a profile each")
    return problems


def _too_spread(name: str, std: float | None, mean: float | None) -> str:
    """A uniform distribution around a positive mean reaches zero at a deviation of mean/√3."""
    if not std:
        return ""
    if mean is None:
        return f"{name}: given {std:g}, allowed only beside a mean"
    limit = mean / math.sqrt(3.0)
    return "" if std < limit else f"{name}: given {std:g}, must be < {limit:.4g} (mean/√3)"


class Purpose(enum.IntEnum):
    """The quantity a generator is for; the numbers are part of every seed, so never reuse one."""

    HARDWARE = 1
    POSITION = 2
    BUDGET = 3
    COHORT = 4
    SAMPLES = 5
    PRESENCE = 6


@dataclass(frozen=True, slots=True)
class Cohort:
    """The devices of one round: who they are, where they stand, what they can spend."""

    index: npt.NDArray[np.intp]
    distance_m: FloatArray
    devices: Devices


def generator(seed: int, round_index: int, purpose: Purpose) -> np.random.Generator:
    """The stream of one quantity in one round."""
    return np.random.default_rng([seed, round_index, int(purpose)])


def draw_cohort(
    spec: FleetSpec,
    *,
    seed: int,
    round_index: int,
    samples: npt.ArrayLike | None = None,
    profiles: Mapping[str, Profile] | None = None,
    ready: Container[int] | None = None,
) -> Cohort:
    """The cohort of a round, of the whole fleet or of those who are ready.

    `samples` are the real counts of the whole fleet, once known.
    """
    fleet = draw_fleet(spec, seed=seed, round_index=round_index, samples=samples, profiles=profiles)
    everyone = range(spec.devices) if ready is None else ready
    index = choose(spec, everyone, seed=seed, round_index=round_index)
    return Cohort(index, fleet.distance_m[index], fleet.devices.take(index))


def choose(
    spec: FleetSpec,
    ready: Container[int],
    *,
    seed: int,
    round_index: int,
    last: Container[int] = (),
) -> npt.NDArray[np.intp]:
    """Who is in the cohort of a round, drawn among those who are ready; some only if need be."""
    order = generator(seed, round_index, Purpose.COHORT).permutation(spec.devices).tolist()
    order.sort(key=lambda device: device in last)  # stable: otherwise as drawn
    chosen = [device for device in order if device in ready][: spec.cohort]
    return np.sort(np.array(chosen, np.intp))


def draw_fleet(
    spec: FleetSpec,
    *,
    seed: int,
    round_index: int,
    samples: npt.ArrayLike | None = None,
    profiles: Mapping[str, Profile] | None = None,
) -> Cohort:
    """Every device of the fleet as it is in a round, with the channel it has in the cohort."""
    distance = draw_distance_m(spec, seed=seed, round_index=round_index)
    hardware = draw_hardware(spec, seed=seed, profiles=profiles or {})
    channel = channel_rate_bps(spec, distance, hardware["power_w"], sharers=spec.cohort)
    measured = measured_rate_bps(spec, profiles or {})
    counts = draw_samples(spec, seed=seed) if samples is None else np.asarray(samples)
    share = counts / spec.samples if spec.budgets_per_sample else 1.0
    budget = generator(seed, round_index, Purpose.BUDGET)
    least_j, most_j = spec.of_group("energy_min_j"), spec.of_group("energy_max_j")
    energy_j = least_j + (most_j - least_j) * budget.random(spec.devices)
    devices = repeat_devices(
        **hardware,
        samples=counts,
        rate_bps=np.where(np.isnan(measured), channel, measured),
        latency_s=spec.of_group("latency_s") * share,
        energy_j=energy_j * share,
    )
    return Cohort(np.arange(spec.devices), distance, devices)


def draw_distance_m(spec: FleetSpec, *, seed: int, round_index: int) -> FloatArray:
    """Distance of every device from the base station, redrawn each round."""
    share = generator(seed, round_index, Purpose.POSITION).random(spec.devices)
    if spec.distance_mean_m is None:
        distance = spec.radius_m * np.sqrt(share)  # uniform over the disk
    else:
        low, high = _around(spec.distance_mean_m, spec.distance_std_m)
        distance = low + (high - low) * share
    return np.maximum(distance, NEAREST_M)


def draw_hardware(
    spec: FleetSpec, *, seed: int, profiles: Mapping[str, Profile]
) -> dict[str, FloatArray]:
    """What never changes: clock range, FLOPs per cycle, ε and radio power of every device.

    With `spec.profiles` the fleet consists of those real devices in turn; else ε is drawn, but for
    devices of a group with a profile.
    """
    hardware, kinds = _drawn_hardware(spec, seed), _kinds(spec, profiles)
    real = {i: hardware_of(kind) for i, kind in enumerate(kinds) if kind}
    for name in HARDWARE if real else ():
        hardware[name][[*real]] = [kind[name] for kind in real.values()]
    return hardware


def _drawn_hardware(spec: FleetSpec, seed: int) -> dict[str, FloatArray]:
    """Alike for every device but for ε."""
    low, high = spec.energy_coefficient_min, spec.energy_coefficient_max
    if spec.energy_coefficient_std is not None:
        low, high = _around((low + high) / 2, spec.energy_coefficient_std)
    epsilon = _uniform(generator(seed, 0, Purpose.HARDWARE), (low, high), spec.devices)
    constants = {name: np.full(spec.devices, getattr(spec, name)) for name in ALIKE}
    return {**constants, "overhead": np.zeros(spec.devices), "energy_coefficient": epsilon}


def hardware_of(profile: Profile) -> dict[str, float]:
    """The same of one real device."""
    return {name: getattr(profile, name) for name in HARDWARE}


def measured_rate_bps(spec: FleetSpec, profiles: Mapping[str, Profile]) -> FloatArray:
    """The uplink of every device whose profile holds one; NaN elsewhere."""
    kinds = _kinds(spec, profiles)
    rates = [None if kind is None else kind.rate_bps for kind in kinds]
    return np.array([np.nan if rate is None else rate for rate in rates])


def _kinds(spec: FleetSpec, profiles: Mapping[str, Profile]) -> list[Profile | None]:
    """The profile of every device: its group's, or those of the fleet in turn; None if drawn."""
    names = [group.profile for group in spec.group for _ in range(group.count)]
    names = names or list(spec.profiles) or [""]
    known = {name: _known(name, profiles) if name else None for name in names}
    return [known[names[i % len(names)]] for i in range(spec.devices)]


def reject_simulated_only(spec: FleetSpec) -> None:
    """Refuse what only a simulated fleet has; elsewhere devices say what they can spend."""
    only = {"fleet.group": spec.group, "fleet.day_rounds": spec.day_rounds}
    if problems := [f"{name}: only for fleets simulated here" for name, v in only.items() if v]:
        raise ConfigError(problems)


def present(spec: FleetSpec, *, seed: int, round_index: int) -> set[int]:
    """Who is there in a round: each device for its share of a day, from an hour of its own on.

    A round in which nobody would be there has the device that comes next.
    """
    if not spec.day_rounds:
        return set(range(spec.devices))
    begins = generator(seed, 0, Purpose.PRESENCE).random(spec.devices)
    since = (round_index / spec.day_rounds - begins) % 1.0  # days since each device last came
    there = np.flatnonzero(since < spec.of_group("available_share"))
    return set(there.tolist()) or {int(np.argmax(since))}


def draw_samples(spec: FleetSpec, *, seed: int) -> FloatArray:
    """Sample count of every device: equal, or as a Dirichlet split of every class leaves them."""
    if spec.samples_concentration is None:
        return np.full(spec.devices, spec.samples)
    concentration = np.full(spec.devices, spec.samples_concentration)
    shares = generator(seed, 0, Purpose.SAMPLES).dirichlet(concentration, CLASSES)
    counts: FloatArray = np.round(spec.samples * spec.devices * shares.mean(axis=0))
    return np.maximum(counts, 1.0)


def place_device(
    profile: Profile,
    spec: FleetSpec,
    *,
    distance_m: npt.ArrayLike,
    latency_s: npt.ArrayLike,
    energy_j: npt.ArrayLike,
) -> Devices:
    """One real device with its budgets, in the radio cell of a fleet or at its measured rate."""
    if not np.all(POSITIVE.contains(distance_m)):
        raise ConfigError([f"distance_m: given {distance_m!r}, allowed {POSITIVE}"])
    channel = channel_rate_bps(spec, distance_m, profile.power_w, sharers=spec.cohort)
    return make_devices(
        **hardware_of(profile),
        samples=spec.samples,
        rate_bps=channel if profile.rate_bps is None else profile.rate_bps,
        latency_s=latency_s,
        energy_j=energy_j,
    )


def channel_rate_bps(
    spec: FleetSpec, distance_m: npt.ArrayLike, power_w: npt.ArrayLike, *, sharers: int
) -> FloatArray:
    """Uplink rate at a distance, when that many devices are in the round."""
    gain = cost.path_gain(
        distance_m, path_loss_1km_db=spec.path_loss_1km_db, exponent=spec.path_loss_exponent
    )
    bandwidth = spec.bandwidth_hz / (sharers if spec.bandwidth_shared else 1)
    return cost.uplink_rate_bps(bandwidth, power_w, gain, noise_dbm_per_hz=spec.noise_dbm_per_hz)


def _uniform(rng: np.random.Generator, ends: tuple[float, float], count: int) -> FloatArray:
    return ends[0] + (ends[1] - ends[0]) * rng.random(count)


def _around(mean: float, std: float) -> tuple[float, float]:
    """The ends of the uniform distribution with this mean and standard deviation."""
    half = math.sqrt(3.0) * std
    return mean - half, mean + half


def _known(name: str, profiles: Mapping[str, Profile]) -> Profile:
    if name not in profiles:
        known = ", ".join(sorted(profiles)) or "none loaded"
        raise UnknownNameError(f"no device profile {name!r}; there are {known}")
    return profiles[name]
