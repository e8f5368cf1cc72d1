"""What a strategy costs a device (Sec. IV-A, eqs. 6–9), and what it is worth (Sec. IV-C).

    T^cmp = C·(α + o)·ω / f    E^cmp = ε·f²·C·(α + o)·ω    with C = τ·|D|·W cycles
    r = b·log2(1 + h·P / (N0·b))
    T^com = α·β·S / r        E^com = T^com·P
    gain = α⁴·β, or α⁴·q(β) with q(β) = (1 − √e(β))² for a codec of measured relative error e(β)

Deviation: W is in cycles, so a workload carries FLOPs per sample and a device its FLOPs per cycle.
ω is the share of the local steps that are done, 1 in the paper.
On a measured device some work does not shrink with the width: its overhead o, 0 in the paper.
The path loss h is the macro-cell model 128.1 + 37.6·log10(d in km) dB of 3GPP TR 36.814, whose
exponent is the paper's 3.76; the paper leaves the constant out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import numpy.typing as npt

from anycostfl.checks import (
    AtLeastZero,
    AtMost,
    Count,
    FloatArray,
    Positive,
    PositiveArray,
    check_fields,
)
from anycostfl.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round of the full model asks of a device: W per sample, S per upload, τ."""

    flops_per_sample: Positive
    size_bits: Positive
    epochs: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Devices:
    """Many devices as one array per quantity; `make_devices` checks what it is given.

    `overhead` is what does not shrink with the width, as a share of the full model's cycles. At
    width α training takes `memory_fixed_bytes` + α·`memory_width_bytes` at its peak.
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
    memory_bytes: PositiveArray
    memory_fixed_bytes: Annotated[FloatArray, AtLeastZero]
    memory_width_bytes: Annotated[FloatArray, AtLeastZero]

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, index: slice | npt.NDArray[np.intp]) -> Devices:
        """The devices at these positions."""
        return Devices(*(getattr(self, item.name)[index] for item in fields(self)))


UNLIMITED = 1e18  # a budget that is none
DEFAULTS: Mapping[str, npt.ArrayLike] = {
    "overhead": 0.0,
    "memory_bytes": UNLIMITED,
    "memory_fixed_bytes": 0.0,
    "memory_width_bytes": 0.0,
}


def make_devices(**quantities: npt.ArrayLike) -> Devices:
    """Devices from numbers and arrays within their rules; see `repeat_devices`."""
    devices = repeat_devices(**quantities)
    check_fields(devices)
    return devices


def repeat_devices(**quantities: npt.ArrayLike) -> Devices:
    """Devices from numbers and arrays, each repeated to the common length.

    By default there is no overhead, and memory does not matter. For numbers that are known to be
    within their rules.
    """
    given = {**DEFAULTS, **quantities}
    columns = {name: np.asarray(value, np.float64) for name, value in given.items()}
    several = {name: c.shape for name, c in columns.items() if c.shape not in ((), (1,))}
    shape, *others = {*several.values()} or {(1,)}
    if others or len(shape) > 1:
        words = ", ".join(f"{name} {shape}" for name, shape in several.items())
        raise ConfigError([f"given shapes {words}; must all have one length"], "devices")
    return Devices(**{name: np.broadcast_to(column, shape) for name, column in columns.items()})


def compute_cycles(devices: Devices, workload: Workload) -> FloatArray:
    """C = τ·|D|·W: cycles of one round on the full model."""
    per_sample = workload.flops_per_sample / devices.flops_per_cycle
    cycles: FloatArray = workload.epochs * devices.samples * per_sample
    return cycles


def sub_model_cycles(
    devices: Devices,
    workload: Workload,
    alpha: FloatArray | float,
    work: FloatArray | float = 1.0,
) -> FloatArray:
    """C·(α + o)·ω: cycles of one round on a sub-model of width factor α, for ω of the work."""
    return compute_cycles(devices, workload) * (alpha + devices.overhead) * work


def compute_time_s(cycles: FloatArray, frequency_hz: FloatArray) -> FloatArray:
    """T^cmp of a number of cycles."""
    return cycles / frequency_hz


def compute_energy_j(
    cycles: FloatArray, frequency_hz: FloatArray, energy_coefficient: FloatArray
) -> FloatArray:
    """E^cmp of a number of cycles."""
    return energy_coefficient * frequency_hz * frequency_hz * cycles


def path_gain(
    distance_m: npt.ArrayLike, *, path_loss_1km_db: float = 128.1, exponent: float = 3.76
) -> FloatArray:
    """The fraction |h| of the transmitted power that arrives."""
    kilometres = np.asarray(distance_m, np.float64) / 1000.0
    gain: FloatArray = 10.0 ** (-path_loss_1km_db / 10.0) * kilometres**-exponent
    return gain


def uplink_rate_bps(
    bandwidth_hz: npt.ArrayLike,
    power_w: npt.ArrayLike,
    gain: npt.ArrayLike,
    *,
    noise_dbm_per_hz: float = -174.0,
) -> FloatArray:
    """Achievable rate of one FDMA channel."""
    bandwidth = np.asarray(bandwidth_hz, np.float64)
    noise_w = 10.0 ** ((noise_dbm_per_hz - 30.0) / 10.0) * bandwidth
    rate: FloatArray = bandwidth * np.log2(1.0 + np.multiply(gain, power_w) / noise_w)
    return rate


def upload_time_s(
    alpha: FloatArray, beta: FloatArray, size_bits: float, rate_bps: FloatArray
) -> FloatArray:
    """T^com of an update of width factor α compressed to the fraction β."""
    return alpha * beta * size_bits / rate_bps


def upload_energy_j(time_s: FloatArray, power_w: FloatArray) -> FloatArray:
    """E^com of sending for that long."""
    return time_s * power_w


def widest_in_memory(devices: Devices) -> FloatArray:
    """The largest α, up to 1, whose training fits; below zero where nothing does."""
    room, width = devices.memory_bytes - devices.memory_fixed_bytes, devices.memory_width_bytes
    most: FloatArray = np.divide(room, width, out=np.sign(room), where=width > 0)
    return np.minimum(most, 1.0)


def round_cost(
    devices: Devices,
    workload: Workload,
    alpha: FloatArray,
    beta: FloatArray,
    frequency_hz: FloatArray,
    *,
    work: FloatArray | float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Latency in seconds and energy in joules of one round: computing, then uploading."""
    cycles = sub_model_cycles(devices, workload, alpha, work)
    upload = upload_time_s(alpha, beta, workload.size_bits, devices.rate_bps)
    latency = compute_time_s(cycles, frequency_hz) + upload
    energy = compute_energy_j(cycles, frequency_hz, devices.energy_coefficient)
    return latency, energy + upload_energy_j(upload, devices.power_w)


