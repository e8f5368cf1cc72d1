"""The best strategy each device can afford: (P3) solved exactly (Sec. IV-D).

Per device, with C = τ|D|W cycles, k = S/r seconds per unit of αβ and upload time t = αβk:

    max α⁴β = α³·t/k   subject to   C·α/f + t <= T,   ε·f²·C·α + P·t <= E,
                                    α^min <= α <= α^max,  β^min <= β <= β^max,  f^min <= f <= f^max

α^max is 1, or the widest sub-model whose training fits into the device's memory.

Why it is unimodal: in log α, log t, log f the objective is linear, the budgets are sums of
exponentials of linear terms and the caps are linear. It is a geometric program, so the feasible
set is convex, and the best gain as a function of any one variable alone (the others at their best)
is log-concave. Without a cap its maximum is therefore the only stationary point, and with a cap it
is that point moved into the interval the cap leaves.

How it is solved, without iteration over α:

1. Without caps both budgets are spent. With e = E/(P·T), the upload takes the share
   y = 2e / (2 + 3e + √(9e² − 4e + 4)) of T (the paper's 1 − φ^{s1}, free of cancellation) and
   f³ = P(e − y) / (ε(1 − y)). This f, moved into [f^min, f^max], is the best f; at that f the best
   α is 3Tf/(4C) (latency binds), 3E/(4εf²C) (energy binds) or where the two budgets meet.
2. β = β^max binds for every α below the largest α that affords it, and β >= β^min holds up to the
   largest α that affords it. At a fixed β that largest α is where both budgets are spent, again
   with f moved into its interval; f is the one positive root of a cubic without square term.
3. α* is the α of step 1 moved between those two and into [α^min, α^max]; f for that α is the root
   of another such cubic. Where caps leave slack, the slowest clock in time saves the most energy.

Two extensions are solved by golden section over log α, with f and β at each α as in step 3. A
measured device has an overhead o: cycles C·(α + o). The budgets are still sums of exponentials, so
the gain still has one peak over log α. A codec of measured quality q has the gain α⁴·q(β): log q
rises with log β and is concave, so again there is one peak, and the largest affordable β is best.

Deviations: Lemma 3 (both budgets always spent) holds only while no cap binds; slack is reported.
`closed_form` is the paper's own solution, with the sign of φ^{s2} corrected, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from anycostfl.checks import FloatArray
from anycostfl.errors import InfeasibleBudgetError
from anycostfl.planning import cost
from anycostfl.planning.cost import MEASURED, Devices, Workload, learning_gain, quality
from anycostfl.planning.strategy import Binds, Limits, Offer, Reason, Strategies

BLOCK = 8192  # devices solved together, so that every array stays in the processor's cache
NEWTON_STEPS = 6  # from at most 1.46 times the root, quadratic convergence needs no more
TOUCHES = 1e-9  # relative distance at which a constraint counts as binding
ROUNDING = 1e-12  # relative; a budget equal to the least affordable one is affordable
GOLDEN = (5**0.5 - 1) / 2
GOLDEN_STEPS = 50  # of the interval 4e-11 is left, and a peak is flat: the gain is exact
UNCAPPED = Limits(alpha_min=1e-9, beta_max=1.0)  # for methods that know no caps


@dataclass(frozen=True, slots=True)
class _Problem:
    """The constants of (P3), one array each."""

    cycles: FloatArray
    overhead: FloatArray
    epsilon: FloatArray
    power: FloatArray
    latency: FloatArray
    energy: FloatArray
    upload: FloatArray  # S/r: seconds to send the whole uncompressed update
    frequency_min: FloatArray
    frequency_max: FloatArray
    alpha_max: FloatArray  # what fits into memory, at most 1

    def take(self, index: npt.NDArray[np.intp]) -> _Problem:
        """The devices at these positions."""
        return _Problem(*(getattr(self, item.name)[index] for item in fields(self)))


def plan_strategies(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The strategy of largest gain for every device, within its budgets and all caps.

    The gain is α⁴β, or α⁴·q(β) with a codec that was measured.
    """
    blocks = [
        _plan_block(devices.take(slice(start, start + BLOCK)), workload, limits)
        for start in range(0, max(len(devices), 1), BLOCK)
    ]
    return Strategies(
        *(np.concatenate([getattr(b, item.name) for b in blocks]) for item in fields(Strategies))
    )


