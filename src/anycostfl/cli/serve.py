"""`anycostfl serve`: train a fleet of real devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anycostfl.cli._console import Json, out, say, table
from anycostfl.cli._flower import hush_flower, need_flower
from anycostfl.cli._options import MaybePreset, Overrides
from anycostfl.cli._rounds import conclude, follow, free_folder, resume_run
from anycostfl.config import Config, load_preset, to_toml
from anycostfl.errors import ConfigError
from anycostfl.fleets.attackers import reject_attacks
from anycostfl.records.round import RoundRecord, Status, total
from anycostfl.records.run import RunWriter
from anycostfl.runs import begin

if TYPE_CHECKING:
    from anycostfl.flower.link import ServerOptions


def serve(
    preset: MaybePreset = None,
    set_: Overrides = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run directory")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this run directory")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, typer.Option(help="Port to listen on; devices need none")] = 9443,
    keys: Annotated[Path, typer.Option(help="Folder written by `anycostfl keys`")] = Path("keys"),
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys: anyone may join")
    ] = False,
    wait_for: Annotated[int, typer.Option(help="Devices to wait for; 0: a full cohort")] = 0,
    min_replies: Annotated[int, typer.Option(help="With fewer, a round changes nothing")] = 1,
    deadline_s: Annotated[float, typer.Option(help="Deadline of a round, in seconds")] = 120.0,
    patience_s: Annotated[float, typer.Option(help="Seconds to wait for devices")] = 600.0,
    json: Json = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Total rounds; default: as in the preset or run")
    ] = None,
) -> None:
    """Train on the devices that join and show what it cost. Ctrl-C stops it; --resume resumes."""
    need_flower()
    hush_flower()
    from anycostfl.flower.fleet import RoundPolicy  # noqa: PLC0415
    from anycostfl.flower.keys import KeyFolder  # noqa: PLC0415 - optional
    from anycostfl.flower.link import ServerOptions, check_port, open_superlink  # noqa: PLC0415

    _check_above_zero({"--deadline-s": deadline_s, "--patience-s": patience_s})
    folder = KeyFolder(keys)
    if not insecure:
        _check_keys(folder.authority, folder.certificate, folder.certificate_key)
    check_port(host, port)
    if resume is not None:
        besides = {"a preset": preset, "--set": set_, "--out": out_dir}
        before = resume_run(resume, rounds, besides, simulated=False)
        config, writer, records = for_devices(before.config), before.writer, before.records
        check_counts(config, wait_for, min_replies)
        writer.reconfigure(to_toml(config))
    else:
        name, changes = preset or "demo", [f"run.rounds={rounds}"] if rounds is not None else []
        config = for_devices(load_preset(name, [*(set_ or []), *changes]))
        check_counts(config, wait_for, min_replies)
        writer, records = _begin(config, name, out_dir), []
    policy = RoundPolicy(deadline_s, wait_for or config.fleet.cohort, min_replies, patience_s)
    options = ServerOptions(writer.folder, host, port, None if insecure else folder, policy)
    with open_superlink(options) as superlink:
        if not json:
            _announce(options, config)
        stopped = True
        with suppress(KeyboardInterrupt):
            follow(superlink.follow(config.run.rounds), records, config, writer.folder, quiet=json)
            stopped = False
    conclude(config, writer.folder, records, stopped=stopped, json=json, real=True)
    if not json:
        out.print(_wire_table(records, superlink.restarts))
        if stopped:
            say(f"Stopped. Resume with: anycostfl serve --resume {writer.folder}")
    if stopped:
        raise typer.Exit(130)


def _begin(config: Config, name: str, out_dir: Path | None) -> RunWriter:
    from anycostfl.flower.server import server_experiment  # noqa: PLC0415 - optional

    server_experiment(config)  # first: if this fails, no folder is left
    return begin(out_dir or free_folder(Path(name).stem), config)


def _check_keys(*needed: Path) -> None:
    missing = [str(path) for path in needed if not path.is_file()]
    if missing:
        raise ConfigError(
            [f"--keys: there is no {', '.join(missing)}. Make it with `anycostfl keys --host "
             "ADDRESS DEVICE …`; --insecure does without"]
        )  # fmt: skip


def _check_above_zero(given: Mapping[str, float]) -> None:
    if wrong := {name: value for name, value in given.items() if not 0 < value < math.inf}:
        raise ConfigError([f"{n}: given {v:g}, must be > 0" for n, v in wrong.items()])


def check_counts(config: Config, wait_for: int, min_replies: int) -> None:
    """Refuse to wait for more devices than there are, or for more replies than tasks."""
    devices, cohort = config.fleet.devices, config.fleet.cohort
    problems = []
    if not 0 <= wait_for <= devices:
        problems.append(
            f"--wait-for: given {wait_for}, must be 0 (a full cohort) to {devices} (fleet.devices)"
        )
    if not 1 <= min_replies <= cohort:
        problems.append(f"--min-replies: given {min_replies}, must be 1 to {cohort} (fleet.cohort)")
    if problems:
        raise ConfigError(problems)


def for_devices(config: Config) -> Config:
    """Leave to each device what it computes on, and lose no round if the server is killed."""
    reject_attacks(config.attack)
    precision = config.training.precision
    training = replace(config.training, precision="fp32" if precision == "auto" else precision)
    return replace(config, training=training, run=replace(config.run, checkpoint_every=1))


def _announce(options: ServerOptions, config: Config) -> None:
    keys = options.keys
    who = f"{len(keys.registered())} keys registered" if keys else "PLAINTEXT, open to all"
    say(
        f"listening on {options.host}:{options.port}, {who}; waiting for "
        f"{options.policy.wait_for} devices of at most {config.fleet.devices}"
    )


def _wire_table(records: Sequence[RoundRecord], restarts: int) -> object:
    devices = [d for record in records for d in record.devices]
    counts = Counter(d.status for d in devices)
    up, down = sum(d.wire_bytes_up for d in devices), sum(d.wire_bytes_down for d in devices)
    spent = total(records)
    rows = [
        ("payloads up, MB", f"{spent.bytes_up / 1e6:.3f}"),
        ("messages up, MB", f"{up / 1e6:.3f}"),
        ("models down, MB", f"{spent.bytes_down / 1e6:.3f}"),
        ("messages down, MB", f"{down / 1e6:.3f}"),
        *(
            (f"replies {status}", counts[status])
            for status in (Status.OK, Status.FAILED, Status.REFUSED, Status.MISSING, Status.UNUSED)
        ),
        ("server app restarted", restarts),
    ]
    return table("on the wire", ("", ">"), rows)
