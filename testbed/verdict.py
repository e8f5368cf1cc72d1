"""What a journal says about budgets: who was over in time or memory, and how much was used."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from anycostfl.records.budgets import times_used
from anycostfl.records.round import RoundRecord


@dataclass(frozen=True, slots=True)
class Use:
    """What a device used of its budgets in a round, as shares."""

    device: int
    round: int
    time: float | None
    memory: float | None
    binds: tuple[str, ...]

    @property
    def binding(self) -> float | None:
        """Of the budget that binds, the larger share where both do."""
        shares = {"latency": self.time, "memory": self.memory}
        found = [share for word in self.binds if (share := shares.get(word)) is not None]
        return max(found, default=None)


def uses(records: Sequence[RoundRecord]) -> list[Use]:
    """Every device-round that trained."""
    times = times_used(records)
    found = []
    for record in records:
        for device in record.devices:
            if device.measured is None:
                continue
            share = times.get((record.round, device.device))
            memory = device.measured.memory_used
            found.append(Use(device.device, record.round, share, memory, device.binds))
    return found


def verdict(found: Sequence[Use], since: int) -> dict[str, object]:
    """The shares of device-rounds over budget from a round on, and how much of it was used."""
    late = [use for use in found if use.round >= since]
    times = [use.time for use in late if use.time is not None]
    memories = [use.memory for use in late if use.memory is not None]
    binding: dict[int, list[float]] = {}
    for use in late:
        if use.binding is not None:
            binding.setdefault(use.device, []).append(use.binding)
    medians = {device: statistics.median(shares) for device, shares in sorted(binding.items())}
    return {
        "latency_over": share_over(times),
        "memory_over": share_over(memories),
        "budget_used_median": statistics.median(medians.values()) if medians else None,
        "time_used_median": statistics.median(times) if times else None,
        "device_rounds": len(times),
        "used_by_device": {device: round(share, 3) for device, share in medians.items()},
        "worst_latency": max(times, default=None),
    }


def share_over(shares: Sequence[float]) -> float | None:
    """How many are above one."""
    return sum(share > 1.0 for share in shares) / len(shares) if shares else None


def rounds_over_after(found: Sequence[Use], device: int, event: int) -> int:
    """How many rounds of a device were over its time from an event on."""
    mine = [use for use in found if use.device == device and use.round >= event]
    return sum(use.time is not None and use.time > 1.0 for use in mine)
