"""The bench: a device whose updates are refused too often sits out for a while (docs/security.md).

Strikes are counted from the journal alone, so a run that goes on knows them without a file of their
own. Only what was refused counts: a device that is late, gone, or says itself that it failed may
have a bad link or a bad day. Every update that is used takes one strike back, so a device is
benched if it is refused more often than it is used, not if that happens now and then in a long run.

How far each device's updates pointed where the others' did is added up likewise, for
`rounds.screen`: late in training, honest updates of one round often point apart, but liars lie in
every round, and early rounds tell them surely.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from anycostfl.checks import Count, Interval, check_fields
from anycostfl.types import DeviceRecord, RoundRecord


@dataclass(frozen=True, slots=True)
class Gate:
    """How many strikes bench a device (0: none ever do), and for how many rounds."""

    strikes: Annotated[int, Interval(0.0)] = 3
    bench_rounds: Count = 20

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The sum of a device's agreements with others, and of the medians of the same rounds."""

    own: float = 0.0
    usual: float = 0.0

    def with_round(self, cosine: float, median: float) -> Agreed:
        """With one more round."""
        return Agreed(self.own + cosine, self.usual + median)


@dataclass(frozen=True, slots=True)
class Bench:
    """What earlier rounds say of devices.

    The strikes of every device that has any, the round in which each benched one is back, and how
    far each agreed with the others.
    """

    strikes: Mapping[int, int] = field(default_factory=dict)
    back: Mapping[int, int] = field(default_factory=dict)
    agreed: Mapping[int, Agreed] = field(default_factory=dict)

    def holds(self, device: int, number: int) -> bool:
        """Whether a device sits out in a round."""
        return self.back.get(device, 0) > number

    def free(self, devices: Iterable[int], number: int) -> set[int]:
        """Those who may be drawn into a round."""
        return {device for device in devices if not self.holds(device, number)}

    def after(self, record: RoundRecord, gate: Gate) -> Bench:
        """The bench once a round is over; whoever comes back is one strike from it again."""
        strikes = dict(self.strikes)
        back = {device: number for device, number in self.back.items() if number > record.round + 1}
        for told in record.devices:
            count = max(strikes.pop(told.device, 0) + _strikes(told), 0)
            if gate.strikes and count >= gate.strikes:
                back[told.device] = record.round + 1 + gate.bench_rounds
                count = gate.strikes - 1
            if count:
                strikes[told.device] = count
        return Bench(strikes, back, _agreed(self.agreed, record))


def _agreed(before: Mapping[int, Agreed], record: RoundRecord) -> Mapping[int, Agreed]:
    """The agreements with those of a round."""
    found = {d.device: d.agreement for d in record.devices if d.agreement is not None}
    if not found:
        return before
    median = statistics.median(found.values())
    added = {i: before.get(i, Agreed()).with_round(own, median) for i, own in found.items()}
    return {**before, **added}


def _strikes(told: DeviceRecord) -> int:
    """What a round adds to a device's strikes."""
    earned = len(told.surplus) + (told.kind == "refused")
    return earned - (told.kind == "ok")


def bench_of(records: Iterable[RoundRecord], gate: Gate) -> Bench:
    """The bench after these rounds, from the first on."""
    bench = Bench()
    for record in records:
        bench = bench.after(record, gate)
    return bench


def benched(bench: Bench, drawn: Iterable[int], number: int) -> tuple[DeviceRecord, ...]:
    """Records of those among the drawn who sit a round out; others are drawn in their place."""
    return tuple(
        DeviceRecord(i, f"benched: until round {bench.back[i]}")
        for i in drawn
        if bench.holds(i, number)
    )
