"""What a device can still compute once its upload is paid for: partial work, or a width.

With C cycles for all samples at full width, an upload of t seconds and P·t joules leaves

    T' = T − t,   E' = E − P·t,   x = max over f of min(T'·f, E'/(ε·f²)) / C

of the cycles; both budgets are spent at f³ = E'/(ε·T'), if the clock reaches it. x is what
α + o times the work ω may be: all of it as work at one width, or all of it as width. A width that
does not fit into memory is not affordable at any work.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.planning import cost
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies

UPLOAD_PART = 0.5  # of the time and of the energy budget, at most, for an upload
ROUNDING = 1.0 - 1e-9
LEAST_SAMPLES = 2.0  # to train on; one would be a step of noise


def affordable_upload(
    devices: Devices, workload: Workload, limits: Limits, wanted: float
) -> FloatArray:
    """αβ: what is wanted, but so that half of each budget is left; never less than a frame."""
    per_second = devices.rate_bps / workload.size_bits
    most = UPLOAD_PART * np.minimum(devices.latency_s, devices.energy_j / devices.power_w)
    least = limits.alpha_min * limits.beta_min
    return np.maximum(np.minimum(wanted, most * per_second), least)


def affordable_cycles(devices: Devices, workload: Workload, upload: FloatArray) -> FloatArray:
    """x: the share of the full model's cycles that budgets leave beside uploads αβ; at least 0."""
    seconds, joules = _left(devices, workload, upload)
    able = (seconds > 0) & (joules > 0)
    seconds, joules = np.where(able, seconds, 1.0), np.where(able, joules, 1.0)
    clock = np.cbrt(joules / (devices.energy_coefficient * seconds))
    clock = np.clip(clock, devices.frequency_min_hz, devices.frequency_max_hz)
    cycles = np.minimum(seconds * clock, joules / (devices.energy_coefficient * clock**2))
    share = cycles / cost.compute_cycles(devices, workload) * ROUNDING
    return np.where(able, share, 0.0)


def strategies_of(
    devices: Devices,
    workload: Workload,
    limits: Limits,
    *,
    alpha: FloatArray,
    upload: FloatArray,
    most_work: FloatArray | float = 1.0,
    part: FloatArray | float = 1.0,
) -> Strategies:
    """Widths and uploads αβ with the most work that budgets leave; who can afford none sits out.

    `part` is what a local step takes of the sub-model's cycles, where steps are narrower.
    """
    step = (alpha + devices.overhead) * part
    work = np.minimum(affordable_cycles(devices, workload, upload) / step, most_work)
    counts = devices.samples * workload.epochs
    able = work * counts >= np.minimum(LEAST_SAMPLES, counts)
    able &= alpha * ROUNDING <= cost.widest_in_memory(devices)
    seconds, _ = _left(devices, workload, upload)
    cycles = cost.compute_cycles(devices, workload) * step * work
    planned = fixed_strategies(
        devices,
        workload,
        alpha=alpha,
        beta=np.minimum(upload / alpha, 1.0),
        frequency_hz=cycles / np.where(able, seconds, 1.0),  # the slowest in time saves most
        limits=limits,
        work=work * part,
        feasible=able,
    )
    return replace(planned, work=np.where(able, work, 0.0))


def _left(
    devices: Devices, workload: Workload, upload: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds and joules beside an upload."""
    sending = upload * workload.size_bits / devices.rate_bps
    return devices.latency_s - sending, devices.energy_j - sending * devices.power_w