# --- what it is worth -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RateDistortion:
    """A codec's relative error e = ‖u − ũ‖² / ‖u‖² at some rates β: rates rise, errors fall.

    Between the rates log q is linear in log β; below the lowest, q is proportional to β; at β = 1
    nothing is lost. Where the slopes fall from low to high β, as measured ones do, log q is concave
    in log β, which is all that the planner needs to find its one best strategy.
    """

    rates: tuple[float, ...]
    errors: tuple[float, ...]

    def quality(self, beta: npt.ArrayLike) -> FloatArray:
        """q(β): the square of what the codec keeps of the norm."""
        log_beta = np.log(np.maximum(np.asarray(beta, np.float64), np.finfo(np.float64).tiny))
        rates = np.log(np.array([*self.rates, 1.0]))
        kept = 2.0 * np.log(1.0 - np.sqrt(np.array([*self.errors, 0.0])))
        below = np.minimum(log_beta - rates[0], 0.0)
        quality: FloatArray = np.exp(np.interp(log_beta, rates, kept) + below)
        return quality


AS_THE_PAPER = ("kernel",)  # β is what the paper says it is worth
RATES = (1 / 500, 1 / 100, 1 / 40, 1 / 15)
MEASURED = {
    "lowrank": RateDistortion(RATES, (0.0973, 0.0360, 0.0155, 0.0030)),
}
"""Mean error over the twelve real updates of docs/results/codec.md, of the codecs that are not the
paper's; the paper's is planned for as the paper says."""


def quality(codec: str, beta: npt.ArrayLike) -> FloatArray:
    """q(β) of a codec: measured, or β itself for the paper's."""
    if codec in MEASURED:
        return MEASURED[codec].quality(beta)
    if codec not in AS_THE_PAPER:
        known = ", ".join((*AS_THE_PAPER, *MEASURED))
        raise UnknownNameError(f"no codec {codec!r} has a measured quality; there are {known}")
    return np.asarray(beta, np.float64)


def learning_gain(alpha: npt.ArrayLike, worth: npt.ArrayLike) -> FloatArray:
    """The gain α⁴β, or α⁴·q(β): the share of effective information an update carries."""
    square = np.asarray(alpha, np.float64) ** 2
    gain: FloatArray = square * square * np.asarray(worth, np.float64)
    return gain
