"""A run that is stopped and resumed: by one process, with the same files, where it began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anycostfl.config import to_toml
from anycostfl.errors import AnycostError
from anycostfl.files import InUseError
from anycostfl.records.run import RunWriter, read_run
from anycostfl.runs import begin, check_engine, journal, resume
from anycostfl.simulate import simulate
from small_runs import small_config


def test_of_two_processes_that_resume_a_run_one_continues(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2")
    folder = RunWriter.create(tmp_path / "run", to_toml(config)).folder
    one, other = resume(folder), resume(folder)
    results = list(journal(simulate(config), config, one.writer))
    with pytest.raises(InUseError, match="another process resumed"):
        next(journal(simulate(config), config, other.writer))
    assert [result.record for result in results] == list(read_run(folder).records)


def test_a_run_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    writer = begin(tmp_path / "run", config)
    results = journal(simulate(config), config, writer)
    next(results)
    with pytest.raises(InUseError, match="working on"):
        resume(writer.folder)
    results.close()
    assert len(resume(writer.folder).records) == 1


def test_changed_files_are_noticed_and_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    assert config.data.name.endswith(".npz")
    writer = begin(tmp_path / "run", config)
    list(journal(simulate(config), config, writer))
    resume(writer.folder)

    def contents() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in writer.folder.iterdir() if p.name != "lock"}

    before = contents()
    with monkeypatch.context() as changed:
        file = f"methods/{config.run.method}.py"
        changed.setattr("anycostfl.runs.own_files", lambda: {file: "changed"})
        with pytest.raises(AnycostError, match="begun with another methods/"):
            resume(writer.folder)
    with Path(config.data.name).open("ab") as data:
        data.write(b"more")
    with pytest.raises(AnycostError, match=r"begun with another .*\.npz"):
        resume(writer.folder)
    assert contents() == before


@pytest.mark.parametrize("simulated", [True, False])
def test_with_feedback_a_run_is_resumed_where_it_began(tmp_path: Path, simulated: bool) -> None:
    config = small_config(tmp_path, "run.method=stc", "run.rounds=3")
    writer = RunWriter.create(tmp_path / "run", to_toml(config))
    results = journal(simulate(config), config, writer)
    result = next(results)
    results.close()
    if not simulated:  # over Flower, devices keep their memories
        writer.checkpoint(replace(result.state, memories={}).checkpoint())
    before = resume(tmp_path / "run")
    check_engine(before, simulated=simulated)
    with pytest.raises(AnycostError, match="run --resume" if simulated else "--engine flower"):
        check_engine(before, simulated=not simulated)
