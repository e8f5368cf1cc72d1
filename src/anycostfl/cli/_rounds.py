"""Rounds on a terminal while they run, the page beside them, and their summary."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anycostfl.cli._console import amount, emit_json, note, out, print_table, say
from anycostfl.config import Config, to_toml
from anycostfl.errors import ConfigError, MissingExtraError, printable
from anycostfl.files import writing_to
from anycostfl.metrics import METRICS, MetricInfo
from anycostfl.records.budgets import budget_uses, over_budget
from anycostfl.records.round import Records, RoundRecord, Status, total
from anycostfl.records.run import ELSEWHERE, PAGE, RunWriter
from anycostfl.report import draw_curves, summarise, write_page
from anycostfl.report.trackers import Sink, values_of
from anycostfl.runs import Resumed, begin, check_engine, resume

WHAT_WOULD_DO = (
    "`anycostfl plan PRESET` says what budgets would suffice (fleet.latency_s, fleet.energy_min_j, "
    "fleet.energy_max_j; of real devices --latency-s and --energy-j of `join`)"
)

MISHAPS = {
    "devices_infeasible": "infeasible",
    "devices_failed": "failed",
    "updates_refused": "refused",
    "refused_because": "because of",
    "updates_excluded": "excluded",
    "devices_suspended": "devices suspended",
    "rounds_suspended": "rounds suspended",
    "rounds_remarked": "model reset, rounds",
}


# --- the folder -----------------------------------------------------------------------------------


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
        if rounds != run.config.run.rounds and run.config.training.schedule != "constant":
            raise ConfigError(
                [f"--rounds: given {rounds}, must be {run.config.run.rounds}: the learning rate of "
                 "this run is scheduled to end with its last round"]
            )  # fmt: skip
        longer = replace(run.config.run, rounds=rounds)
        run = replace(run, config=replace(run.config, run=longer))
    check_engine(run, simulated=simulated)
    note(*run.saved.remarks)
    return run


def open_folder(
    before: Resumed | None, out_dir: Path | None, name: str, config: Config
) -> RunWriter:
    """The directory of a run that is resumed, or a new one."""
    if before is None:
        return begin(out_dir or free_folder(Path(name).stem), config)
    before.writer.reconfigure(to_toml(config))
    return before.writer


# --- while they run -------------------------------------------------------------------------------


def follow(
    rounds: Iterator[RoundRecord],
    records: list[RoundRecord],
    config: Config,
    folder: Path,
    *,
    quiet: bool,
    sinks: Sequence[Sink] = (),
) -> bool:
    """Add rounds to the records as they come, show and track them, and keep the page fresh.

    True if Ctrl-C stopped them.
    """
    columns = (
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(*columns, console=out)
    task = bar.add_task("starting", total=config.run.rounds, completed=len(records))
    live = out.is_terminal and not quiet
    next_page, before = 0.0, time.monotonic()
    try:
        with bar if live else nullcontext():
            for record in rounds:
                records.append(record)
                for sink in sinks:
                    sink(len(records), values_of(records, config.metric))
                now = time.monotonic()
                if live:
                    line = printable(_line(records, config.metric, now - before))
                    bar.update(task, completed=len(records), description=line)
                elif not quiet:
                    say(f"round {len(records):4d}  {_line(records, config.metric, now - before)}")
                before = now
                if record.remark and not quiet:
                    note(f"round {len(records)}: {record.remark}")
                if len(records) % config.run.checkpoint_every == 0 and len(records) >= next_page:
                    _write_views(config, folder, records, curves=False)
                    next_page = 1.05 * len(records)  # so that pages of long runs cost little in all
    except KeyboardInterrupt:
        return True
    return False


def _line(done: Records, info: MetricInfo, seconds: float) -> str:
    """What was reached and spent, and how long the last round took."""
    spent = total(done)
    cost = f"{amount(spent.latency_s, 's'):>8}  {amount(spent.energy_j, 'J'):>8}"
    size = f"{amount(spent.bytes_up, 'B'):>8} up"
    return f"{last_metric(done, info)}  {cost}  {size}  {seconds:5.1f} s/round"


def last_metric(done: Records, info: MetricInfo) -> str:
    """The newest value of the metric, with its name."""
    value = next((r.metric for r in reversed(done) if r.metric is not None), None)
    return f"{info.name} {info.show(value):>7}"


def _write_views(config: Config, folder: Path, records: Records, *, curves: bool = True) -> None:
    """The page and the picture of a run; if they cannot be written, the run continues without."""
    try:
        write_page([folder])
        with suppress(MissingExtraError):
            if curves:
                draw_curves({config.run.method: records}, config.metric, folder / "curves.png")
    except (OSError, ConfigError) as error:
        note(str(error))


# --- what they came to ----------------------------------------------------------------------------


def conclude(
    config: Config, folder: Path, records: Records, *, stopped: bool, json: bool, real: bool = False
) -> None:
    """Write the page and the figure, and show what the rounds came to, perhaps on real devices."""
    summary = summarise(config.run.method, config.metric, config.run.target, records)
    _write_views(config, folder, records)
    if why := nothing_learnt(records):
        note(why)
    if json:
        measured = {"budgets": [asdict(use) for use in budget_uses(records)]} if real else {}
        emit_json({"folder": str(folder), "stopped": stopped, **summary, **measured})
        return
    title = f"{config.summary or folder.name}: {len(records)} rounds of {config.run.method}"
    share = _share_of_whole_models(config, records)
    words = in_words(summary, config.metric, share, real=real, delta=config.privacy.delta)
    words |= {f"{budget} budget": kept for budget, kept in over_budget(records).items()}
    print_table(title, ("", ""), list(words.items()))
    say(f"Everything is in {folder}; to look at it, open {folder / PAGE}")


def nothing_learnt(records: Records) -> str:
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


def in_words(
    summary: Mapping[str, Any],
    info: MetricInfo,
    share: str = "",
    *,
    real: bool = False,
    delta: float = 0.0,
) -> dict[str, str]:
    """What a run came to, for a person; what did not happen is not mentioned."""
    words = {}
    if summary["final"] is not None:
        words[info.name] = f"{info.show(summary['final'])}, at best {info.show(summary['best'])}"
    words |= {name: _other(name, value, info) for name, value in summary["others"].items()}
    if summary.get("epsilon") is not None:
        words["privacy"] = f"ε {summary['epsilon']:.3g} at most for any device, at δ {delta:g}"
    words["cost"] = spent(summary["simulated_minutes"], summary["energy_kj"], real=real)
    up, down = (amount(1e6 * summary[key], "B") for key in ("uploaded_mb", "downloaded_mb"))
    words["bytes"] = f"{up} up{share}, {down} down"
    if summary["mean_alpha"]:
        words["on average"] = f"α {summary['mean_alpha']:.2f}, β {summary['mean_beta']:.4f}"
    if summary["target"] is not None:
        goal, rounds = f"to {info.show(summary['target'])}", summary["rounds_to_target"]
        words[goal] = "not reached"
        if rounds is not None:
            cost = spent(summary["minutes_to_target"], summary["kj_to_target"], real=real)
            words[goal] = f"{rounds} rounds, {cost}"
    return words | {title: counted(summary[key]) for key, title in MISHAPS.items() if summary[key]}


def _other(name: str, value: float, info: MetricInfo) -> str:
    """A further value: of the same metric for some owners, or of another one."""
    known = METRICS.get(name)
    about = info if name.startswith(info.name) else known.info if known else MetricInfo("", "", 1.0)
    return about.show(value)


def counted(value: int | Mapping[str, int]) -> str:
    """How often something happened, perhaps by its cause."""
    if isinstance(value, Mapping):
        return ", ".join(f"{cause} {times}" for cause, times in value.items())
    return str(value)


def spent(minutes: float, kilojoules: float, *, real: bool = False) -> str:
    """Time and energy as a person reads them; those of real devices follow their profiles."""
    kind, why = ("", " by the profiles") if real else (" simulated", "")
    return f"{amount(60 * minutes, 's')}{kind}, {amount(1e3 * kilojoules, 'J')}{why}"


def _share_of_whole_models(config: Config, records: Records) -> str:
    """How many times less was uploaded than as many whole models take, if it was."""
    sizes = [d.bytes_up for record in records for d in record.devices if d.bytes_up]
    whole = len(sizes) * config.workload.size_bits / 8
    return f" (1/{whole / sum(sizes):.0f} of whole models)" if whole > 2 * sum(sizes) else ""
