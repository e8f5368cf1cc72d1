"""What fuzzing kept, and a few cases more: every parser refuses or takes it, and stays whole."""

from __future__ import annotations

import random

import pytest

import kept
from mutations import TAKEN
from targets import targets


@pytest.mark.parametrize("name", sorted(path.stem for path in kept.FOLDER.glob("*.json")))
def test_inputs_that_were_kept_are_answered_as_they_were(name: str) -> None:
    target = targets()[name]()
    found = list(kept.read(kept.FOLDER, name, target))
    assert len(found) > 3
    assert any(kind == TAKEN for kind, _ in found)
    for kind, spoilt in found:
        assert (target.says(spoilt) == TAKEN) == (kind == TAKEN), kind


@pytest.mark.parametrize("name", targets())
def test_a_few_more_cases(name: str) -> None:
    target, dice = targets()[name](), random.Random(7)
    said = {kept.kind_of(target.says(target.spoil(dice))) for _ in range(300)}
    assert len(said) > 3


def test_what_is_kept_is_small() -> None:
    assert sum(path.stat().st_size for path in kept.FOLDER.iterdir()) < 200_000
