"""The drills, in short: each fault once or twice. `make drill` strikes more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills import damage, disk, simulator, soak, workers
from drills.common import Order


@pytest.mark.parametrize("drill", [simulator.drill, disk.drill], ids=["simulator", "disk"])
def test_nothing_is_lost(drill: object, tmp_path: Path) -> None:
    assert callable(drill)
    report = drill(Order(2, tmp_path, seed=1))
    assert report.lost == []
    assert report.injected == 2


@pytest.mark.slow
@pytest.mark.parametrize("drill", [damage.drill, workers.drill], ids=["damage", "workers"])
def test_nothing_is_lost_either(drill: object, tmp_path: Path) -> None:
    assert callable(drill)
    report = drill(Order(3, tmp_path, seed=1))
    assert report.lost == []
    assert report.injected == 3


def test_a_short_soak_counts_memory_and_files(tmp_path: Path) -> None:
    report = soak.drill(Order(12, tmp_path, seed=0))
    assert report.lost == []
    assert report.note.endswith("+0 files")