def require_feasible(strategies: Strategies, devices: Devices) -> None:
    """Raise InfeasibleBudgetError for the first device that has to sit out."""
    if np.all(strategies.feasible):
        return
    i = int(np.argmin(strategies.feasible))
    raise InfeasibleBudgetError(
        f"device {i} cannot afford the smallest strategy with {devices.latency_s[i]:.4g} s and "
        f"{devices.energy_j[i]:.4g} J ({Reason(int(strategies.reason[i]))}); "
        f"it needs {needed_budgets(strategies, devices, i)}"
    )


def needed_budgets(strategies: Strategies, devices: Devices, i: int) -> str:
    """As text: the least latency for a device with its energy budget, or the other way round.

    Numbers are rounded up, so that what they say does suffice. Of a device that lacks memory, how
    much the narrowest sub-model takes.
    """
    if strategies.reason[i] == Reason.MEMORY:
        return f"{math.ceil(float(strategies.least_memory_bytes[i]) / 1e6)} MB of memory"
    if devices.energy_j[i] >= cost.UNLIMITED:
        return f"{_up(strategies.least_latency_s[i])} s"
    joules = max(float(devices.energy_j[i]), float(strategies.energy_floor_j[i]))
    seconds = max(float(devices.latency_s[i]), float(strategies.latency_floor_s[i]))
    slower = f"{_up(strategies.least_latency_s[i])} s with {_up(joules)} J"
    hungrier = f"{_up(seconds)} s with {_up(strategies.least_energy_j[i])} J"
    return slower if slower == hungrier else f"{slower}, or {hungrier}"


