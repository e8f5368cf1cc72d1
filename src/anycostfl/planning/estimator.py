"""What a device really costs: learnt from every round, with a margin that keeps a promise.

    seconds = slope·(share + offset)     of computing, of downloading, of uploading; joules alike
    total   <= exp(z·σ)·Σ expected       in all but 1 − confidence of the rounds

`share` is α, or αβ for the upload. Costs err by factors, so a line is learnt in the logarithm: a
bank of scalar Kalman filters for log slope, one for each candidate offset, weighted by how well it
predicts. A measurement far from what was expected opens a second hypothesis: a slower device is
believed at once, a faster one when it is seen twice, and an outlier is forgotten as soon as the old
level is seen again. σ is the spread of the total that the lines expect, z a quantile that moves
with every round, up where the total was above its bound and down where it was not. So the share of
rounds above is what was promised whatever the noise looks like (adaptive conformal inference: Gibbs
and Candès, 2021).

All quantities are arrays with one value per device; a device itself has arrays of length one. State
goes in and comes out. NaN is what was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from anycostfl.checks import FloatArray
from anycostfl.planning.cost import Devices, Workload, compute_cycles

DRIFT = 0.01  # standard deviation of a level's change from round to round
NOISE, NOISE_MIN = 0.05, 0.004  # of one measurement: at first, and at least
NOISE_RATE = 0.08  # how fast the noise is learnt
FAR = 4.0  # standard deviations: what no noise explains
CLIPPED = 2.5  # standard deviations an ordinary measurement counts for at most
QUANTILE_STEP = 0.12  # of z, for each round
QUANTILES = 0.2, 6.0  # least and largest z
KNOWN, UNKNOWN = 0.35, 2.0  # spread of a level that a profile tells, and of one that nothing does
OFFSETS = np.geomspace(0.01, 100.0, 16)  # candidates, relative to the first share
OFFSET_GUESS, OFFSET_UNKNOWN = 0.2, 1.5  # relative to the first share; of the logarithm
OFFSET_KNOWN = 0.7  # of the logarithm of an offset that a profile tells
FORGET, FORGET_JUMP = 0.98, 0.3  # of the evidence for an offset stays after a round, and a jump
LIGHTEST = 30.0  # of a candidate's logarithmic weight
MEMORY_MARGIN = 0.05  # of what training adds, for what was not tried
HEADROOM = 0.01  # of a budget: peaks differ a little from round to round
SURPLUS_KEPT = 0.9  # of the surplus, after a round that stayed below its bound
BASE_RATE = 0.05  # how fast growth of what the process holds besides is believed
MEMORY_STEP = 0.02  # widths closer than that share a peak
MEMORY_KEEP = 0.9  # of the part by which an old peak was above a new one
TRIED = 3  # rounds after which a device that cannot afford its spread sits out
LEAST = 1e-9  # seconds or joules
LEAST_COEFFICIENT = 1e-29  # of energy: what costs nothing that is known still costs something

Share = tuple[float, float]  # α and αβ
Point = tuple[FloatArray, FloatArray]  # the same of every device


@dataclass(frozen=True, slots=True)
class Line:
    """One cost as a line in a share: a bank of filters, one for each candidate offset.

    `levels` and `weights` (logarithms) are of shape (device, candidate), `offsets` of shape
    (candidate,); all else has one value per device. `other` is the shift of all levels to the other
    hypothesis, NaN without one; `at` the last share measured.
    """

    offsets: FloatArray
    levels: FloatArray
    weights: FloatArray
    variance: FloatArray  # of the level
    noise: FloatArray  # variance of one measurement
    other: FloatArray
    at: FloatArray
    rounds: FloatArray

    def parameters(self) -> tuple[FloatArray, FloatArray]:
        """Slope and cost at zero, as expected."""
        slopes = self._chances() * np.exp(self.levels)
        return slopes.sum(1), slopes @ self.offsets

    def predict(self, share: FloatArray) -> FloatArray:
        """The expected cost at a share."""
        slope, fixed = self.parameters()
        cost: FloatArray = slope * share + fixed
        return cost

    def variance_at(self, share: FloatArray) -> FloatArray:
        """Variance of the logarithm of the next measurement at a share."""
        errors = self.candidates(share) - np.log(self.predict(share))[:, None]
        between = (self._chances() * errors**2).sum(1)
        total: FloatArray = self.variance + self.noise + between
        return total

    def candidates(self, share: FloatArray) -> FloatArray:
        """The logarithm of the cost that each candidate expects at a share."""
        cost: FloatArray = self.levels + np.log(share[:, None] + self.offsets)
        return cost

    def _chances(self) -> FloatArray:
        chances = np.exp(self.weights - self.weights.max(1, keepdims=True))
        normed: FloatArray = chances / chances.sum(1, keepdims=True)
        return normed


def line(
    at: FloatArray,
    spread: float,
    *,
    cost: FloatArray | None = None,
    slope: FloatArray | None = None,
    offset: FloatArray | None = None,
) -> Line:
    """A line of which the cost at a share or the slope is believed, within a spread.

    An offset is believed within a factor of two or so; without one it is likely to be small.
    """
    zeros, offsets = np.zeros_like(at), OFFSETS * at.flat[0]
    centre, within = OFFSET_GUESS * at, OFFSET_UNKNOWN
    if offset is not None:
        centre, within = np.maximum(offset, offsets[0]), OFFSET_KNOWN
    far = np.log(centre)[:, None] - np.log(offsets)
    levels = np.zeros_like(far)
    if slope is not None:
        levels = levels + np.log(slope)[:, None]
    elif cost is not None:
        levels = np.log(cost)[:, None] - np.log(at[:, None] + offsets)
    return Line(
        offsets=offsets,
        levels=levels,
        weights=-((far / within) ** 2) / 2,
        variance=zeros + spread**2,
        noise=zeros + NOISE**2,
        other=zeros + np.nan,
        at=at,
        rounds=zeros,
    )


def learn(before: Line, share: FloatArray, cost: FloatArray) -> Line:
    """The line after one measurement; NaN leaves it as it is."""
    known = np.isfinite(cost)
    value = np.log(np.maximum(np.where(known, cost, 1.0), LEAST))
    prior = replace(before, variance=before.variance + DRIFT**2)
    error = value - np.log(prior.predict(share))
    spread = np.sqrt(prior.variance_at(share))
    far = (np.abs(error) > FAR * spread) & (prior.rounds > 0)
    swap = far & (np.abs(error - prior.other) <= FAR * spread)
    slower = far & ~swap & ((error > 0) | (prior.rounds == 1))  # the first may have been special
    faster = far & ~swap & ~slower
    shift = np.where(swap, prior.other, np.where(slower, error, 0.0))
    other = np.where(slower, -error, np.where(faster, error, np.nan))
    moved = replace(prior, levels=prior.levels + shift[:, None])
    after = _update(moved, share, value, ordinary=~far)
    return _where(known, replace(after, other=other), before)


def _update(
    prior: Line, share: FloatArray, value: FloatArray, *, ordinary: npt.NDArray[np.bool_]
) -> Line:
    """A step of every filter of the bank; errors beyond `CLIPPED` deviations count as that much.

    The first measurement counts in full. After a jump the level is as uncertain as a measurement,
    and little is left of what spoke for an offset: what costs nothing by the bit has not changed.
    """
    first = prior.rounds == 0
    errors = value[:, None] - prior.candidates(share)
    variance = prior.variance + prior.noise
    bound = np.where(first, np.inf, CLIPPED * np.sqrt(variance))[:, None]
    errors = np.clip(errors, -bound, bound)
    gain = np.where(ordinary, prior.variance / variance, 0.0)
    evidence = np.where(ordinary[:, None], errors**2 / variance[:, None] / 2, 0.0)
    error = np.clip(value - np.log(prior.predict(share)), -bound[:, 0], bound[:, 0])
    keep = np.where(ordinary, FORGET, FORGET_JUMP)
    surprise = np.maximum(error**2 - prior.variance, 0.0)
    learnt = prior.noise + NOISE_RATE * (surprise - prior.noise)
    return replace(
        prior,
        levels=prior.levels + gain[:, None] * errors,
        weights=np.maximum(keep[:, None] * prior.weights - evidence, -LIGHTEST),
        variance=np.where(ordinary, (1 - gain) * prior.variance, variance),
        noise=np.where(ordinary & ~first, np.maximum(learnt, NOISE_MIN**2), prior.noise),
        at=share,
        rounds=prior.rounds + 1,
    )


def _where(choice: npt.NDArray[np.bool_], yes: Line, no: Line) -> Line:
    """One of two lines, device by device."""

    def pick(name: str) -> FloatArray:
        first, second = getattr(yes, name), getattr(no, name)
        which = choice[:, None] if first.ndim == 2 else choice
        picked: FloatArray = np.where(which, first, second)
        return picked

    names = [item.name for item in fields(Line) if item.name != "offsets"]
    return Line(yes.offsets, **{name: pick(name) for name in names})


# --- a device -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measurement:
    """One round of a device as it was measured; NaN is unknown.

    `alpha` is its width, `uploaded` the bits of its payload relative to S. Computing is all that
    the processor does: decoding, training (of all planned steps) and encoding. `total_s` is what
    the round really took, less than its parts where training ended early.
    """

    alpha: FloatArray
    uploaded: FloatArray
    download_s: FloatArray
    compute_s: FloatArray
    upload_s: FloatArray
    joules: FloatArray
    total_s: FloatArray


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a device's costs.

    `download` is a line in α, or constant where devices are sent steps of a public model.
    """

    compute: Line
    download: Line
    upload: Line
    joules: Line
    quantile: FloatArray  # z of seconds
    quantile_j: FloatArray

    def predict_s(self, alpha: FloatArray, uploaded: FloatArray) -> FloatArray:
        """Seconds of a round, as expected."""
        parts = self.compute.predict(alpha), self.download.predict(alpha)
        return parts[0] + parts[1] + self.upload.predict(uploaded)

    def spread(self, alpha: FloatArray, uploaded: FloatArray) -> FloatArray:
        """Standard deviation of the logarithm of a round's seconds."""
        parts = (
            (self.compute.predict(alpha), self.compute.variance_at(alpha)),
            (self.download.predict(alpha), self.download.variance_at(alpha)),
            (self.upload.predict(uploaded), self.upload.variance_at(uploaded)),
        )
        costs, variances = (np.stack(column) for column in zip(*parts, strict=True))
        spread: FloatArray = np.sqrt(((costs / costs.sum(0)) ** 2 * variances).sum(0))
        return spread


