"""`anycostfl join`: be one device of a fleet."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from anycostfl.cli._console import err
from anycostfl.cli._flower import need_flower
from anycostfl.cli._options import PROFILES, parse_address
from anycostfl.config import load_profile
from anycostfl.device import cores
from anycostfl.errors import ConfigError


def join(
    server: Annotated[str, typer.Argument(help="HOST:PORT of `anycostfl serve`")],
    device: Annotated[int, typer.Option(min=0, help="Number of this device in the fleet, from 0")],
    key: Annotated[Path | None, typer.Option(help="Private key of this device")] = None,
    trust: Annotated[Path | None, typer.Option(help="The server's ca.crt")] = None,
    profile: Annotated[str, typer.Option(help=f"Hardware of this device: {PROFILES}")] = "",
    rate_bps: Annotated[
        float, typer.Option(help="Uplink in bits per second; 0: as in the profile")
    ] = 0.0,
    energy_j: Annotated[float, typer.Option(help="Energy budget of a round, in joules")] = 0.0,
    latency_s: Annotated[
        float, typer.Option(help="Latency budget of a round; 0: as in the experiment")
    ] = 0.0,
    data: Annotated[str, typer.Option(help="Data of this device: a dataset, or an .npz file")] = "",
    all_data: Annotated[
        bool, typer.Option("--all-data", help="Train on all of --data, not on a part of the split")
    ] = False,
    threads: Annotated[int, typer.Option(help="Training threads; 0: one per core")] = 0,
    patience_s: Annotated[
        float, typer.Option(help="Seconds to try an unreachable server; 0: forever")
    ] = 0.0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no key: anyone can read the traffic")
    ] = False,
) -> None:
    """Take part in the server's experiment until Ctrl-C.

    Without --profile it acts as the member of that number of the experiment's simulated fleet.
    """
    need_flower()
    parse_address(server, "SERVER")
    problems = _problems(key, trust, insecure=insecure)
    problems += _mean_problems(profile, rate_bps, energy_j, latency_s)
    problems += _count_problems(
        {"--threads": threads, "--latency-s": latency_s, "--patience-s": patience_s}
    )
    if data.endswith(".npz") and not Path(data).is_file():
        problems.append(f"--data: there is no file {data}")
    if problems:
        raise ConfigError(problems)
    from anycostfl.flower import device as apps  # noqa: PLC0415 - optional
    from anycostfl.flower.node import Address  # noqa: PLC0415
    from anycostfl.flower.node import join as be_a_node  # noqa: PLC0415

    setup = apps.Setup(
        device=device,
        profile=profile,
        rate_bps=rate_bps,
        latency_s=latency_s,
        energy_j=energy_j,
        data=data,
        all_data=all_data,
        threads=threads or cores(),
    )
    signal.signal(signal.SIGTERM, _leave)
    try:
        be_a_node(Address(server, trust, key, patience_s), apps.app, setup)
    except KeyboardInterrupt:
        err.print("left the fleet")
        raise typer.Exit(130) from None


def _problems(key: Path | None, trust: Path | None, *, insecure: bool) -> list[str]:
    if insecure:
        return ["--insecure takes no --key and no --trust"] if key or trust else []
    missing = [
        f"{name}: needed, a file that `anycostfl keys` made; --insecure does without"
        for name, path in (("--key", key), ("--trust", trust))
        if path is None
    ]
    given = (("--key", key), ("--trust", trust))
    return missing + [f"{n}: there is no file {p}" for n, p in given if p and not p.is_file()]


def _count_problems(given: Mapping[str, float]) -> list[str]:
    wrong = {name: value for name, value in given.items() if not 0 <= value < math.inf}
    return [f"{name}: given {value:g}, must be >= 0" for name, value in wrong.items()]


def _mean_problems(profile: str, rate_bps: float, energy_j: float, latency_s: float) -> list[str]:
    """What is wrong with what the device says it can afford."""
    if profile:
        measured_bps = load_profile(profile).rate_bps or 0.0
        given = {"--rate-bps": rate_bps or measured_bps, "--energy-j": energy_j}
        return [
            f"{n}: {f'given {v:g}' if v else 'needed with --profile'}, must be > 0"
            for n, v in given.items()
            if not 0 < v < math.inf
        ]
    ignored = {"--rate-bps": rate_bps, "--energy-j": energy_j, "--latency-s": latency_s}
    return [
        f"{n}: given {v:g}, allowed only with --profile; a simulated device has its own"
        for n, v in ignored.items()
        if v
    ]


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # asked twice, it leaves once
    sys.exit(128 + number)
