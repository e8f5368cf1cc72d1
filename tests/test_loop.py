"""The round loop: its phases are timed, and loops do not disturb each other."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from anycostfl.records.run import TIMING
from anycostfl.runs import begin, journal
from anycostfl.simulate import simulate
from small_runs import small_config

PHASES = ("offers_s", "plan_s", "devices_s", "evaluate_s")


def test_timing_has_the_phases_of_every_round(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=3", "run.evaluate_every=2")
    writer = begin(tmp_path / "run", config)
    results = list(journal(simulate(config), config, writer))
    lines = [json.loads(line) for line in (writer.folder / TIMING).read_text().splitlines()]
    assert [tuple(line) for line in lines] == 3 * [("round", "seconds", *PHASES)]
    assert [line["round"] for line in lines] == [0, 1, 2]
    for line, result in zip(lines, results, strict=True):
        assert {name: line[name] for name in PHASES} == result.seconds
        assert min(line[name] for name in PHASES) >= 0
        assert line["devices_s"] > 0
        assert sum(line[name] for name in PHASES) <= line["seconds"] + 1e-3  # each is rounded


def test_interleaved_loops_give_what_each_gives_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = small_config(tmp_path, "run.rounds=2")
        alone = [result.record for result in simulate(config)]
        one, other = simulate(config), simulate(config)
        mixed = [next(one).record, next(other).record, next(one).record]
        assert torch.get_num_threads() == 2
        one.close()
        assert [*mixed, next(other).record] == [alone[0], alone[0], alone[1], alone[1]]
    finally:
        torch.set_num_threads(threads)