def observe(estimate: Estimate, measured: Measurement, confidence: float) -> Estimate:
    """What is known after a round."""
    alpha, uploaded = measured.alpha, measured.uploaded
    spread = estimate.spread(alpha, uploaded)
    quantile = _follow(
        estimate.quantile,
        measured.total_s / estimate.predict_s(alpha, uploaded),
        np.where(estimate.compute.rounds > 0, spread, np.inf),
        confidence,
    )
    known_j = np.where(estimate.joules.rounds > 0, estimate.joules.variance_at(alpha), np.inf)
    quantile_j = _follow(
        estimate.quantile_j,
        measured.joules / estimate.joules.predict(alpha),
        np.sqrt(known_j),
        confidence,
    )
    return Estimate(
        compute=learn(estimate.compute, alpha, measured.compute_s),
        download=learn(estimate.download, alpha, measured.download_s),
        upload=learn(estimate.upload, uploaded, measured.upload_s),
        joules=learn(estimate.joules, alpha, measured.joules),
        quantile=quantile,
        quantile_j=quantile_j,
    )


def _follow(
    quantile: FloatArray, ratio: FloatArray, spread: FloatArray, confidence: float
) -> FloatArray:
    """Z after a round: a little less where the bound held, much more where it was broken."""
    known = np.isfinite(ratio) & np.isfinite(spread)
    broken = np.log(np.maximum(np.where(known, ratio, 1.0), LEAST)) > quantile * spread
    step = QUANTILE_STEP * (broken - (1.0 - confidence))
    return np.where(known, np.clip(quantile + step, *QUANTILES), quantile)


