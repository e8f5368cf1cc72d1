"""The search that all codecs share: never above the budget, never the same number twice."""

from hypothesis import given
from hypothesis import strategies as st

from anycostfl.codec.frame import Candidate, Goal, Trial, fullest, search

NUMBERS = range(1, 1001)


def bisect(trial: Trial) -> int:
    return (trial.fits + trial.fails) // 2


@given(st.integers(0, 2000), st.integers(-5, 1005), st.integers(1, 40))
def test_bisection_finds_the_largest_number_that_fits(budget: int, start: int, slope: int) -> None:
    goal = Goal(budget, filled=1.0, tries=20)
    found = list(search(lambda n: bytes(slope * n), bisect, NUMBERS, start, goal))
    assert [c.number for c in found] == sorted({c.number for c in found})
    assert all(len(c.payload) <= budget for c in found)
    best = min(budget // slope, NUMBERS[-1])
    assert (found[-1].number if found else 0) == best


@given(st.lists(st.integers(-50, 1500), max_size=30), st.lists(st.integers(0, 99), min_size=1001))
def test_any_proposals_on_any_sizes_stay_in_range_and_end(
    proposals: list[int], sizes: list[int]
) -> None:
    tried: list[int] = []

    def encode(number: int) -> bytes:
        tried.append(number)
        return bytes(sizes[number])

    following = iter(proposals)
    goal = Goal(60, filled=0.95, tries=12)
    found = list(search(encode, lambda _: next(following, None), NUMBERS, 500, goal))
    assert all(number in NUMBERS for number in tried)
    assert len(tried) == len(set(tried)) <= min(goal.tries, 1 + len(proposals))
    assert [c.number for c in found] == [n for n in tried if sizes[n] <= goal.budget]
    # Full enough ends the search, so only the last may be.
    assert all(sizes[c.number] < 0.95 * goal.budget for c in found[:-1])


def test_nothing_is_encoded_where_there_is_no_number() -> None:
    assert fullest(search(lambda _: b"", bisect, range(1, 1), 1, Goal(10, 1.0, 5))) is None


def test_the_fullest_is_the_longest_and_the_first_of_equals() -> None:
    payloads = [b"a", b"bcd", b"efg", b"h"]
    assert fullest(Candidate(n, p) for n, p in enumerate(payloads)) == b"bcd"
