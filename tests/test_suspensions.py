"""Suspensions: which refusals suspend a device, for how long, and that a resumed run knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.errors import ConfigError
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.server.suspensions import Agreement, Gate, Suspensions, suspensions_after


def record(number: int, **statuses: Status) -> RoundRecord:
    """A round in which device N, given as `dN`, has that status."""
    devices = (DeviceRecord(int(name[1:]), status) for name, status in statuses.items())
    return RoundRecord(number, None, tuple(devices))


# --- strikes --------------------------------------------------------------------------------------


def test_three_refusals_suspend_a_device_and_one_more_does_when_it_returns() -> None:
    gate = Gate(strikes=3, suspend_rounds=4)
    refused = [record(n, d5=Status.REFUSED, d6=Status.OK) for n in range(3)]
    suspensions = suspensions_after(refused, gate)
    assert suspensions.until == {5: 7}
    assert [suspensions.covers(5, n) for n in range(3, 9)] == [True] * 4 + [False] * 2
    assert suspensions.available(range(4, 7), 3) == {4, 6}
    for number in range(3, 7):
        suspensions = suspensions.after(record(number, d6=Status.OK), gate)
    assert suspensions.until == {}
    suspensions = suspensions.after(record(7, d5=Status.REFUSED), gate)
    assert suspensions.until == {5: 12}


def test_a_suspension_prolongs_nothing_and_a_used_update_takes_a_strike_back() -> None:
    gate = Gate(strikes=3, suspend_rounds=4)
    suspensions = suspensions_after([record(n, d5=Status.REFUSED) for n in range(3)], gate)
    for number in range(3, 7):
        suspensions = suspensions.after(record(number, d5=Status.SUSPENDED), gate)
    assert suspensions == Suspensions(strikes={5: 2})
    suspensions = suspensions.after(record(7, d5=Status.OK), gate)
    assert suspensions == Suspensions(strikes={5: 1})
    suspensions = suspensions.after(record(8, d5=Status.REFUSED), gate)
    assert suspensions == Suspensions(strikes={5: 2})


@pytest.mark.parametrize("status", sorted(set(Status) - {Status.REFUSED}))
def test_nothing_but_a_refusal_is_a_strike(status: Status) -> None:
    rounds = [record(n, d5=status) for n in range(50)]
    found = suspensions_after(rounds, Gate())
    assert (found.strikes, found.until) == ({}, {})


def test_duplicates_are_strikes_though_the_first_reply_is_used() -> None:
    device = DeviceRecord(5, Status.OK, duplicates=4)
    assert suspensions_after([RoundRecord(0, None, (device,))], Gate()).until == {5: 21}


def test_only_drawn_devices_are_recorded_as_suspended() -> None:
    suspensions = Suspensions(until={2: 9, 3: 9, 4: 5})
    assert suspensions.records([1, 2, 4], 5) == (
        DeviceRecord(2, Status.SUSPENDED, detail="until round 9"),
    )


def test_a_gate_has_strikes_from_zero_and_rounds_from_one() -> None:
    with pytest.raises(ConfigError, match="strikes"):
        Gate(strikes=-1)
    with pytest.raises(ConfigError, match="suspend_rounds"):
        Gate(suspend_rounds=0)


def test_zero_strikes_never_suspend() -> None:
    rounds = [record(n, d5=Status.REFUSED) for n in range(50)]
    assert suspensions_after(rounds, Gate(strikes=0)).until == {}


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 9))
def test_a_device_that_is_used_at_least_as_often_is_never_suspended(
    refused: list[bool], strikes: int, rounds: int
) -> None:
    """In no stretch of its rounds more refusals than uses, plus strikes: then no suspension."""
    suspensions, worst, level = Suspensions(), 0, 0
    for number, bad in enumerate(refused):
        status = Status.REFUSED if bad else Status.OK
        suspensions = suspensions.after(record(number, d1=status), Gate(strikes, rounds))
        level = max(level + (1 if bad else -1), 0)
        worst = max(worst, level)
        if worst < strikes:
            assert suspensions.until == {}
        if worst == strikes:
            break
    assert bool(suspensions.until) == (worst >= strikes)


# --- agreement ------------------------------------------------------------------------------------


def agreed(number: int, **cosines: float | None) -> RoundRecord:
    """A round in which device N, given as `dN`, agreed with the others that far."""
    devices = (
        DeviceRecord(int(name[1:]), Status.OK, agreement=cosine) for name, cosine in cosines.items()
    )
    return RoundRecord(number, None, tuple(devices))


def test_agreements_of_all_rounds_of_a_device_are_added_up_beside_the_medians() -> None:
    rounds = [
        agreed(0, d1=0.5, d2=0.25, d3=-0.5),  # median 0.25
        agreed(1, d1=0.75, d3=-0.25, d4=None),  # median 0.25
        agreed(2, d4=None),
        agreed(3, d2=0.125, d3=0.125, d4=0.125, d5=0.125),
    ]
    assert suspensions_after(rounds, Gate()).agreement == {
        1: Agreement(1.25, 0.5),
        2: Agreement(0.375, 0.375),
        3: Agreement(-0.625, 0.625),
        4: Agreement(0.125, 0.125),
        5: Agreement(0.125, 0.125),
    }


def missed(number: int, *silent: int, cause: str = "", others: tuple[int, ...] = ()) -> RoundRecord:
    devices = tuple(DeviceRecord(i, Status.MISSING, cause) for i in silent)
    return RoundRecord(number, None, devices + tuple(DeviceRecord(i, Status.OK) for i in others))


def test_a_silent_device_is_drawn_last_for_twice_as_long_every_time() -> None:
    known, ends = Suspensions(), []
    for number in range(7):
        known = known.after(missed(number, 3, others=(1, 2)), Gate())
        ends.append(known.last_until[3] - number - 1)
    assert ends == [2, 4, 8, 16, 32, 32, 32]
    assert known.drawn_last(8) == {3}
    assert known.drawn_last(7 + 32) == set()
    back = known.after(missed(7, others=(3,)), Gate())
    assert back.drawn_last(8) == set()
    assert back.after(missed(8, 3), Gate()).last_until[3] == 11


def test_a_round_that_was_closed_early_is_nobodys_silence() -> None:
    assert Suspensions().after(missed(0, 3, cause="closed"), Gate()).drawn_last(1) == set()