@dataclass(frozen=True, slots=True)
class Terms:
    """What costs are turned into a plan with.

    `smallest` is the least α and αβ; `downloads_model` says whether a device is sent its sub-model,
    `has_meter` whether joules are measured.
    """

    workload: Workload
    smallest: Share
    downloads_model: bool = True
    has_meter: bool = False


def unknown(latency_s: FloatArray, smallest: Share, confidence: float) -> Estimate:
    """Nothing is known: the slowest device that can take part at all, so that α_min comes first.

    The planner gives three quarters of the time to computing and a quarter to uploading.
    """
    alpha, share = (np.full_like(latency_s, part) for part in smallest)
    return Estimate(
        compute=line(alpha, UNKNOWN, cost=0.6 * latency_s),
        download=line(alpha, UNKNOWN, cost=0.1 * latency_s),
        upload=line(share, UNKNOWN, cost=0.2 * latency_s),
        joules=line(alpha, UNKNOWN, cost=np.ones_like(latency_s)),
        quantile=np.full_like(latency_s, NormalDist().inv_cdf(confidence)),
        quantile_j=np.full_like(latency_s, NormalDist().inv_cdf(confidence)),
    )


def from_profile(known: Devices, terms: Terms, confidence: float) -> Estimate:
    """As a profile tells: speed, overhead and uplink, each within a third or so."""
    nothing, workload = unknown(known.latency_s, terms.smallest, confidence), terms.workload
    seconds = compute_cycles(known, workload) / known.frequency_max_hz
    watts = known.energy_coefficient * known.frequency_max_hz**3
    alpha, share = nothing.compute.at, nothing.upload.at
    sending = workload.size_bits / known.rate_bps
    return replace(
        nothing,
        compute=line(alpha, KNOWN, slope=seconds, offset=known.overhead),
        upload=line(share, KNOWN, slope=sending),
        joules=line(alpha, KNOWN, slope=seconds * watts, offset=known.overhead),
    )