def _up(value: float) -> str:
    """Four digits, never less than the value."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 3) if value > 0 else 1.0
    shown = f"{value:.4g}"
    return shown if float(shown) >= value else f"{value + digit:.4g}"


def fixed_strategies(
    devices: Devices,
    workload: Workload,
    *,
    alpha: FloatArray,
    beta: FloatArray,
    frequency_hz: FloatArray | None = None,
    limits: Limits | None = None,
    work: FloatArray | None = None,
    feasible: npt.NDArray[np.bool_] | None = None,
) -> Strategies:
    """Given α and β, the slowest clock that meets the latency budget, unless one is given.

    For methods that know no budgets: nobody sits out unless `feasible` says so, energy is what it
    costs, and a device too slow for the latency budget (or whose upload alone breaks it) is late.
    The limits say which codec the upload is worth something with, and what α and β are close to;
    without them there are no caps.
    """
    work = np.ones(len(devices)) if work is None else work
    cycles = cost.sub_model_cycles(devices, workload, alpha, work)
    upload = cost.upload_time_s(alpha, beta, workload.size_bits, devices.rate_bps)
    left = np.where(upload < devices.latency_s, devices.latency_s - upload, devices.latency_s)
    wanted = cycles / left if frequency_hz is None else frequency_hz
    frequency = _clip_frequency(_pose(devices, workload), wanted)
    able = np.ones(len(devices), np.bool_) if feasible is None else feasible
    limits = limits or UNCAPPED
    return _describe(
        devices,
        workload,
        limits,
        (alpha, beta, frequency),
        _least_budgets(devices, workload, limits),
        shown=able,
        feasible=able,
        work=work,
    )


def with_offers(
    planned: Strategies,
    devices: Devices,
    workload: Workload,
    limits: Limits,
    offers: Mapping[int, Offer],
) -> Strategies:
    """The same, but for the devices at these positions, which planned for themselves."""
    if not offers:
        return planned
    where = np.array(sorted(offers), np.intp)
    made = [offers[i] for i in where.tolist()]
    chosen = tuple(
        np.array([getattr(one, name) for one in made]) for name in ("alpha", "beta", "frequency_hz")
    )
    able = np.array([not one.reason for one in made])
    some = devices.take(where)
    least = _least_budgets(some, workload, limits)
    offered = _describe(
        some, workload, limits, (chosen[0], chosen[1], chosen[2]), least, shown=able, feasible=able
    )
    said = {
        "reason": np.array([one.reason for one in made], np.uint8),
        "binds": np.array([one.binds for one in made], np.uint16),
    }
    columns = {}
    for item in fields(Strategies):
        column = np.array(getattr(planned, item.name))
        column[where] = said.get(item.name, getattr(offered, item.name))
        columns[item.name] = column
    return Strategies(**columns)


def closed_form(
    devices: Devices, workload: Workload, limits: Limits, *, clipped: bool = False
) -> Strategies:
    """The paper's solution of (P4), for comparison; it may leave the box and the budgets.

    It knows no overhead.

    `feasible` says where it does not. With `clipped` it is moved back: α, β and f into their
    intervals, then β and at last α reduced at that f until both budgets hold.
    """
    problem = _pose(devices, workload)
    phi = _best_split(problem, limits)
    time, share = phi * problem.latency, (1.0 - phi) * problem.latency
    joules = np.maximum(problem.energy - share * problem.power, 0.0)
    alpha = np.cbrt(time**2 * joules / (problem.epsilon * problem.cycles**3))
    works = (alpha > 0) & (share >= 0)
    alpha = np.where(works, alpha, limits.alpha_min)
    chosen = alpha, share / (alpha * problem.upload), alpha * problem.cycles / time
    if clipped:
        chosen = _move_into_box(problem, limits, chosen)
        works = np.ones_like(works)
    feasible = works & _meets_all(devices, workload, limits, chosen)
    return _describe(
        devices,
        workload,
        limits,
        chosen,
        _least_budgets(devices, workload, limits),
        shown=feasible if clipped else works,
        feasible=feasible,
    )


def _best_split(p: _Problem, limits: Limits) -> FloatArray:
    """φ*: the best of the stationary points and the ends of [φ^min, φ^max], as printed."""
    e = p.energy / (p.power * p.latency)
    root = np.sqrt((9.0 * e - 4.0) * e + 4.0)
    low = np.maximum(
        limits.alpha_min * p.cycles / (p.frequency_max * p.latency),
        1.0 - limits.beta_max * p.upload / p.latency,
    )
    high = np.minimum(
        p.cycles / (p.frequency_min * p.latency),
        1.0 - limits.alpha_min * limits.beta_min * p.upload / p.latency,
    )
    first = 0.75 + (1.0 - e) / (2.0 * (root + 3.0 * e))  # φ^{s1} without cancellation
    candidates = np.stack([low, high, first, 0.75 - (root + 3.0 * e) / 8.0])
    inside = (candidates >= low) & (candidates <= high)
    gain = (e - 1.0 + candidates) * (candidates**2 - candidates**3)
    best = np.argmax(np.where(inside, gain, -np.inf), axis=0)
    phi = np.take_along_axis(candidates, best[None], axis=0)[0]
    # Where φ^min > φ^max the paper has no answer; the nearest to its optimum stands in.
    return np.where(inside.any(axis=0), phi, np.minimum(np.maximum(first, low), high))


def _move_into_box(
    p: _Problem, limits: Limits, chosen: tuple[FloatArray, FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    alpha, beta, f = chosen
    alpha, f = np.clip(alpha, limits.alpha_min, 1.0), _clip_frequency(p, f)
    heat = p.epsilon * f * f * p.cycles
    least = limits.beta_min * p.upload
    most = np.minimum(p.latency / (p.cycles / f + least), p.energy / (heat + p.power * least))
    alpha = np.maximum(np.minimum(alpha, most), limits.alpha_min)
    left = np.minimum(p.latency - p.cycles * alpha / f, (p.energy - heat * alpha) / p.power)
    beta = np.minimum(beta, left / (alpha * p.upload))
    return alpha, np.clip(beta, limits.beta_min, limits.beta_max), f


def _meets_all(
    devices: Devices,
    workload: Workload,
    limits: Limits,
    chosen: tuple[FloatArray, FloatArray, FloatArray],
) -> npt.NDArray[np.bool_]:
    """Whether a strategy keeps every constraint of (P1), to rounding."""
    alpha, beta, frequency = chosen
    latency, energy = cost.round_cost(devices, workload, alpha, beta, frequency)
    near, over = 1.0 - TOUCHES, 1.0 + TOUCHES
    inside: npt.NDArray[np.bool_] = (
        (latency <= devices.latency_s * over)
        & (energy <= devices.energy_j * over)
        & (alpha >= limits.alpha_min * near)
        & (alpha <= over)
        & (beta >= limits.beta_min * near)
        & (beta <= limits.beta_max * over)
        & (frequency >= devices.frequency_min_hz * near)
        & (frequency <= devices.frequency_max_hz * over)
    )
    return inside


def _plan_block(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    problem = _within_reach(_pose(devices, workload), limits)
    alpha_most = _largest_alpha(problem, limits.beta_min)
    alpha_rich = _largest_alpha(problem, limits.beta_max)
    alpha = np.minimum(
        np.maximum(_free_alpha(problem), alpha_rich), np.minimum(alpha_most, problem.alpha_max)
    )
    alpha = np.maximum(alpha, limits.alpha_min)
    capped = alpha <= alpha_rich
    searched = (problem.overhead > 0) | (limits.codec in MEASURED)
    if len(some := np.flatnonzero(searched)):
        alpha[some], capped[some] = _search_alpha(problem.take(some), limits)
    beta, frequency = _spend(problem, limits, alpha, capped=capped)
    least = _least_budgets(devices, workload, limits)
    in_time = devices.latency_s >= least["latency_floor_s"] * (1.0 - ROUNDING)
    feasible = in_time & (devices.energy_j >= least["least_energy_j"] * (1.0 - ROUNDING))
    feasible &= problem.alpha_max >= limits.alpha_min * (1.0 - ROUNDING)
    return _describe(
        devices,
        workload,
        limits,
        (alpha, beta, frequency),
        least,
        shown=feasible,
        feasible=feasible,
    )


def _pose(devices: Devices, workload: Workload) -> _Problem:
    return _Problem(
        cycles=cost.compute_cycles(devices, workload),
        overhead=devices.overhead,
        epsilon=devices.energy_coefficient,
        power=devices.power_w,
        latency=devices.latency_s,
        energy=devices.energy_j,
        upload=workload.size_bits / devices.rate_bps,
        frequency_min=devices.frequency_min_hz,
        frequency_max=devices.frequency_max_hz,
        alpha_max=cost.widest_in_memory(devices),
    )


def _within_reach(p: _Problem, limits: Limits) -> _Problem:
    """Budgets no larger than twice what any strategy spends: more buys nothing, and overflows."""
    work, upload = p.cycles * (1.0 + p.overhead), limits.beta_max * p.upload
    longest = work / p.frequency_min + upload
    hottest = p.epsilon * p.frequency_max**2 * work + p.power * upload
    return replace(
        p,
        latency=np.minimum(p.latency, 2.0 * longest),
        energy=np.minimum(p.energy, 2.0 * hottest),
    )


def _upload_share(e: FloatArray) -> FloatArray:
    """1 − φ^{s1} for e = E/(P·T)."""
    share: FloatArray = 2.0 * e / (2.0 + 3.0 * e + np.sqrt((9.0 * e - 4.0) * e + 4.0))
    return share


def _free_alpha(p: _Problem) -> FloatArray:
    """The best α when neither α nor β is capped (step 1)."""
    e = p.energy / (p.power * p.latency)
    y = _upload_share(e)
    f = _clip_frequency(p, np.cbrt(p.power * (e - y) / (p.epsilon * (1.0 - y))))
    by_latency = 0.75 * p.latency * f / p.cycles
    by_energy = 0.75 * p.energy / (p.epsilon * f * f * p.cycles)
    # Upload time left by the latency budget minus that left by the energy budget: linear in α.
    at_zero = p.latency * (1.0 - e)
    slope = p.cycles * (1.0 / f - p.epsilon * f * f / p.power)
    gap_latency = np.maximum(at_zero - slope * by_latency, 0.0)
    gap_energy = np.maximum(slope * by_energy - at_zero, 0.0)
    # gap_latency = 0: latency alone binds at its optimum; gap_energy = 0: energy does.
    width = gap_latency + gap_energy
    meeting = gap_latency * by_energy + gap_energy * by_latency
    alpha: FloatArray = np.divide(meeting, width, out=by_latency, where=width > 0)
    return alpha


def _largest_alpha(p: _Problem, beta: float) -> FloatArray:
    """The largest α for which this β is affordable at some clock (step 2)."""
    upload = beta * p.upload
    linear = (p.power - p.energy / p.latency) * upload / (p.epsilon * p.cycles)
    f = _clip_frequency(p, _positive_root(linear, p.energy / (p.latency * p.epsilon)))
    by_latency = p.latency / (p.cycles / f + upload)
    by_energy = p.energy / (p.epsilon * f * f * p.cycles + p.power * upload)
    return np.minimum(by_latency, by_energy)


def _search_alpha(p: _Problem, limits: Limits) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """The best α, and where it affords β^max; where nothing is affordable, α^min."""

    def gain(alpha: FloatArray) -> FloatArray:
        beta = _longest_upload(p, p.cycles * (alpha + p.overhead))[0] / (alpha * p.upload)
        worth = quality(limits.codec, np.clip(beta, 0.0, limits.beta_max))
        value = learning_gain(alpha, worth)
        # Past the last affordable α the value falls on, so that the peak stays the only one.
        return np.where(beta >= limits.beta_min * (1.0 - ROUNDING), value, -alpha)

    low = np.full_like(p.cycles, np.log(limits.alpha_min))
    high = np.log(np.maximum(p.alpha_max, limits.alpha_min))
    ends = np.exp(low), np.exp(high)
    for _ in range(GOLDEN_STEPS):
        step = GOLDEN * (high - low)
        first, second = high - step, low + step
        rising = gain(np.exp(second)) >= gain(np.exp(first))
        low, high = np.where(rising, first, low), np.where(rising, high, second)
    tried = np.stack([*ends, np.exp(low), np.exp(high)])
    best = np.take_along_axis(tried, np.argmax(gain(tried), axis=0)[None], axis=0)[0]
    left = _longest_upload(p, p.cycles * (best + p.overhead))[0]
    return best, left >= limits.beta_max * best * p.upload


def _longest_upload(p: _Problem, work: FloatArray) -> tuple[FloatArray, FloatArray]:
    """How long both budgets let a device send beside a number of cycles, and the clock for that."""
    linear = (p.power * p.latency - p.energy) / (p.epsilon * work)
    meeting = _positive_root(linear, p.power / p.epsilon)
    fastest = _clip_frequency(p, meeting)
    in_time = p.latency - work / fastest
    in_energy = (p.energy - p.epsilon * fastest * fastest * work) / p.power
    # Where the budgets meet both are equal; the smaller budget loses fewer digits.
    both = np.where(linear > 0, in_energy, in_time)
    return np.where(fastest == meeting, both, np.minimum(in_time, in_energy)), fastest


def _spend(
    p: _Problem, limits: Limits, alpha: FloatArray, *, capped: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """β and f for a given α (step 3); `capped` says where α affords β^max."""
    work = p.cycles * (alpha + p.overhead)
    left, fastest = _longest_upload(p, work)
    beta = np.where(capped, limits.beta_max, left / (alpha * p.upload))
    beta = np.minimum(np.maximum(beta, limits.beta_min), limits.beta_max)
    slowest = work / np.maximum(p.latency - alpha * beta * p.upload, work / p.frequency_max)
    frequency = np.where(capped, np.minimum(_clip_frequency(p, slowest), fastest), fastest)
    return beta, frequency


def _clip_frequency(p: _Problem, frequency: FloatArray) -> FloatArray:
    return np.minimum(np.maximum(frequency, p.frequency_min), p.frequency_max)


def _positive_root(linear: FloatArray, constant: FloatArray) -> FloatArray:
    """The positive root of x³ + linear·x = constant > 0, which is unique by Descartes' rule.

    The cubic is convex for x > 0, so Newton's method falls monotonically from any start above.
    """
    cube = np.cbrt(constant)
    square = np.sqrt(np.abs(linear))
    rising = constant / np.maximum(linear, cube * cube)
    falling = np.minimum(cube + square, np.maximum(1.26 * cube, 1.4143 * square))
    x = np.where(linear > 0, rising, falling)
    for _ in range(NEWTON_STEPS):
        xx = x * x
        x = (2.0 * xx * x + constant) / (3.0 * xx + linear)
    root: FloatArray = x
    return root


def _describe(
    devices: Devices,
    workload: Workload,
    limits: Limits,
    chosen: tuple[FloatArray, FloatArray, FloatArray],
    least: Mapping[str, FloatArray],
    *,
    shown: npt.NDArray[np.bool_],
    feasible: npt.NDArray[np.bool_],
    work: FloatArray | None = None,
) -> Strategies:
    """What the chosen (α, β, f) cost and gain, and what binds; zeros where not shown."""
    done = np.ones(len(devices)) if work is None else work
    alpha, beta, frequency, done = (np.where(shown, part, 0.0) for part in (*chosen, done))
    safe = np.where(shown, frequency, devices.frequency_max_hz)
    spent = cost.round_cost(devices, workload, alpha, beta, safe, work=done)
    latency, energy = (np.where(shown, part, 0.0) for part in spent)
    worth = quality(limits.codec, beta)
    return Strategies(
        alpha=alpha,
        beta=beta,
        frequency_hz=frequency,
        quality=worth,
        gain=learning_gain(alpha, worth),
        latency_s=latency,
        energy_j=energy,
        latency_slack_s=np.where(shown, devices.latency_s - latency, 0.0),
        energy_slack_j=np.where(shown, devices.energy_j - energy, 0.0),
        feasible=feasible,
        reason=np.where(feasible, 0, _reasons(devices, workload, limits)).astype(np.uint8),
        binds=_binding(devices, limits, (alpha, beta, frequency), (latency, energy), feasible),
        work=done,
        **least,
    )


def _binding(
    devices: Devices,
    limits: Limits,
    chosen: tuple[FloatArray, FloatArray, FloatArray],
    spent: tuple[FloatArray, FloatArray],
    feasible: npt.NDArray[np.bool_],
) -> npt.NDArray[np.uint16]:
    alpha, beta, frequency = chosen
    near, over = 1.0 - TOUCHES, 1.0 + TOUCHES
    widest = cost.widest_in_memory(devices)
    touching = {
        Binds.LATENCY: spent[0] >= devices.latency_s * near,
        Binds.ENERGY: spent[1] >= devices.energy_j * near,
        Binds.ALPHA_MIN: alpha <= limits.alpha_min * over,
        Binds.ALPHA_MAX: alpha >= near,
        Binds.BETA_MIN: beta <= limits.beta_min * over,
        Binds.BETA_MAX: beta >= limits.beta_max * near,
        Binds.FREQUENCY_MIN: frequency <= devices.frequency_min_hz * over,
        Binds.FREQUENCY_MAX: frequency >= devices.frequency_max_hz * near,
        Binds.MEMORY: (widest < 1.0) & (alpha >= widest * near),
    }
    flags = np.zeros(len(devices), np.uint16)
    for flag, holds in touching.items():
        flags |= np.multiply(holds & feasible, np.uint16(flag), dtype=np.uint16)
    return flags


def _smallest(
    devices: Devices, workload: Workload, limits: Limits
) -> tuple[FloatArray, FloatArray]:
    """Cycles and upload time of the strategy (α^min, β^min)."""
    cycles = cost.sub_model_cycles(devices, workload, limits.alpha_min)
    return cycles, limits.alpha_min * limits.beta_min * workload.size_bits / devices.rate_bps


def _reasons(devices: Devices, workload: Workload, limits: Limits) -> npt.NDArray[np.uint8]:
    """Why the smallest strategy breaks a budget, for a device where it does."""
    cycles, upload = _smallest(devices, workload, limits)
    radio = (upload > devices.latency_s) | (upload * devices.power_w > devices.energy_j)
    slow = cycles / devices.frequency_max_hz + upload > devices.latency_s
    least = devices.energy_coefficient * devices.frequency_min_hz**2 * cycles
    hungry = least + upload * devices.power_w > devices.energy_j
    reason = np.where(slow, Reason.LATENCY, np.where(hungry, Reason.ENERGY, Reason.BOTH))
    reason = np.where(radio, Reason.RADIO, reason)
    too_wide = cost.widest_in_memory(devices) < limits.alpha_min * (1.0 - ROUNDING)
    return np.where(too_wide, Reason.MEMORY, reason).astype(np.uint8)


def _least_budgets(devices: Devices, workload: Workload, limits: Limits) -> dict[str, FloatArray]:
    """The least latency at the given energy, the least energy at the given latency, the floors."""
    cycles, upload = _smallest(devices, workload, limits)
    sending = upload * devices.power_w
    heat = devices.energy_coefficient * cycles
    with np.errstate(over="ignore"):  # an endless budget
        affordable = np.sqrt(np.maximum(devices.energy_j - sending, 0.0) / heat)
    fast = np.minimum(np.maximum(affordable, devices.frequency_min_hz), devices.frequency_max_hz)
    quickest = cycles / devices.frequency_max_hz
    in_time = cycles / np.maximum(devices.latency_s - upload, quickest)
    slow = np.maximum(in_time, devices.frequency_min_hz)
    return {
        "least_latency_s": cycles / fast + upload,
        "least_energy_j": heat * slow * slow + sending,
        "latency_floor_s": quickest + upload,
        "energy_floor_j": heat * devices.frequency_min_hz**2 + sending,
        "least_memory_bytes": devices.memory_fixed_bytes
        + limits.alpha_min * devices.memory_width_bytes,
    }
