"""An independent brute-force solver of (P3), to hold the exact one against.

It knows nothing of cubics or convexity: f and α are searched on grids of logarithms that are then
narrowed around the best point found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from anycostfl.planning.cost import Devices, Workload, make_devices
from anycostfl.planning.strategy import Limits

Array = npt.NDArray[np.float64]


class Found(NamedTuple):
    feasible: npt.NDArray[np.bool_]
    gain: Array


def random_devices(
    rng: np.random.Generator, count: int, *, overhead: float = 0.0, memory: bool = False
) -> Devices:
    """Light and heavy work, good and bad radio, tight and loose budgets."""

    def spread(low: float, high: float) -> Array:
        return np.exp(rng.uniform(np.log(low), np.log(high), count))

    slow, ratio = spread(3e7, 1e9), spread(1.0, 60.0)
    return make_devices(
        samples=spread(20, 2e4),
        flops_per_cycle=spread(2, 400),
        energy_coefficient=spread(1e-29, 1e-25),
        frequency_min_hz=slow,
        frequency_max_hz=slow * ratio,
        rate_bps=spread(3e3, 3e8),
        power_w=spread(0.003, 5),
        latency_s=spread(0.2, 300),
        energy_j=spread(0.02, 500),
        overhead=overhead * rng.random(count),
        **({"memory_bytes": spread(4e8, 4e9)} | _PEAKS if memory else {}),
    )


_PEAKS = {"memory_fixed_bytes": 3.9e8, "memory_width_bytes": 2e9}


Quality = Callable[[Array], Array]


def search(
    devices: Devices, workload: Workload, limits: Limits, quality: Quality = lambda beta: beta
) -> Found:
    parts = [
        _search_block(devices.take(slice(i, i + 250)), workload, limits, quality)
        for i in range(0, len(devices), 250)
    ]
    return Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _search_block(devices: Devices, workload: Workload, limits: Limits, quality: Quality) -> Found:
    low = np.full(len(devices), np.log(limits.alpha_min))
    high = np.zeros(len(devices))
    best = np.full(len(devices), -np.inf)
    for step, points in enumerate([49, *[9] * 13]):
        share = np.linspace(0.0, 1.0, points)
        alpha = np.exp(low[:, None] + (high - low)[:, None] * share)
        gain = _gain_at(devices, workload, limits, alpha, quality)
        best = np.maximum(best, gain.max(axis=1))
        centre = np.argmax(gain, axis=1)
        width = (high - low) / (points - 1)
        # keep α^min itself in sight until something feasible is found
        middle = low + width * np.where(np.isfinite(best), centre, 0)
        low = np.maximum(low, middle - width * (1.5 if step else 1.0))
        high = np.minimum(high, middle + width * (1.5 if step else 1.0))
    return Found(np.isfinite(best), np.where(np.isfinite(best), best, 0.0))


def _gain_at(
    devices: Devices, workload: Workload, limits: Limits, alpha: Array, quality: Quality
) -> Array:
    """Best α⁴·q(β) at each α (device, point), −∞ where nothing is affordable."""
    columns = {name: getattr(devices, name)[:, None] for name in Devices.__slots__}
    work = workload.epochs * columns["samples"] * workload.flops_per_sample
    work = work * (alpha + columns["overhead"])
    work = work / columns["flops_per_cycle"]
    left = _upload_time(columns, work)
    beta = left * columns["rate_bps"] / (alpha * workload.size_bits)
    gain = alpha**4 * quality(np.clip(beta, 0.0, limits.beta_max))
    peak = columns["memory_fixed_bytes"] + alpha * columns["memory_width_bytes"]
    affordable = (beta >= limits.beta_min) & (peak <= columns["memory_bytes"])
    return np.where(affordable, gain, -np.inf)


def _upload_time(columns: dict[str, Array], work: Array) -> Array:
    """The longest upload both budgets leave, over a search in log f."""
    low = np.broadcast_to(np.log(columns["frequency_min_hz"]), work.shape)
    high = np.broadcast_to(np.log(columns["frequency_max_hz"]), work.shape)
    best = np.full(work.shape, -np.inf)
    for points in [17, *[7] * 14]:  # each of the last 14 narrows log f to a third
        share = np.linspace(0.0, 1.0, points)[:, None, None]
        f = np.exp(low + (high - low) * share)
        spent = columns["energy_coefficient"] * f**2 * work
        left = np.minimum(
            columns["latency_s"] - work / f, (columns["energy_j"] - spent) / columns["power_w"]
        )
        best = np.maximum(best, left.max(axis=0))
        width = (high - low) / (points - 1)
        middle = low + width * np.argmax(left, axis=0)
        low, high = np.maximum(low, middle - width), np.minimum(high, middle + width)
    return best


def polish(devices: Devices, workload: Workload, limits: Limits) -> Array:
    """The best gain to rounding, by golden section in log α and bisection in log f.

    Unlike `search` it takes for granted that the gain has one peak; so it is only for digits.
    """
    columns = {name: getattr(devices, name) for name in Devices.__slots__}
    cycles = workload.epochs * columns["samples"] * workload.flops_per_sample
    cycles = cycles / columns["flops_per_cycle"]

    def gain(log_alpha: Array) -> Array:
        alpha = np.exp(log_alpha)
        left = _upload_time_by_bisection(columns, cycles * (alpha + columns["overhead"]))
        beta = left * columns["rate_bps"] / (alpha * workload.size_bits)
        # past the last affordable α the value falls on, so that the peak stays the only one
        return np.where(
            beta >= limits.beta_min, alpha**4 * np.minimum(beta, limits.beta_max), -alpha
        )

    low, high = np.full(len(devices), np.log(limits.alpha_min)), np.zeros(len(devices))
    best = np.maximum(gain(low), gain(high))
    for _ in range(75):
        width = 0.6180339887498949 * (high - low)
        first, second = high - width, low + width
        at_first, at_second = gain(first), gain(second)
        best = np.maximum(best, np.maximum(at_first, at_second))
        rising = at_second >= at_first
        low, high = np.where(rising, first, low), np.where(rising, high, second)
    return np.maximum(best, 0.0)


def _upload_time_by_bisection(columns: dict[str, Array], work: Array) -> Array:
    low, high = np.log(columns["frequency_min_hz"]), np.log(columns["frequency_max_hz"])
    for _ in range(58):
        f = np.exp((low + high) / 2)
        in_time = columns["latency_s"] - work / f
        spent = columns["energy_coefficient"] * f**2 * work
        slow = in_time < (columns["energy_j"] - spent) / columns["power_w"]
        low, high = np.where(slow, (low + high) / 2, low), np.where(slow, high, (low + high) / 2)
    best = np.full(work.shape, -np.inf)
    for f in (np.exp(low), np.exp(high), columns["frequency_min_hz"], columns["frequency_max_hz"]):
        spent = columns["energy_coefficient"] * f**2 * work
        left = np.minimum(
            columns["latency_s"] - work / f, (columns["energy_j"] - spent) / columns["power_w"]
        )
        best = np.maximum(best, left)
    return best