def resources(
    estimate: Estimate, known: Devices, terms: Terms, point: Point, probe: npt.ArrayLike = False
) -> Devices:
    """The device as the planner takes it, so that its plan keeps the promise.

    Costs are those that a round at `point` (α and αβ) stays below with the promised confidence;
    budgets are the owner's. Whatever does not grow with a share is the overhead. Joules are those
    of the meter, or else the profile's watts for as long as the device computes. With `probe` the
    smallest strategy is in time whatever is expected: a device that sits out learns nothing.
    """
    (slope, fixed), (sending, latency) = estimate.compute.parameters(), estimate.upload.parameters()
    down, fixed_down = estimate.download.parameters()
    if not terms.downloads_model:
        down, fixed_down = np.zeros_like(down), estimate.download.predict(estimate.download.at)
    margin = _margin(estimate, known, terms.smallest, point, probe)
    alpha, clock = point[0], known.frequency_max_hz
    per_alpha = margin * (slope + down)
    overhead = (fixed + fixed_down + latency) / (slope + down)
    if terms.has_meter:
        spread = np.sqrt(estimate.joules.variance_at(alpha))
        joules = estimate.joules.predict(alpha) * np.exp(estimate.quantile_j * spread)
    else:
        watts = known.energy_coefficient * clock**3
        joules = margin * watts * estimate.compute.predict(alpha)
    flops = terms.workload.epochs * known.samples * terms.workload.flops_per_sample
    return replace(
        known,
        flops_per_cycle=flops / (clock * per_alpha),
        overhead=overhead,
        rate_bps=terms.workload.size_bits / (margin * sending),
        energy_coefficient=np.maximum(
            joules / (clock**3 * per_alpha * (alpha + overhead)), LEAST_COEFFICIENT
        ),
    )


