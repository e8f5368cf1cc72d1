"""Flower's own simulation engine, for real, where Ray is installed."""

from pathlib import Path

import pytest

from anycostfl.simulate import simulate
from small_runs import small_config
from test_flower import assert_same

pytest.importorskip("ray", reason="needs Ray: pip install '.[cluster]'", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Ray and Flower are theirs
def test_flowers_engine_gives_what_the_simulator_gives(tmp_path: Path) -> None:
    from anycostfl.contrib import ray

    config = small_config(tmp_path, "run.rounds=2", "training.precision=fp32")
    assert_same(list(ray.simulate(config, workers=2)), list(simulate(config)))
