"""Rounds on a terminal while they run, the page beside them, and their summary."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anycostfl.cli._console import emit_json, note, out, say, table
from anycostfl.config import Config
from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.files import writing_to
from anycostfl.records.round import RoundRecord, Status, total
from anycostfl.records.run import ELSEWHERE, PAGE
from anycostfl.report import draw_curves, summarise, write_page
from anycostfl.runs import Resumed, check_engine, resume

WHAT_WOULD_DO = (
    "`anycostfl plan PRESET` says what budgets would suffice (fleet.latency_s, fleet.energy_min_j, "
    "fleet.energy_max_j; of real devices --latency-s and --energy-j of `join`)"
)

MISHAPS = {
    "devices_sat_out": "infeasible",
    "devices_failed": "failed",
    "updates_refused": "refused",
    "refused_because": "because of",
    "updates_left_out": "excluded",
    "devices_benched": "devices suspended",
    "rounds_benched": "rounds suspended",
}


def free_folder(name: str) -> Path:
    """A new folder runs/NAME-1, or the next number that is free."""
    runs = Path("runs")
    with writing_to(runs, ELSEWHERE):
        runs.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = runs / f"{name}-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                break
        return folder


def resume_run(
    folder: Path, rounds: int | None, besides: Mapping[str, object], *, simulated: bool
) -> Resumed:
    """A run to resume where it ran before, perhaps extended to more rounds.

    Other options that were given are refused.
    """
    if given := [option for option, value in besides.items() if value]:
        raise ConfigError(
            [f"--resume takes the run as it is, without {', '.join(given)}; --rounds extends it"]
        )
    run = resume(folder)
    if rounds is not None:
        if rounds < len(run.records):
            raise ConfigError([f"--rounds: given {rounds}, must be >= {len(run.records)}"])
        longer = replace(run.config.run, rounds=rounds)
        run = replace(run, config=replace(run.config, run=longer))
    check_engine(run, simulated=simulated)
    note(*run.saved.remarks)
    return run


def follow(
    rounds: Iterator[RoundRecord],
    records: list[RoundRecord],
    config: Config,
    folder: Path,
    *,
    quiet: bool,
) -> None:
    """Add rounds to the records as they come, show them, and keep the page of the run fresh."""
    next_page = 0.0
    before = time.monotonic()
    with _progress(config, len(records), quiet=quiet) as show:
        for record in rounds:
            records.append(record)
            now = time.monotonic()
            show(records, now - before)
            before = now
            if len(records) % config.run.checkpoint_every == 0 and len(records) >= next_page:
                _write_views(config, folder, records, curves=False)
                next_page = 1.05 * len(records)  # so that pages of long runs cost little in all


Show = Callable[[Sequence[RoundRecord], float], None]
"""Shows the rounds done so far and how long the last one took."""


@contextmanager
def _progress(config: Config, first: int, *, quiet: bool) -> Iterator[Show]:
    """A live line on a terminal, one line a round elsewhere, nothing if quiet."""
    if quiet:
        yield lambda _done, _seconds: None
        return
    if not out.is_terminal:
        yield lambda done, seconds: say(_line(done, seconds))
        return
    columns = (
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=out) as bar:
        task = bar.add_task("starting", total=config.run.rounds, completed=first)

        def show(done: Sequence[RoundRecord], seconds: float) -> None:
            bar.update(task, completed=len(done), description=_line(done, seconds, short=True))

        yield show


def _line(done: Sequence[RoundRecord], seconds: float, *, short: bool = False) -> str:
    spent = total(done)
    accuracy = next((r.accuracy for r in reversed(done) if r.accuracy is not None), None)
    shown = "  –  " if accuracy is None else f"{100 * accuracy:5.2f} %"
    line = (
        f"accuracy {shown}  {spent.latency_s / 60:6.2f} min  {spent.energy_j / 1e3:7.3f} kJ  "
        f"{spent.bytes_up / 1e6:7.1f} MB up  {seconds:5.1f} s/round"
    )
    return line if short else f"round {len(done):4d}  {line}"


def conclude(
    config: Config,
    folder: Path,
    records: Sequence[RoundRecord],
    *,
    stopped: bool,
    json: bool,
    real: bool = False,
) -> None:
    """Write the page and the figure, and show what the rounds came to, perhaps on real devices."""
    summary = summarise(config.run.method, config.run.target_accuracy, records)
    _write_views(config, folder, records)
    if why := nothing_learnt(records):
        note(why)
    if json:
        emit_json({"folder": str(folder), "stopped": stopped, **summary})
        return
    title = f"{config.summary or folder.name}: {len(records)} rounds of {config.run.method}"
    share = _share_of_whole_models(config, records)
    out.print(table(title, ("", ""), list(in_words(summary, share, real=real))))
    say(f"Everything is in {folder}; to look at it, open {folder / PAGE}")


def nothing_learnt(records: Sequence[RoundRecord]) -> str:
    """Why the model is as it was at first, if no update ever counted."""
    devices = [d for record in records for d in record.devices]
    if not devices or any(d.status is Status.OK for d in devices):
        return ""
    (reason, times) = Counter(d.explained for d in devices).most_common(1)[0]
    remedy = f"; {WHAT_WOULD_DO}" if reason.startswith(Status.INFEASIBLE) else ""
    return (
        f"nothing was learnt: of {len(devices)} devices drawn, none sent an update that counts; "
        f"most often ({times} times) {reason}{remedy}"
    )


def _write_views(
    config: Config, folder: Path, records: Sequence[RoundRecord], *, curves: bool = True
) -> None:
    """The page and the picture of a run; if they cannot be written, the run continues without."""
    try:
        write_page([folder])
        with suppress(MissingExtraError):
            if curves:
                draw_curves({config.run.method: records}, folder / "curves.png")
    except (OSError, ConfigError) as error:
        note(str(error))


def in_words(
    summary: Mapping[str, Any], share: str, *, real: bool = False
) -> Iterator[tuple[str, str]]:
    """What a run came to, for a person; what did not happen is not mentioned."""
    if summary["final_accuracy"] is not None:
        final, best = 100 * summary["final_accuracy"], 100 * summary["best_accuracy"]
        yield "accuracy", f"{final:.2f} %, at best {best:.2f} %"
    yield "cost", spent(summary["simulated_minutes"], summary["energy_kj"], real=real)
    up, down = (_short(summary[key]) for key in ("uploaded_mb", "downloaded_mb"))
    yield "bytes", f"{up} MB up{share}, {down} MB down"
    if summary["mean_alpha"]:
        yield "on average", f"α {summary['mean_alpha']:.2f}, β {summary['mean_beta']:.4f}"
    goal, rounds = f"to {100 * summary['target_accuracy']:g} %", summary["rounds_to_target"]
    if rounds is None:
        yield goal, "not reached"
    else:
        cost = spent(summary["minutes_to_target"], summary["kj_to_target"], real=real)
        yield goal, f"{rounds} rounds, {cost}"
    for key, title in MISHAPS.items():
        if summary[key]:
            yield title, counted(summary[key])


def counted(value: int | Mapping[str, int]) -> str:
    """How often something happened, perhaps by its cause."""
    if isinstance(value, int):
        return str(value)
    return ", ".join(f"{cause} {times}" for cause, times in value.items())


def spent(minutes: float, kilojoules: float, *, real: bool = False) -> str:
    """Time and energy as a person reads them; those of real devices follow their profiles."""
    kind, why = ("", " by the profiles") if real else (" simulated", "")
    return f"{_short(minutes)}{kind} minutes, {_short(kilojoules)} kJ{why}"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share_of_whole_models(config: Config, records: Sequence[RoundRecord]) -> str:
    """How many times less was uploaded than as many whole models take, if it was."""
    sizes = [d.bytes_up for record in records for d in record.devices if d.bytes_up]
    whole = len(sizes) * config.workload.size_bits / 8
    return f" (1/{whole / sum(sizes):.0f} of whole models)" if whole > 2 * sum(sizes) else ""