def _margin(
    estimate: Estimate, known: Devices, smallest: Share, point: Point, probe: npt.ArrayLike
) -> FloatArray:
    """The factor on all costs; in the first rounds never so large that nothing can be tried."""
    margin = np.exp(estimate.quantile * estimate.spread(*point))
    least = (np.full_like(margin, part) for part in smallest)
    affordable = known.latency_s / estimate.predict_s(*least) * (1.0 - 1e-9)
    is_new = estimate.upload.rounds < TRIED
    margin = np.where(is_new, np.clip(affordable, 1.0 / margin, margin), margin)
    return np.where(probe, np.minimum(margin, affordable), margin)


def is_probe(idle: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether a device that sat out that many rounds tries again: after 1, 2, 4, 8 and so on."""
    rounds = np.asarray(idle, np.int64)
    probe: npt.NDArray[np.bool_] = (rounds > 0) & (rounds & (rounds - 1) == 0)
    return probe


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peaks:
    """What training added to the memory of the process at the widths that were tried, in bytes.

    It grows with the width, but never faster than in proportion: activations grow with its square
    root, and some of it not at all. So what was measured bounds what narrower widths add, and what
    wider ones do too. `base` is what the process holds besides: the least it was seen to hold, for
    a message that has arrived is part of what its width adds; it follows slow growth. `surplus` is
    by how much the latest peaks were above their bounds, whatever the width.
    """

    base: float = 0.0
    tried: tuple[tuple[float, float], ...] = ()  # α and what was added, by α
    surplus: float = 0.0

    def after(self, alpha: float, base: float, peak: float) -> Peaks:
        """What is known after a round; more that was added earlier is forgotten slowly."""
        near = [old for width, old in self.tried if abs(width - alpha) <= MEMORY_STEP]
        others = [one for one in self.tried if abs(one[0] - alpha) > MEMORY_STEP]
        least = min(base, self.base + BASE_RATE * (base - self.base)) if self.tried else base
        added = max(peak - least, 0.0)
        added = max(added, added + MEMORY_KEEP * (max(near, default=added) - added))
        error = peak - self.bound(alpha) if self.tried else 0.0
        surplus = max(self.surplus + error, SURPLUS_KEPT * self.surplus)
        return Peaks(least, tuple(sorted([*others, (alpha, added)])), max(surplus, 0.0))

    def bound(self, alpha: float) -> float:
        """What a process takes at a width at most; infinite as long as nothing was tried."""
        at_least = max((added for width, added in self.tried if width <= alpha), default=0.0)
        bounds = [added * max(alpha / width, 1.0) for width, added in self.tried]
        added = max(min(bounds, default=np.inf), at_least)
        return self.base + (1.0 + MEMORY_MARGIN) * added + self.surplus

    def widest(self, budget: float) -> float:
        """The largest α whose bound is within a budget; 0 if there is none."""
        budget *= 1.0 - HEADROOM
        widths = np.linspace(0.0, 1.0, 201)[1:].tolist()
        return max((alpha for alpha in widths if self.bound(alpha) <= budget), default=0.0)


def with_memory(known: Devices, peaks: Peaks, budget: float, alpha_min: float) -> Devices:
    """The device with its memory budget; as long as no width was tried, only the smallest fits."""
    widest = peaks.widest(budget) if peaks.tried else alpha_min
    room = max(budget - peaks.base, 1.0)
    width = room / widest if widest > 0 else 2.0 * room / alpha_min
    columns = {
        "memory_bytes": budget,
        "memory_fixed_bytes": peaks.base,
        "memory_width_bytes": width,
    }
    return replace(
        known, **{name: np.full_like(known.samples, value) for name, value in columns.items()}
    )
