"""Suspensions: a device whose replies are refused too often sits out (docs/security.md).

Strikes are counted from the journal alone, so a resumed run knows them without a file of their own.
Only what was refused counts: a device that is late, gone, or reports that it failed may have a bad
link or a bad day. Every update that is used takes one strike back, so a device is suspended if it
is refused more often than it is used, not if that happens now and then in a long run.

Silence costs a device its place, not its right to one: after n rounds in a row that it kept waiting
it is drawn last for 2ⁿ rounds, if the cohort can be filled without it.

How far each device's updates pointed where the others' did is added up likewise, for
`rounds.exclude`: late in training, honest updates of one round often point apart, but attackers
attack in every round, and early rounds expose them reliably.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from anycostfl.checks import Count, Interval, check_fields
from anycostfl.records.round import DeviceRecord, RoundRecord, Status

LONGEST_LAST = 32  # rounds for which a silent device is drawn last
REPLIED = (Status.OK, Status.FAILED, Status.REFUSED, Status.EXCLUDED, Status.UNUSED)


@dataclass(frozen=True, slots=True)
class Gate:
    """How many strikes suspend a device (0: none ever do), and for how many rounds."""

    strikes: Annotated[int, Interval(0.0)] = 3
    suspend_rounds: Count = 20

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The sum of a device's agreements with others, and of the medians of the same rounds."""

    own: float = 0.0
    usual: float = 0.0

    def with_round(self, cosine: float, median: float) -> Agreement:
        """With one more round."""
        return Agreement(self.own + cosine, self.usual + median)


@dataclass(frozen=True, slots=True)
class Suspensions:
    """What earlier rounds say of devices.

    The strikes of every device that has any, the round until which each suspended one sits out, how
    far each agreed with the others; how many rounds in a row each silent one has missed, and until
    which round it is drawn last.
    """

    strikes: Mapping[int, int] = field(default_factory=dict)
    until: Mapping[int, int] = field(default_factory=dict)
    agreement: Mapping[int, Agreement] = field(default_factory=dict)
    missed: Mapping[int, int] = field(default_factory=dict)
    last_until: Mapping[int, int] = field(default_factory=dict)

    def covers(self, device: int, number: int) -> bool:
        """Whether a device sits out in a round."""
        return self.until.get(device, 0) > number

    def available(self, devices: Iterable[int], number: int) -> set[int]:
        """The devices that may be drawn into a round."""
        return {device for device in devices if not self.covers(device, number)}

    def drawn_last(self, number: int) -> set[int]:
        """The devices that kept earlier rounds waiting, and for how long is not over."""
        return {device for device, end in self.last_until.items() if end > number}

    def after(self, record: RoundRecord, gate: Gate) -> Suspensions:
        """The suspensions after a round; a device that returns is one strike from the next."""
        strikes = dict(self.strikes)
        until = {device: end for device, end in self.until.items() if end > record.round + 1}
        for device in record.devices:
            count = max(strikes.pop(device.device, 0) + _strikes(device), 0)
            if gate.strikes and count >= gate.strikes:
                until[device.device] = record.round + 1 + gate.suspend_rounds
                count = gate.strikes - 1
            if count:
                strikes[device.device] = count
        missed = _missed(self.missed, record)
        ends = {i: end for i, end in self.last_until.items() if i in missed}
        for device in record.devices:
            if count := missed.get(device.device, 0) if _is_silent(device) else 0:
                ends[device.device] = record.round + 1 + min(2**count, LONGEST_LAST)
        agreement = _with_agreements(self.agreement, record)
        return Suspensions(strikes, until, agreement, missed, ends)

    def records(self, drawn: Iterable[int], number: int) -> tuple[DeviceRecord, ...]:
        """Records of the drawn devices that sit a round out; others are drawn instead."""
        return tuple(
            DeviceRecord(i, Status.SUSPENDED, detail=f"until round {self.until[i]}")
            for i in drawn
            if self.covers(i, number)
        )


def _with_agreements(
    before: Mapping[int, Agreement], record: RoundRecord
) -> Mapping[int, Agreement]:
    """The agreements with those of a round."""
    found = {d.device: d.agreement for d in record.devices if d.agreement is not None}
    if not found:
        return before
    median = statistics.median(found.values())
    added = {i: before.get(i, Agreement()).with_round(own, median) for i, own in found.items()}
    return {**before, **added}


def _missed(before: Mapping[int, int], record: RoundRecord) -> Mapping[int, int]:
    """How many rounds in a row each device has missed; any reply ends the row."""
    missed = dict(before)
    for device in record.devices:
        if _is_silent(device):
            missed[device.device] = missed.get(device.device, 0) + 1
        elif device.status in REPLIED:
            missed.pop(device.device, None)
    return missed


def _is_silent(device: DeviceRecord) -> bool:
    """Whether a device kept a round waiting; one that was not waited for did not."""
    return device.status is Status.MISSING and not device.cause


def _strikes(device: DeviceRecord) -> int:
    """What a round adds to a device's strikes."""
    refused = device.status is Status.REFUSED
    return device.duplicates + refused - (device.status is Status.OK)


def suspensions_after(records: Iterable[RoundRecord], gate: Gate) -> Suspensions:
    """The suspensions after these rounds, from the first on."""
    suspensions = Suspensions()
    for record in records:
        suspensions = suspensions.after(record, gate)
    return suspensions
