"""Flower's own simulation engine, for real, where Ray is installed."""

from pathlib import Path

import pytest
import torch

from anycostfl.simulate import play
from small_runs import small_config
from test_flower import off_the_wire

pytest.importorskip("ray", reason="needs Ray: pip install '.[cluster]'", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Ray and Flower are theirs
def test_flowers_engine_gives_what_the_simulator_gives(tmp_path: Path) -> None:
    from anycostfl.flower import engine

    config = small_config(tmp_path, "run.rounds=2", "training.precision=fp32")
    expected = list(play(config))
    found = list(engine.play(config, workers=2))
    assert [off_the_wire(turn.record) for turn in found] == [turn.record for turn in expected]
    for name, tensor in expected[-1].after.state.items():
        assert torch.equal(found[-1].after.state[name], tensor), name
