"""Random devices whose costs drift and jump, and the planner that knows the truth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from anycostfl.checks import FloatArray
from anycostfl.planning import estimator
from anycostfl.planning.cost import Devices, Workload, make_devices
from anycostfl.planning.estimator import Estimate, Measurement, Terms
from anycostfl.planning.planner import plan_strategies
from anycostfl.planning.strategy import Limits, Strategies

WORKLOAD = Workload(7e7, 5e7)
LIMITS = Limits(alpha_min=0.25, beta_min=0.001, beta_max=1 / 15)
FIRST = 0.25 * 0.008  # αβ
SMALLEST = 0.25, FIRST
TERMS = Terms(WORKLOAD, SMALLEST)
CONFIDENCE = 0.95
PASSES = 2


@dataclass(frozen=True)
class Truth:
    """What a round really costs: slope and cost at zero of three lines, and their noise."""

    compute: FloatArray
    compute_0: FloatArray
    download: FloatArray
    download_0: FloatArray
    upload: FloatArray
    upload_0: FloatArray
    noise: FloatArray  # (3, n), of the logarithm
    watts: FloatArray

    def parts(self, alpha: FloatArray, share: FloatArray) -> FloatArray:
        return np.stack(
            [
                self.compute * alpha + self.compute_0,
                self.download * alpha + self.download_0,
                self.upload * share + self.upload_0,
            ]
        )

    def planned(self, known: Devices) -> Strategies:
        """The best strategy that keeps the promise, by one who knows all but the coming noise."""
        margin = np.full(len(known), 1.1)
        for _ in range(3):
            cycles = known.samples * WORKLOAD.flops_per_sample
            slope = margin * (self.compute + self.download)
            fixed = margin * (self.compute_0 + self.download_0 + self.upload_0)
            clock = known.frequency_max_hz
            row = replace(
                known,
                flops_per_cycle=cycles / (clock * slope),
                overhead=fixed / slope,
                rate_bps=WORKLOAD.size_bits / (margin * self.upload),
                energy_coefficient=self.watts / clock**3,
            )
            plan = plan_strategies(row, WORKLOAD, LIMITS)
            parts = self.parts(np.maximum(plan.alpha, 0.25), plan.alpha * plan.beta)
            spread = np.sqrt(((parts / parts.sum(0)) ** 2 * self.noise**2).sum(0))
            margin = np.exp(NormalDist().inv_cdf(CONFIDENCE) * spread)
        return plan


def draw(count: int, random: np.random.Generator) -> tuple[Truth, Devices]:
    """Devices that can afford more than the least and less than everything."""
    compute = np.exp(random.uniform(np.log(0.5), np.log(20), count))
    upload = compute * np.exp(random.uniform(np.log(2), np.log(50), count))
    truth = Truth(
        compute=compute,
        compute_0=compute * random.uniform(0.0, 0.3, count),
        download=upload * random.uniform(0.02, 0.1, count),
        download_0=compute * random.uniform(0.0, 0.02, count),
        upload=upload,
        upload_0=compute * random.uniform(0.0, 0.05, count),
        noise=np.stack(
            [random.uniform(*ends, count) for ends in [(0.01, 0.08)] + [(0.03, 0.15)] * 2]
        ),
        watts=np.exp(random.uniform(np.log(1), np.log(10), count)),
    )
    least = truth.parts(np.full(count, 0.25), np.full(count, FIRST)).sum(0)
    most = truth.parts(np.ones(count), np.full(count, 0.03)).sum(0)
    share = random.uniform(0.2, 0.9, count)
    known = make_devices(
        samples=np.full(count, 200.0),
        flops_per_cycle=1.0,
        energy_coefficient=1e-27,
        frequency_min_hz=1e9,
        frequency_max_hz=1e9,
        rate_bps=1.0,
        power_w=1e-3,
        latency_s=least + share * (most - least),
        energy_j=1e15,
    )
    return truth, known


def drifted(truth: Truth, random: np.random.Generator, drift: float, jumps: float) -> Truth:
    """A round later: everything drifts, and now and then a processor or a link changes for good."""
    count = len(truth.compute)
    cpu = np.exp(drift * random.standard_normal(count))
    link = np.exp(drift * random.standard_normal(count))
    cpu = np.where(random.random(count) < jumps, cpu * np.exp(random.normal(0, 0.4, count)), cpu)
    link = np.where(random.random(count) < jumps, link * np.exp(random.normal(0, 0.8, count)), link)
    return replace(
        truth,
        compute=truth.compute * cpu,
        compute_0=truth.compute_0 * cpu,
        upload=truth.upload * link,
        download=truth.download * link,
    )


def profiled(truth: Truth, known: Devices, random: np.random.Generator) -> Estimate:
    """A profile that is off by a third or so."""
    off = np.exp(random.normal(0.0, 0.3, (2, len(known))))
    cycles = known.samples * WORKLOAD.flops_per_sample
    row = replace(
        known,
        flops_per_cycle=cycles / (known.frequency_max_hz * truth.compute * off[0]),
        rate_bps=WORKLOAD.size_bits / (truth.upload * off[1]),
        overhead=truth.compute_0 / truth.compute,
    )
    return estimator.from_profile(row, TERMS, CONFIDENCE)


def planned(
    estimate: Estimate, known: Devices, probe: npt.NDArray[np.bool_] | None = None
) -> Strategies:
    """What a device plans: twice, so that the spread is that of what it plans."""
    point = estimate.compute.at, estimate.upload.at
    tried = np.zeros(len(known), np.bool_) if probe is None else probe
    for _ in range(PASSES):
        row = estimator.resources(estimate, known, TERMS, point, tried)
        plan = plan_strategies(row, WORKLOAD, LIMITS)
        alpha = np.maximum(plan.alpha, SMALLEST[0])
        point = alpha, np.maximum(alpha * plan.beta, FIRST)
    return plan


@dataclass(frozen=True)
class Round:
    """What came of a round of all devices."""

    seconds: FloatArray
    plan: Strategies
    best: Strategies
    estimate: Estimate
    truth: Truth


def rounds(
    known: Devices,
    truth: Truth,
    estimate: Estimate,
    random: np.random.Generator,
    *,
    count: int,
    drift: float = 0.005,
    jumps: float = 0.005,
    outliers: float = 0.01,
    change: Mapping[int, Mapping[str, float]] | None = None,
) -> Iterator[Round]:
    """Plan, measure, learn; the upload is known one round later, as on a real device."""
    pending: Measurement | None = None
    idle = np.zeros(len(known), np.int64)
    for number in range(count):
        for name, factor in (change or {}).get(number, {}).items():
            truth = replace(truth, **{name: getattr(truth, name) * factor})
        seen = estimate
        if pending:
            unknown = np.full(len(known), np.nan)
            partial = replace(pending, upload_s=unknown, total_s=unknown)
            seen = estimator.observe(estimate, partial, CONFIDENCE)
        plan, best = planned(seen, known, estimator.is_probe(idle)), truth.planned(known)
        idle = np.where(plan.feasible, 0, idle + 1)
        if pending:
            estimate = estimator.observe(estimate, pending, CONFIDENCE)
        alpha = np.where(plan.feasible, plan.alpha, LIMITS.alpha_min)
        share = np.where(plan.feasible, plan.alpha * plan.beta, 0.25 * LIMITS.beta_min)
        noise = np.exp(truth.noise * random.standard_normal(truth.noise.shape))
        spikes = np.where(
            random.random(noise.shape) < outliers / 3, random.uniform(1.5, 4, noise.shape), 1
        )
        parts = truth.parts(alpha, share) * noise * spikes
        nothing = np.full(len(known), np.nan)
        parts[:, ~plan.feasible] = np.nan
        pending = Measurement(alpha, share, parts[1], parts[0], parts[2], nothing, parts.sum(0))
        yield Round(parts.sum(0), plan, best, estimate, truth)
        truth = drifted(truth, random, drift, jumps)
