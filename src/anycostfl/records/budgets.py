"""Planned against measured: who broke which budget by how much, from what devices report.

The upload of a round is reported with the device's next round, so the seconds of a device's last
round are never known whole, and nothing is guessed instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from anycostfl.records.round import DeviceRecord, Measured, Records

Round = tuple[int, int]  # of a device: the number, and which device


def latencies(records: Records) -> dict[Round, float]:
    """Seconds of every round of every device, as far as they are known."""
    found = measured_rounds(records)
    seconds: dict[Round, float] = {}
    for (_, device), later in found.items():
        if later.earlier_round is None or later.earlier_upload_s is None:
            continue
        before = found.get((later.earlier_round, device))
        if before is not None and before.until_upload_s is not None:
            seconds[later.earlier_round, device] = before.until_upload_s + later.earlier_upload_s
    return seconds


def times_used(records: Records) -> dict[Round, float]:
    """Shares of the latency budget: as devices report them, else of the budget they disclosed."""
    budgets = {(r.round, d.device): d.budget_s for r in records for d in r.devices}
    seconds = latencies(records)
    used = {key: took / budgets[key] for key, took in seconds.items() if budgets[key] > 0}
    for (_, device), later in measured_rounds(records).items():
        if later.earlier_round is not None and later.earlier_time_used is not None:
            used[later.earlier_round, device] = later.earlier_time_used
    return used


def measured_rounds(records: Records) -> dict[Round, Measured]:
    """What devices measured."""
    devices = ((r.round, d) for r in records for d in r.devices)
    return {(number, d.device): d.measured for number, d in devices if d.measured}


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """How one device kept one budget: shares of it that were planned and measured."""

    device: int
    budget: str  # time, energy or memory
    rounds: int  # that were measured
    planned: float | None  # median share, where the device disclosed its budget
    measured: float  # median share
    over: int  # rounds above 1
    worst: float


def budget_uses(records: Records) -> list[BudgetUse]:
    """How every device kept every budget; nothing for what was not measured."""
    times = times_used(records)
    shares: dict[tuple[int, str], list[tuple[float | None, float]]] = {}
    for record in records:
        for device in record.devices:
            time = times.get((record.round, device.device))
            for budget, pair in _shares(device, time):
                shares.setdefault((device.device, budget), []).append(pair)
    return [_use(*key, pairs) for key, pairs in sorted(shares.items())]


def over_budget(records: Records) -> dict[str, str]:
    """How often which budget was broken, of the rounds in which it was measured; for a person."""
    kept = budget_uses(records)
    budgets = dict.fromkeys(use.budget for use in kept)
    found = {}
    for budget in budgets:
        mine = [use for use in kept if use.budget == budget]
        over, rounds = sum(use.over for use in mine), sum(use.rounds for use in mine)
        worst = max(mine, key=lambda use: use.worst)
        by = f", device {worst.device} by {100 * (worst.worst - 1):.0f} % at most" if over else ""
        found[budget] = f"broken in {over} of {rounds} device-rounds{by}"
    return found


def _shares(
    device: DeviceRecord, time: float | None
) -> Iterable[tuple[str, tuple[float | None, float]]]:
    """Of every budget that was measured: the share planned, if it is known, and the share used."""
    measured = device.measured
    if measured is None:
        return
    if time is not None:
        yield "time", (_share(device.latency_s, device.budget_s), time)
    if measured.energy_used is not None:
        yield "energy", (_share(device.energy_j, device.budget_j), measured.energy_used)
    if measured.memory_used is not None:
        yield "memory", (None, measured.memory_used)


def _share(cost: float, budget: float) -> float | None:
    """What is planned of a budget, if the device disclosed it."""
    return cost / budget if budget > 0 else None


def _use(device: int, budget: str, pairs: list[tuple[float | None, float]]) -> BudgetUse:
    planned = [share for share, _ in pairs if share is not None]
    used = [share for _, share in pairs]
    return BudgetUse(
        device=device,
        budget=budget,
        rounds=len(used),
        planned=statistics.median(planned) if planned else None,
        measured=statistics.median(used),
        over=sum(share > 1.0 for share in used),
        worst=max(used),
    )
