"""`anycostfl serve`: train a fleet of real devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from anycostfl.cli import _options as shared
from anycostfl.cli._console import Json, note, print_table, say
from anycostfl.cli._flower import hush_flower, need_flower
from anycostfl.cli._rounds import conclude, follow, open_folder, resume_run
from anycostfl.config import Config
from anycostfl.errors import ConfigError
from anycostfl.fleets.attackers import reject_attacks
from anycostfl.planning.draw import reject_simulated_only
from anycostfl.records.round import Records, Status, total
from anycostfl.report.trackers import tracking
from anycostfl.server.robust import served

if TYPE_CHECKING:
    from anycostfl.flower.keys import KeyFolder
    from anycostfl.flower.link import ServerOptions


Insecure = Annotated[bool, Option("--insecure", help="No TLS and no keys: anyone may join")]
Metrics = Annotated[
    str, Option(metavar="PORT", help="Serve metrics for Prometheus at this port or HOST:PORT")
]
MinReplies = Annotated[
    int, Option(help="With fewer, a round changes nothing; 0: 2, if the cohort allows")
]
CloseAfter = Annotated[int, Option(help="Replies that end a round before its deadline; 0: all")]


def serve(
    preset: shared.MaybePreset = None,
    set_: shared.Overrides = None,
    out_dir: shared.RunFolder = None,
    resume: shared.Resume = None,
    host: Annotated[str, Option(help="Address to listen on")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, Option(help="Port to listen on; devices need none")] = 9443,
    keys: Annotated[Path, Option(help="Folder written by `anycostfl keys`")] = Path("keys"),
    insecure: Insecure = False,
    wait_for: Annotated[int, Option(help="Devices to wait for; 0: a full cohort")] = 0,
    min_replies: MinReplies = 0,
    close_after: CloseAfter = 0,
    deadline_s: Annotated[float, Option(help="Deadline of a round, in seconds")] = 120.0,
    patience_s: Annotated[float, Option(help="Seconds to wait for devices")] = 600.0,
    metrics: Metrics = "",
    track: shared.Track = None,
    json: Json = False,
    rounds: shared.TotalRounds = None,
) -> None:
    """Train on the devices that join and show what it cost. Ctrl-C stops it; --resume resumes."""
    need_flower()
    hush_flower()
    from anycostfl.flower.fleet import RoundPolicy  # noqa: PLC0415
    from anycostfl.flower.keys import KeyFolder  # noqa: PLC0415 - optional
    from anycostfl.flower.link import ServerOptions, check_port, open_superlink  # noqa: PLC0415
    from anycostfl.flower.server import server_experiment  # noqa: PLC0415

    folder = None if insecure else KeyFolder(keys)
    if folder:
        _check_keys(folder)
    check_port(host, port)
    before, name = None, preset or "demo"
    if resume is not None:
        besides = {"a preset": preset, "--set": set_, "--out": out_dir}
        before = resume_run(resume, rounds, besides, simulated=False)
    config = for_devices(before.config if before else shared.load_config(name, set_, rounds))
    min_replies = min_replies or min(2, config.fleet.cohort)
    seconds = {"--deadline-s": deadline_s, "--patience-s": patience_s}
    _check_policy(config, seconds, wait_for, min_replies, close_after)
    if before is None:
        server_experiment(config)  # before the folder: if this fails, none is left
    writer = open_folder(before, out_dir, name, config)
    records = before.records if before else []
    wait_for = wait_for or config.fleet.cohort
    policy = RoundPolicy(deadline_s, wait_for, min_replies, patience_s, close_after)
    options = ServerOptions(writer.folder, host, port, folder, policy)
    with (
        tracking(track or (), writer.folder, asdict(config), metrics) as sinks,
        open_superlink(options) as superlink,
    ):
        if not json:
            _announce(options, config)
        done = superlink.follow(config.run.rounds)
        stopped = follow(done, records, config, writer.folder, quiet=json, sinks=sinks)
    conclude(config, writer.folder, records, stopped=stopped, json=json, real=True)
    if not json:
        _show_wire(records, superlink.restarts)
        if stopped:
            say(f"Stopped. Resume with: anycostfl serve --resume {writer.folder}")
    if stopped:
        raise Exit(130)


def _check_keys(folder: KeyFolder) -> None:
    """Refuse keys that are missing or expired; warn about those that will be soon."""
    from anycostfl.flower.keys import check_expiry  # noqa: PLC0415 - optional

    needed = (folder.authority, folder.certificate, folder.certificate_key)
    if missing := [str(path) for path in needed if not path.is_file()]:
        raise ConfigError(
            [f"--keys: there is no {', '.join(missing)}. Make it with `anycostfl keys --host "
             "ADDRESS DEVICE …`; --insecure does without"]
        )  # fmt: skip
    note(*check_expiry(folder))


def _check_policy(
    config: Config, seconds: Mapping[str, float], wait_for: int, min_replies: int, close_after: int
) -> None:
    """Refuse to wait for no time, more devices than there are, or more replies than tasks."""
    devices, cohort = config.fleet.devices, config.fleet.cohort
    wrong = {name: value for name, value in seconds.items() if not 0 < value < math.inf}
    problems = [f"{name}: given {value:g}, must be > 0" for name, value in wrong.items()]
    if not 0 <= wait_for <= devices:
        problems.append(
            f"--wait-for: given {wait_for}, must be 0 (a full cohort) to {devices} (fleet.devices)"
        )
    if not 1 <= min_replies <= cohort:
        problems.append(f"--min-replies: given {min_replies}, must be 1 to {cohort} (fleet.cohort)")
    elif close_after and not min_replies <= close_after <= cohort:
        problems.append(
            f"--close-after: given {close_after}, must be 0 (all) or {min_replies} "
            f"(--min-replies) to {cohort} (fleet.cohort)"
        )
    if problems:
        raise ConfigError(problems)


def for_devices(config: Config) -> Config:
    """Leave to each device what it computes on, and lose no round if the server is killed.

    Defences that are off in simulation unless asked for are on.
    """
    reject_attacks(config.attack)
    if config.privacy.mode == "local":
        raise ConfigError(
            ["privacy.mode: given local, which a server cannot give: every owner does, with "
             "`anycostfl join --clip-norm 1 --noise 1`"]
        )  # fmt: skip
    reject_simulated_only(config.fleet)
    precision = config.training.precision
    training = replace(config.training, precision="fp32" if precision == "auto" else precision)
    return replace(
        config,
        training=training,
        run=replace(config.run, checkpoint_every=1),
        privacy=replace(config.privacy, secret=True),
        aggregation=served(config.aggregation),
        limits=replace(config.limits, claims=config.limits.claims or "median"),
    )


def _announce(options: ServerOptions, config: Config) -> None:
    keys = options.keys
    who = f"{len(keys.registered())} keys registered" if keys else "PLAINTEXT, open to all"
    most = f"{options.policy.wait_for} devices of at most {config.fleet.devices}"
    say(f"listening on {options.host}:{options.port}, {who}; waiting for {most}")


def _show_wire(records: Records, restarts: int) -> None:
    devices = [d for record in records for d in record.devices]
    counts, spent = Counter(d.status for d in devices), total(records)
    megabytes = {
        "payloads up, MB": spent.bytes_up,
        "messages up, MB": sum(d.wire_bytes_up for d in devices),
        "models down, MB": spent.bytes_down,
        "messages down, MB": sum(d.wire_bytes_down for d in devices),
    }
    shown = (Status.OK, Status.FAILED, Status.REFUSED, Status.MISSING, Status.UNUSED)
    rows: list[tuple[str, object]] = [
        *((name, f"{size / 1e6:.3f}") for name, size in megabytes.items()),
        *((f"replies {status}", counts[status]) for status in shown),
        ("server app restarted", restarts),
    ]
    print_table("on the wire", ("", ">"), rows)
