"""A run as it goes: begun in a folder, journalled round by round, stopped and resumed.

The round loop yields results; `journal` writes them down and saves checkpoints, `resume` opens a
folder where an earlier run stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anycostfl import methods, models, tasks
from anycostfl.config import Config, parse_config, to_toml
from anycostfl.errors import AnycostError
from anycostfl.loop import Rounds
from anycostfl.records.round import RoundRecord, Status
from anycostfl.records.run import RunWriter, SavedRun, open_run, read_own_files
from anycostfl.registry import digest, own_files


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """A run that can be resumed: what was asked, what was saved, and who writes it."""

    config: Config
    saved: SavedRun
    writer: RunWriter

    @property
    def records(self) -> list[RoundRecord]:
        """The rounds that are done."""
        return list(self.saved.records)


def check_engine(run: Resumed, *, simulated: bool) -> None:
    """Residuals are in a simulated run's checkpoint, or with real devices.

    So a run is resumed where it began: elsewhere they would be lost.
    """
    point = run.saved.checkpoint
    if point is None:
        return
    config, folder, here = run.config, run.writer.folder, bool(point.memories())
    feedback = config.method_of(config.run.method).feedback
    worked = any(d.status is Status.OK for r in run.saved.records for d in r.devices)
    if simulated and not here and worked and feedback:
        raise AnycostError(
            f"the devices of {folder} keep their residuals, and the simulator cannot resume it "
            "without them; use --engine flower, or anycostfl serve"
        )
    if here and not simulated:
        raise AnycostError(
            f"{folder} was simulated, and the residuals are in its checkpoint; resume it with: "
            f"anycostfl run --resume {folder}"
        )


def resume(folder: Path) -> Resumed:
    """Open a run directory at its newest intact checkpoint."""

    def check(saved: SavedRun) -> None:
        check_files(folder, parse_config(saved.config, str(folder)))

    saved, writer = open_run(folder, check)
    return Resumed(parse_config(saved.config, str(folder)), saved, writer)


def begin(folder: Path, config: Config) -> RunWriter:
    """Start a run directory that records the files its rounds depend on."""
    return RunWriter.create(folder, to_toml(config), files_of(config))


def files_of(config: Config) -> dict[str, str]:
    """The SHA-256 of the data and device profiles that a configuration names as files."""
    named = (config.data.name, *config.fleet.profile_names)
    paths = (Path(name) for name in named if name.endswith((".npz", ".toml")))
    return {str(path): digest(path) for path in paths if path.is_file()}


def check_files(folder: Path, config: Config) -> None:
    """Refuse to resume with another method, model, task, data or profile than a run began with."""
    then, given = read_own_files(folder), files_of(config)
    now = {**own_files(), **given}
    own = [methods.file_of(config.run.method), models.file_of(config.model.name)]
    if not config.data.name.endswith(".npz"):
        own.append(tasks.file_of(config.data.name))
    for file in (*own, *(name for name in given if name in then)):
        if then.get(file) != now.get(file):
            raise AnycostError(
                f"{folder.name} was begun with another {file}; restore that one, or begin a new "
                "run elsewhere"
            )


def journal(rounds: Rounds, config: Config, writer: RunWriter) -> Rounds:
    """Pass on each round after journalling it; save checkpoints when due, and when stopped."""
    unsaved = None
    with writer.exclusive():
        try:
            for result in rounds:
                writer.append(result.record, result.seconds)
                unsaved, done = result.state, result.state.rounds
                if done % config.run.checkpoint_every == 0 or done == config.run.rounds:
                    writer.checkpoint(unsaved.checkpoint())
                    unsaved = None
                yield result
        except (KeyboardInterrupt, GeneratorExit):
            rounds.close()
            if unsaved is not None:
                writer.checkpoint(unsaved.checkpoint())
            raise
