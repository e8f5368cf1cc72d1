"""The drills, in short: each fault once or twice. `make drill` strikes more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills import damage, disk, simulator, soak, workers
from drills.common import Order


@pytest.mark.slow
def test_nothing_is_lost_when_the_disk_is_full(tmp_path: Path) -> None:
    report = disk.drill(Order(2, tmp_path, seed=1))
    assert report.lost == []
    assert report.injected == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "drill",
    [simulator.drill, damage.drill, workers.drill],
    ids=["simulator", "damage", "workers"],
)
def test_nothing_is_lost(drill: object, tmp_path: Path) -> None:
    assert callable(drill)
    report = drill(Order(3, tmp_path, seed=1))
    assert report.lost == []
    assert report.injected == 3


def test_a_short_soak_counts_memory_and_files(tmp_path: Path) -> None:
    report = soak.drill(Order(12, tmp_path, seed=0))
    assert report.lost == []
    assert report.note.endswith("+0 files")
