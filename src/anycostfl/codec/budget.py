"""A byte budget from a rate β, and the search for the fullest payload within it.

Every codec has one number that makes its payloads larger: kernels, levels, elements, or a finer
step. How sizes grow with it differs, so each codec proposes what to try next; the bracket, the
order of trials and when to stop are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from anycostfl.codec.frame import OVERHEAD
from anycostfl.errors import BetaError


def byte_budget(beta: float, elements: int) -> int:
    """Whole bytes that β·32 bits per element buy."""
    if not 0 < beta <= 1:
        raise BetaError(f"beta is {beta}; it must be in (0, 1]")
    budget = int(beta * 4 * elements)
    if budget < OVERHEAD:
        raise BetaError(
            f"beta {beta:g} buys {budget} bytes for {elements} elements; even an empty payload "
            f"takes {OVERHEAD}"
        )
    return budget


@dataclass(frozen=True, slots=True)
class Goal:
    """At most `budget` bytes; stop at the share `filled` of them, or after `tries` payloads."""

    budget: int
    filled: float
    tries: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The latest number tried, its payload's size, and the open bracket all trials leave."""

    attempt: int
    number: int
    size: int
    fits: int  # the largest number known to fit, or one below the range
    fails: int  # the smallest number known not to fit, or one above the range


@dataclass(frozen=True, slots=True)
class Candidate:
    """A payload within the budget, and the number it was made from."""

    number: int
    payload: bytes


def search(
    encode: Callable[[int], bytes],
    propose: Callable[[Trial], int | None],
    numbers: range,
    start: int,
    goal: Goal,
) -> Iterator[Candidate]:
    """Yield payloads that fit, each made from a larger number than the one before.

    A proposal outside the bracket is clamped into it; None ends the search.
    """
    fits, fails = numbers.start - 1, numbers.stop
    number: int | None = start
    for attempt in range(goal.tries if numbers else 0):
        if number is None:
            return
        number = min(max(number, fits + 1), fails - 1)
        payload = encode(number)
        size = len(payload)
        if size <= goal.budget:
            fits = number
            yield Candidate(number, payload)
        else:
            fails = number
        if fails - fits <= 1 or goal.filled * goal.budget <= size <= goal.budget:
            return
        number = propose(Trial(attempt, number, size, fits, fails))


def fullest(candidates: Iterable[Candidate]) -> bytes | None:
    """The longest payload, the earliest of equals; sizes need not grow steadily."""
    return max((candidate.payload for candidate in candidates), key=len, default=None)
