"""Inputs that fuzzing kept, and a few more: every parser accepts or refuses them, and no more."""

from __future__ import annotations

import random

import pytest

import kept
from mutations import ACCEPTED
from targets import targets


@pytest.mark.parametrize("name", sorted(path.stem for path in kept.FOLDER.glob("*.json")))
def test_kept_inputs_are_answered_as_before(name: str) -> None:
    target = targets()[name]()
    found = list(kept.read(kept.FOLDER, name, target))
    assert len(found) > 3
    assert any(kind == ACCEPTED for kind, _ in found)
    for kind, corrupted in found:
        assert (target.says(corrupted) == ACCEPTED) == (kind == ACCEPTED), kind


@pytest.mark.parametrize("name", targets())
def test_random_inputs_are_accepted_or_refused(name: str) -> None:
    target, dice = targets()[name](), random.Random(7)
    said = {kept.kind_of(target.says(target.corrupt(dice))) for _ in range(300)}
    assert len(said) > 3


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in kept.FOLDER.iterdir()) < 200_000
