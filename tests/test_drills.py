"""The drills, in short: each fault a few times. `make drill` injects more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drills import damage, disk, simulator, soak, workers
from drills.common import Order, Report


@pytest.mark.parametrize(
    ("processes", "times"),
    [
        (1, 8),
        (2, 2),
        pytest.param(1, 20, marks=pytest.mark.slow),
        pytest.param(2, 20, marks=pytest.mark.slow),
    ],
)
def test_kills_of_the_simulator_change_nothing(tmp_path: Path, processes: int, times: int) -> None:
    report = simulator.drill(Order(times, tmp_path, seed=processes), processes)
    assert report.lost == []
    assert report.injected == times


@pytest.mark.slow
@pytest.mark.parametrize("drill", [damage.drill, disk.drill, workers.drill])
def test_nothing_is_lost(drill: Callable[[Order], Report], tmp_path: Path) -> None:
    report = drill(Order(3, tmp_path, seed=1))
    assert report.lost == []
    assert report.injected == 3


def test_memory_and_open_files_do_not_grow(tmp_path: Path) -> None:
    report = soak.drill(Order(12, tmp_path, seed=0))
    assert report.lost == []
    assert report.note.endswith("+0 files")
