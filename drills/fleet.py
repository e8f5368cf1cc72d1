"""A real fleet on loopback for drills: one server, three devices, TLS and keys."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from anycostfl.cli.fleet import free_port
from anycostfl.cli.serve import for_devices
from anycostfl.config import Config
from anycostfl.flower.keys import KeyFolder, make_keys
from anycostfl.records.round import RoundRecord, Status
from anycostfl.records.run import CONFIG, read_run
from anycostfl.simulate import simulate
from drills.common import Report
from loopback import Loopback, loopback, wait_until
from small_runs import small_config, small_overrides

DEVICES = 3
PATIENCE_S = 300.0  # on a busy machine


class Fleet:
    """Starts, kills and watches the processes of one run."""

    def __init__(self, processes: Loopback, rounds: int) -> None:
        self.processes, self.folder, self.rounds = processes, processes.folder, rounds
        self.run, self.port = self.folder / "run", free_port()
        self.keys = KeyFolder(self.folder / "keys")
        self.devices: dict[int, subprocess.Popen[bytes]] = {}
        self.server: subprocess.Popen[bytes] | None = None
        make_keys(self.keys.folder, ["127.0.0.1"], [f"d{i}" for i in range(DEVICES)])

    @property
    def overrides(self) -> tuple[str, ...]:
        """What turns the small experiment into this one."""
        few = (f"fleet.devices={DEVICES}", f"fleet.cohort={DEVICES}", "fleet.energy_max_j=0.03")
        return (*few, f"run.rounds={self.rounds}")

    def config(self) -> Config:
        """The configuration that the server runs."""
        return for_devices(small_config(self.folder, *self.overrides))

    def serve(self, *options: str) -> None:
        """Start the server, or resume its run."""
        if (self.run / CONFIG).exists():
            what = ["--resume", "run"]
        else:
            sets = small_overrides(self.folder, *self.overrides)
            what = ["demo", "--out", "run", *(part for item in sets for part in ("--set", item))]
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        self.server = self.processes.start("serve", "serve", *what, *where, *options)

    def join(self, device: int, port: int | None = None) -> None:
        """Start a device, which connects to the server's port or to another."""
        self.devices[device] = self.processes.start(
            f"d{device}", "join", f"127.0.0.1:{port or self.port}", "--device", str(device),
            "--key", str(self.keys.device(f"d{device}")), "--trust", str(self.keys.authority),
            "--data", str(self.folder / "stripes.npz"), "--threads", "1",
        )  # fmt: skip

    def records(self) -> tuple[RoundRecord, ...]:
        """The rounds so far."""
        return read_run(self.run).records if (self.run / CONFIG).exists() else ()

    def wait_for_rounds(self, count: int) -> None:
        """Wait until N rounds are done."""
        wait_until(lambda: len(self.records()) >= count, PATIENCE_S, f"{count} rounds")

    def check(self, report: Report, *, exact: bool) -> None:
        """Expect that the server ended well with every round; exact: as simulated, bit for bit."""
        assert self.server is not None
        with suppress(subprocess.TimeoutExpired):
            self.server.wait(PATIENCE_S)
        report.expect(self.server.poll() == 0, "the server")
        records = self.records()
        report.expect(len(records) == self.rounds, f"{self.rounds - len(records)} rounds")
        alive = [process.poll() is None for process in self.devices.values()]
        report.expect(all(alive), f"{alive.count(False)} devices")
        missed = sum(d.status is not Status.OK for r in records for d in r.devices)
        seats = self.rounds * DEVICES
        report.note = (
            f"{missed + seats - sum(len(r.devices) for r in records)} of {seats} replies late"
        )
        if exact and not report.lost:
            report.expect(self._is_as_simulated(records), "a result that is not as simulated")

    def _is_as_simulated(self, records: tuple[RoundRecord, ...]) -> bool:
        results = list(simulate(self.config()))
        saved = load_file(self.run / f"checkpoint-{self.rounds}.safetensors")
        state = results[-1].state.weights
        same = all(torch.equal(saved[f"model/{name}"], t) for name, t in state.items())
        return same and list(map(off_the_wire, records)) == [r.record for r in results]


def off_the_wire(record: RoundRecord) -> RoundRecord:
    """As the simulator records it, which sends no messages and has no real device."""
    devices = [
        replace(d, wire_bytes_up=0, wire_bytes_down=0, busy_s=0.0, measured=None)
        for d in record.devices
    ]
    return replace(record, devices=tuple(devices))


@contextmanager
def fleet(folder: Path, rounds: int) -> Iterator[Fleet]:
    """A fleet whose processes are all gone at the end."""
    with loopback(folder) as processes:
        yield Fleet(processes, rounds)


def kill(pid: int) -> bool:
    """Kill a process; returns whether it existed."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
