"""`anycostfl join`: be one device of a fleet."""

from __future__ import annotations

import math
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from anycostfl.cli._console import err
from anycostfl.cli._flower import need_flower
from anycostfl.cli._options import PROFILES
from anycostfl.config import load_profile
from anycostfl.device import cores
from anycostfl.errors import ConfigError
from anycostfl.machine.clock import restored_clock, settable_clock
from anycostfl.machine.usage import has_meter

if TYPE_CHECKING:
    from anycostfl.flower.device import Setup
    from anycostfl.flower.node import Address


DATA = (
    "Data of this device, all of it: an .npz or .csv file, a folder with a folder of .wav or image "
    "files for each class, or package.module:function; or the name of a task"
)


def join(
    server: Annotated[str, Argument(help="HOST:PORT of `anycostfl serve`")],
    device: Annotated[int, Option(min=0, help="Number of this device in the fleet, from 0")],
    key: Annotated[Path | None, Option(help="Private key of this device")] = None,
    trust: Annotated[Path | None, Option(help="The server's ca.crt")] = None,
    profile: Annotated[str, Option(help=f"Hardware of this device: {PROFILES}")] = "",
    rate_bps: Annotated[
        float, Option(help="Uplink in bits per second; 0: as in the profile")
    ] = 0.0,
    energy_j: Annotated[float, Option(help="Energy budget of a round, in joules")] = 0.0,
    latency_s: Annotated[
        float, Option(help="Latency budget of a round; 0: as in the experiment")
    ] = 0.0,
    memory_bytes: Annotated[
        float, Option(help="Memory that this process may take while it trains; 0: no limit")
    ] = 0.0,
    confidence: Annotated[
        float, Option(help="With which a budget is kept: 0.95 is one round in twenty over")
    ] = 0.95,
    state: Annotated[
        Path | None, Option(help="File of what is learnt about costs; default: beside --key")
    ] = None,
    believe: Annotated[
        bool, Option("--believe", help="Plan with the profile as it is, whatever is measured")
    ] = False,
    set_clock: Annotated[
        bool, Option("--set-clock", help="Set the processor's clock as planned (cpufreq)")
    ] = False,
    data: Annotated[str, Option(help=DATA)] = "",
    split: Annotated[
        bool, Option("--split", help="Train on a part of --data, as the experiment is split")
    ] = False,
    all_data: Annotated[
        bool, Option("--all-data", hidden=True, help="Train on all of --data, as without it")
    ] = False,
    threads: Annotated[int, Option(help="Training threads; 0: one per core")] = 0,
    patience_s: Annotated[
        float, Option(help="Seconds to try an unreachable server; 0: forever")
    ] = 0.0,
    insecure: Annotated[
        bool, Option("--insecure", help="No TLS and no key: anyone can read the traffic")
    ] = False,
) -> None:
    """Take part in the server's experiment until Ctrl-C.

    What a round costs is measured and learnt; a profile is only where that begins. Without any
    budget and --profile it acts as the member of that number of the experiment's simulated fleet.
    """
    if split and all_data:
        raise ConfigError(["--split: not with --all-data"])
    learnt = str(state or (key.with_name(f"{key.name}.costs.json") if key else ""))
    budgets = {"latency_s": latency_s, "energy_j": energy_j, "memory_bytes": memory_bytes}
    hardware = {"profile": profile, "rate_bps": rate_bps, "threads": threads or cores()}
    how = {"confidence": confidence, "state": learnt, "believe": believe, "set_clock": set_clock}
    table = {"device": device, "data": data, "split": split, **budgets, **hardware, **how}
    _take_part((server, trust, key, patience_s), table, insecure=insecure)


def _take_part(
    where: tuple[str, Path | None, Path | None, float], table: dict[str, Any], *, insecure: bool
) -> None:
    """Be the device, until it is told to leave."""
    need_flower()
    from anycostfl.flower import device as apps  # noqa: PLC0415 - optional
    from anycostfl.flower.node import Address  # noqa: PLC0415
    from anycostfl.flower.node import join as be_a_node  # noqa: PLC0415

    setup, address = apps.Setup(**table), Address(*where)
    if problems := [*_address_problems(address, insecure=insecure), *_setup_problems(setup)]:
        raise ConfigError(problems)
    signal.signal(signal.SIGTERM, _leave)
    if setup.set_clock and settable_clock() is None:
        err.print("--set-clock: not possible on this system; planning at the clock there is")
    try:
        with restored_clock() if setup.set_clock else nullcontext():
            be_a_node(address, apps.app, setup)
    except KeyboardInterrupt:
        err.print("left the fleet")
        raise Exit(130) from None


def _address_problems(address: Address, *, insecure: bool) -> list[str]:
    """What is wrong with where the server is, and with the keys to it."""
    problems, files = [], {"--key": address.key, "--trust": address.trust}
    host, _, port = address.server.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        problems.append(f"SERVER: given {address.server!r}, must be HOST:PORT")
    if not 0 <= address.patience_s < math.inf:
        problems.append(f"--patience-s: given {address.patience_s:g}, must be >= 0")
    if insecure and any(files.values()):
        problems.append("--insecure takes no --key and no --trust")
    for name, path in files.items():
        if insecure:
            continue
        if path is None:
            why = "needed, a file that `anycostfl keys` made; --insecure does without"
            problems.append(f"{name}: {why}")
        elif not path.is_file():
            problems.append(f"{name}: there is no file {path}")
    return problems


def _setup_problems(setup: Setup) -> list[str]:
    """What is wrong with what the device says it can afford, and trains with."""
    problems = []
    numbers = {
        "--rate-bps": setup.rate_bps,
        "--energy-j": setup.energy_j,
        "--latency-s": setup.latency_s,
        "--memory-bytes": setup.memory_bytes,
        "--threads": setup.threads,
    }
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            problems.append(f"{name}: given {value:g}, must be >= 0")
    if setup.profile:
        load_profile(setup.profile)  # before anything else is said about it
    if not 0.5 <= setup.confidence < 1:
        problems.append(f"--confidence: given {setup.confidence:g}, must be from 0.5 to below 1")
    if setup.believe:
        needed = {"--rate-bps": setup.rate_bps, "--energy-j": setup.energy_j}
        if setup.profile:
            needed["--rate-bps"] = setup.rate_bps or load_profile(setup.profile).rate_bps or 0.0
        else:
            problems.append("--believe: needs --profile")
        for name, value in needed.items():
            if not value > 0:
                problems.append(f"{name}: needed with --believe")
    elif setup.energy_j and not setup.profile and not has_meter():
        problems.append(
            "--energy-j: needs a meter on this machine (RAPL, INA3221, a battery), or a --profile "
            "that tells its watts"
        )
    if setup.data.endswith(".npz") and not Path(setup.data).is_file():
        problems.append(f"--data: there is no file {setup.data}")
    return problems


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # asked twice, it leaves once
    sys.exit(128 + number)
