"""`anycostfl join`: be one device of a fleet."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from anycostfl.cli._console import err, say
from anycostfl.cli._flower import need_flower
from anycostfl.cli._options import PROFILES
from anycostfl.config import load_profile
from anycostfl.device import cores
from anycostfl.errors import ConfigError
from anycostfl.machine.clock import restored_clock, settable_clock
from anycostfl.machine.usage import has_meter

if TYPE_CHECKING:
    from anycostfl.flower.bundle import Identity
    from anycostfl.flower.device import Setup
    from anycostfl.flower.node import Address


DATA = (
    "Data of this device, all of it: an .npz or .csv file, a folder with a folder of .wav or image "
    "files for each class, or package.module:function; or the name of a task"
)


Rate = Annotated[float, Option(help="Uplink in bits per second; 0: as in the profile")]
Methods = Annotated[str, Option(help="Methods to take part in, by commas; empty: all")]
MaxEpochs = Annotated[int, Option(help="Local epochs to train at most; 0: any")]
MinBatch = Annotated[int, Option(help="Samples of a batch at the least; 0: any")]
ClipNorm = Annotated[float, Option(help="Norm that updates are scaled down to; 0: any")]
Noise = Annotated[float, Option(help="Noise on updates, in multiples of --clip-norm; 0: none")]
Joules = Annotated[float, Option(help="Energy budget of a round, in joules; 0: no limit")]
Seconds = Annotated[float, Option(help="Latency budget of a round; 0: as in the experiment")]
Memory = Annotated[float, Option(help="Bytes that this process may take to train; 0: no limit")]
Confidence = Annotated[float, Option(help="With which budgets are kept: 0.95 is 1 in 20 over")]
State = Annotated[Path | None, Option(help="File of learnt costs; default: beside --key")]
Believe = Annotated[bool, Option("--believe", help="Plan with the profile, whatever is measured")]
SetClock = Annotated[bool, Option("--set-clock", help="Set the clock as planned (cpufreq)")]
Split = Annotated[bool, Option("--split", help="A part of --data, as the experiment is split")]
AllData = Annotated[bool, Option("--all-data", hidden=True, help="All of --data, as without it")]
Patience = Annotated[float, Option(help="Seconds to try an unreachable server; 0: forever")]
Insecure = Annotated[bool, Option("--insecure", help="No TLS, no key: anyone can read along")]
Unit = Annotated[bool, Option("--unit", help="Print a systemd unit that joins with this bundle")]
Bundle = Annotated[Path | None, Option(help="Instead: one file that `keys --bundle` made")]


def join(
    server: Annotated[str, Argument(help="HOST:PORT of `anycostfl serve`")] = "",
    device: Annotated[int, Option(help="Number of this device in the fleet, from 0")] = -1,
    bundle: Bundle = None,
    unit: Unit = False,
    key: Annotated[Path | None, Option(help="Private key of this device")] = None,
    trust: Annotated[Path | None, Option(help="The server's ca.crt")] = None,
    profile: Annotated[str, Option(help=f"Hardware of this device: {PROFILES}")] = "",
    rate_bps: Rate = 0.0,
    energy_j: Joules = 0.0,
    latency_s: Seconds = 0.0,
    memory_bytes: Memory = 0.0,
    confidence: Confidence = 0.95,
    state: State = None,
    believe: Believe = False,
    set_clock: SetClock = False,
    data: Annotated[str, Option(help=DATA)] = "",
    split: Split = False,
    all_data: AllData = False,
    threads: Annotated[int, Option(help="Training threads; 0: one per core")] = 0,
    methods: Methods = "",
    max_epochs: MaxEpochs = 0,
    min_batch: MinBatch = 0,
    clip_norm: ClipNorm = 0.0,
    noise: Noise = 0.0,
    patience_s: Patience = 0.0,
    insecure: Insecure = False,
) -> None:
    """Take part in the server's experiment until Ctrl-C.

    What a round costs is measured and learnt; a profile is only where that begins. Without any
    budget and --profile it acts as the member of that number of the experiment's simulated fleet.
    """
    if problems := _identity_problems(bundle, server, device, (key, trust), insecure=insecure):
        raise ConfigError(problems)
    if split and all_data:
        raise ConfigError(["--split: not with --all-data"])
    need_flower()
    from anycostfl.flower import bundle as bundles  # noqa: PLC0415 - optional

    if unit and bundle:
        say(bundles.unit_of(bundles.read_bundle(bundle), _absolute(sys.argv[1:], bundle)))
        return
    budgets = {"latency_s": latency_s, "energy_j": energy_j, "memory_bytes": memory_bytes}
    hardware = {"profile": profile, "rate_bps": rate_bps, "threads": threads or cores()}
    learnt = {"confidence": confidence, "state": _state(state, bundle or key)}
    how = {"believe": believe, "set_clock": set_clock, "data": data, "split": split}
    allowed = {"methods": methods, "max_epochs": max_epochs, "min_batch": min_batch}
    private = {"clip_norm": clip_norm, "noise": noise}
    given = bundles.Identity(server, device, trust, key)
    with bundles.identity_of(bundle) if bundle else nullcontext(given) as who:
        table = {**budgets, **hardware, **learnt, **how, **allowed, **private}
        _take_part(who, table, patience_s, insecure=insecure)


def _state(chosen: Path | None, identity: Path | None) -> str:
    """The file of what is learnt: beside what this device is known by."""
    beside = identity.with_name(f"{identity.name}.costs.json") if identity else ""
    return str(chosen or beside)


def _take_part(who: Identity, table: dict[str, Any], patience_s: float, *, insecure: bool) -> None:
    """Be a device until Ctrl-C."""
    from anycostfl.flower import device as apps  # noqa: PLC0415 - optional
    from anycostfl.flower.node import Address  # noqa: PLC0415
    from anycostfl.flower.node import join as be_a_node  # noqa: PLC0415

    setup = apps.Setup(device=who.device, **table)
    address = Address(who.server, who.trust, who.key, patience_s)
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


def _identity_problems(
    bundle: Path | None,
    server: str,
    device: int,
    files: Sequence[Path | None],
    *,
    insecure: bool,
) -> list[str]:
    """What is wrong with who this device is: a bundle says all of it, or the options do."""
    if bundle is None:
        problems = [] if server else ["SERVER: missing, must be HOST:PORT; or give --bundle"]
        return problems if device >= 0 else [*problems, "--device: missing, must be >= 0"]
    if server or device >= 0 or any(files) or insecure:
        return ["--bundle: given with SERVER, --device, --key, --trust or --insecure, which it has"]
    return []


def _absolute(arguments: Sequence[str], bundle: Path) -> list[str]:
    """The same arguments for a unit: files by their whole path."""
    kept = [argument for argument in arguments if argument != "--unit"]
    return [str(Path(a).resolve()) if Path(a).is_file() or a == str(bundle) else a for a in kept]


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
    if not 0 <= setup.noise < math.inf or not 0 <= setup.clip_norm < math.inf:
        problems.append("--noise, --clip-norm: must be >= 0")
    if (setup.noise > 0) != (setup.clip_norm > 0):
        problems.append("--noise and --clip-norm: one without the other; give both or none")
    if setup.profile:
        load_profile(setup.profile)  # before anything else is said about it
    if not 0.5 <= setup.confidence < 1:
        problems.append(f"--confidence: given {setup.confidence:g}, must be from 0.5 to below 1")
    if setup.believe:
        problems += _belief_problems(setup)
    elif setup.energy_j and not setup.profile and not has_meter():
        problems.append(
            "--energy-j: needs a meter on this machine (RAPL, INA3221, a battery), or a --profile "
            "that tells its watts"
        )
    if setup.data.endswith(".npz") and not Path(setup.data).is_file():
        problems.append(f"--data: there is no file {setup.data}")
    return problems


def _belief_problems(setup: Setup) -> list[str]:
    """What a device must say to plan with its profile alone."""
    problems = [] if setup.profile else ["--believe: needs --profile"]
    needed = {"--rate-bps": setup.rate_bps, "--energy-j": setup.energy_j}
    if setup.profile:
        needed["--rate-bps"] = setup.rate_bps or load_profile(setup.profile).rate_bps or 0.0
    missing = [name for name, value in needed.items() if not value > 0]
    return problems + [f"{name}: needed with --believe" for name in missing]


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # asked twice, it leaves once
    sys.exit(128 + number)
