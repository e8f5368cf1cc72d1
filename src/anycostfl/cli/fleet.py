"""`anycostfl fleet`: a real fleet on this machine, to see one work before boards are bought."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from typer import Option

from anycostfl.cli._console import Json
from anycostfl.cli._flower import need_flower
from anycostfl.cli._options import Overrides, RunFolder
from anycostfl.cli.serve import serve
from anycostfl.config import load_preset
from anycostfl.errors import ConfigError

MEMBERS = {"raspberry-pi-4": 0.8, "raspberry-pi-5": 0.4, "phone-midrange": 0.4, "jetson-nano": 2.4}
"""What each device is, and the joules that a round may cost it; each affords another width."""


def fleet(
    rounds: Annotated[int, Option(help="Number of rounds")] = 4,
    out_dir: RunFolder = None,
    set_: Overrides = None,
    json: Json = False,
) -> None:
    """Train with one server and four device processes on this machine, with TLS and keys.

    The devices have the budgets of a Raspberry Pi 4 and 5, a phone and a Jetson Nano; each
    trains on two hundred images of the embedded data.
    """
    need_flower()
    from anycostfl.flower.keys import KeyFolder, make_keys  # noqa: PLC0415 - optional

    changes = [
        "summary=four devices on loopback, TLS and keys",
        "fleet.latency_s=0.4",
        "data.partition=iid",
        f"fleet.cohort={len(MEMBERS)}",
        f"run.rounds={rounds}",
        *(set_ or []),
    ]
    if (cohort := load_preset("demo", changes).fleet.cohort) > len(MEMBERS):
        raise ConfigError(
            [f"fleet.cohort: given {cohort}, must be <= {len(MEMBERS)}, all that start here"]
        )
    with tempfile.TemporaryDirectory(prefix="anycostfl-") as scratch:
        folder, port = Path(scratch, "keys"), free_port()
        names = [f"device-{number}" for number in range(len(MEMBERS))]
        make_keys(folder, ["127.0.0.1"], names)
        keys, commands = KeyFolder(folder), []
        for number, (profile, joules) in enumerate(MEMBERS.items()):
            command = ["join", f"127.0.0.1:{port}", "--device", str(number)]
            command += ["--key", str(keys.device(names[number])), "--trust", str(keys.authority)]
            command += ["--profile", profile, "--rate-bps", "1e7", "--energy-j", str(joules)]
            commands.append([*command, "--threads", "1", "--patience-s", "60"])
        with running(commands, Path(scratch)):
            serve(
                "demo",
                set_=changes,
                out_dir=out_dir,
                host="127.0.0.1",
                port=port,
                keys=folder,
                patience_s=120.0,
                json=json,
            )


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(commands: Sequence[Sequence[str]], logs: Path) -> Iterator[None]:
    """Run other commands of this program beside; stop them at the end."""
    program = [sys.executable, "-P", "-c", "from anycostfl.cli import main; main()"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (logs / f"device-{number}.log").open("wb") as file:
                process = subprocess.Popen(  # noqa: S603 - our own program
                    [*program, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
            processes.append(process)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
