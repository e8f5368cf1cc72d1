"""A run as it goes: turns of rounds, written down one by one, stopped and taken up again.

Whoever plays the rounds (the simulator, Flower) yields turns; `keep` journals them and saves
checkpoints, `take_up` says where an earlier run stopped.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, fields
from pathlib import Path

from anycostfl import methods, models
from anycostfl.bench import Bench, bench_of
from anycostfl.config import Config, parse_config, to_toml
from anycostfl.downlink import Ledger, ledger_of
from anycostfl.errors import AnycostError
from anycostfl.records import Checkpoint, RunWriter, SavedRun, open_run, read_own_files
from anycostfl.registry import digest, own_files
from anycostfl.types import RoundRecord


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot(Checkpoint):
    """Everything the next round needs: what is saved, and what the journal says."""

    bench: Bench = field(default_factory=Bench)
    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished round, and where to go on from it."""

    record: RoundRecord
    after: Snapshot


Turns = Generator[Turn, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class Stopped:
    """A run that can go on: what was asked, what happened, where it stopped."""

    config: Config
    records: list[RoundRecord]
    start: Snapshot | None
    writer: RunWriter
    remarks: tuple[str, ...]


def check_engine(before: Stopped, *, simulated: bool) -> None:
    """What updates left over lies in a simulated run's checkpoint, or with real devices.

    So a run goes on where it began: elsewhere it would be forgotten.
    """
    if before.start is None:
        return
    config, folder, here = before.config, before.writer.folder, bool(before.start.memories)
    feedback = config.method_of(config.run.method).feedback
    worked = any(d.status == "ok" for record in before.records for d in record.devices)
    if simulated and not here and worked and feedback:
        raise AnycostError(
            f"the devices of {folder} keep what their updates left over, the simulator cannot go "
            "on without; use --engine flower, or anycostfl serve"
        )
    if here and not simulated:
        raise AnycostError(
            f"{folder} was simulated, and what updates left over lies in its checkpoint; go on "
            f"with: anycostfl run --resume {folder}"
        )


def take_up(folder: Path) -> Stopped:
    """Open a run directory to go on from its newest whole checkpoint."""

    def check(saved: SavedRun) -> None:
        check_files(folder, parse_config(saved.config, str(folder)))

    saved, writer = open_run(folder, check)
    config, point = parse_config(saved.config, str(folder)), saved.checkpoint
    start = None
    if point is not None:
        kept = {item.name: getattr(point, item.name) for item in fields(point)}
        bench, ledger = bench_of(saved.records, config.gate), ledger_of(saved.records)
        start = Snapshot(**kept, bench=bench, ledger=ledger)
    return Stopped(
        config=config,
        records=list(saved.records),
        start=start,
        writer=writer,
        remarks=saved.remarks,
    )


def begin(folder: Path, config: Config) -> RunWriter:
    """Start a run directory that knows the files its rounds depend on."""
    return RunWriter.create(folder, to_toml(config), files_of(config))


def files_of(config: Config) -> dict[str, str]:
    """The SHA-256 of the data and device profiles that a configuration names as files."""
    named = (config.data.name, *config.fleet.profiles)
    paths = (Path(name) for name in named if name.endswith((".npz", ".toml")))
    return {str(path): digest(path) for path in paths if path.is_file()}


def check_files(folder: Path, config: Config) -> None:
    """Refuse to go on with another method, model, data or profile than a run began with."""
    then, given = read_own_files(folder), files_of(config)
    now = {**own_files(), **given}
    own = (methods.file_of(config.run.method), models.file_of(config.model.name))
    for file in (*own, *(name for name in given if name in then)):
        if then.get(file) != now.get(file):
            raise AnycostError(
                f"{folder.name} was begun with another {file}; put that one back, or begin anew "
                "elsewhere"
            )


def keep(turns: Turns, config: Config, writer: RunWriter) -> Turns:
    """Hand on each turn after journalling it; save checkpoints when due, and when stopped early."""
    latest, saved = None, 0
    with writer.alone():
        try:
            for turn in turns:
                writer.append(turn.record)
                latest = turn.after
                done = latest.rounds
                if done % config.run.checkpoint_every == 0 or done == config.run.rounds:
                    writer.checkpoint(latest)
                    saved = done
                yield turn
        except (KeyboardInterrupt, GeneratorExit):
            turns.close()
            if latest is not None and latest.rounds > saved:
                writer.checkpoint(latest)
            raise
