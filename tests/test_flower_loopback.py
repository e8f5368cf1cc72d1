"""A real fleet on loopback: TLS, keys, real processes, and what happens when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anycostfl import tasks
from anycostfl.cli.fleet import free_port
from anycostfl.cli.serve import for_devices
from anycostfl.config import Config, parse_config
from anycostfl.data.prepare import prepare_dataset
from anycostfl.data.samples import Dataset, Samples
from anycostfl.experiment import build_experiment
from anycostfl.flower.keys import KeyFolder, make_keys
from anycostfl.loop import RoundResult
from anycostfl.records.round import RoundRecord, Status
from anycostfl.records.run import read_run
from anycostfl.simulate import simulate, simulate_on
from attacker import ATTACKS
from command_line import sets
from loopback import PROGRAM, Loopback, loopback, wait_until
from small_runs import small_config
from test_flower import off_the_wire

REFUSALS = {
    "": "ok",
    "garbage": "refused: malformed: not a payload",
    "stale": "refused: foreign: the payload is bound to another run, round, device or plan",
    "width": "refused: foreign: the payload was made for other parameter names or shapes",
    "nan": "refused: malformed: range [",
}
FOUR = ("fleet.devices=4", "fleet.cohort=4", "fleet.energy_max_j=0.03")


class Fleet:
    """One server and four devices, members of the simulated fleet."""

    def __init__(self, processes: Loopback, *more: str) -> None:
        self.processes, self.folder = processes, processes.folder
        self.run = self.folder / "run"
        self.more = (*FOUR, *more)
        self.port = free_port()
        self.keys = KeyFolder(self.folder / "keys")
        make_keys(self.keys.folder, ["127.0.0.1"], [f"d{i}" for i in range(4)])

    @property
    def config(self) -> Config:
        return for_devices(small_config(self.folder, *self.more))

    def serve(
        self,
        *options: str,
        resume: bool = False,
        about: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> subprocess.Popen[bytes]:
        if resume:
            what = ["--resume", "run"]
        else:
            what = [*(about or ["demo", "--out", "run", *sets(self.folder, *self.more)])]
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        return self.processes.start("serve", "serve", *what, *where, *options, program=program)

    def join(
        self,
        device: int,
        key: Path | None = None,
        program: Sequence[str] = PROGRAM,
        data: Sequence[str] = ("--data", "stripes.npz", "--split"),
    ) -> subprocess.Popen[bytes]:
        return self.processes.start(
            f"d{device}" if key is None else key.name,
            "join", f"127.0.0.1:{self.port}", "--device", str(device),
            "--key", str(key or self.keys.device(f"d{device}")),
            "--trust", str(self.keys.authority),
            "--threads", "1", *data, program=program,
        )  # fmt: skip

    def records(self) -> tuple[RoundRecord, ...]:
        return read_run(self.run).records if (self.run / "config.toml").exists() else ()

    def wait_for_rounds(self, count: int, seconds: float = 120) -> None:
        wait_until(lambda: len(self.records()) >= count, seconds, f"{count} rounds")

    def assert_as_simulated(self) -> None:
        self.assert_same(list(simulate(self.config)))

    def assert_same(self, results: Sequence[RoundResult]) -> None:
        assert [off_the_wire(r) for r in self.records()] == [r.record for r in results]
        saved = load_file(self.run / f"checkpoint-{len(results)}.safetensors")
        for name, tensor in results[-1].state.weights.items():
            assert torch.equal(saved[f"model/{name}"], tensor), name


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Loopback]:
    with loopback(tmp_path) as running:
        yield running


def ends(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; the wait is long, for a machine that has much else to do."""
    return process.wait(300)


ELSEWHERE = """
from anycostfl.tasks.spoken_digits import TASK as DIGITS

TASK = DIGITS.without_data()
"""
"""Spoken digits without samples: whoever tries to load any fails."""


def write_speakers(folder: Path) -> Dataset:
    """A file of each of four speakers' digits; what their devices make of them, as one dataset."""
    samples, kept = tasks.load("spoken-digits").dataset().train, []
    assert samples.owners is not None
    for number, speaker in enumerate(sorted(set(samples.owners.tolist()))[:4]):
        own = samples.take(samples.owners == speaker)
        path = folder / f"speaker-{number}.npz"
        np.savez(path, train_inputs=own.inputs, train_targets=own.targets)
        named = replace(own, owners=torch.full_like(own.targets, number))
        kept.append(tasks.hold_out_tenth(Dataset(named, named.take(slice(0, 0)))))
    parts = [one.train.tensors() for one in kept], [one.test.tensors() for one in kept]
    train, test = (
        Samples(torch.cat(inputs), torch.cat(targets), torch.cat(owners))
        for inputs, targets, owners in (zip(*part, strict=True) for part in parts)
    )
    return Dataset(train, test, ("0", "1", "2", "3"))


LEARNS = (
    "data.name=digits-elsewhere", "data.evaluate=devices", "fleet.devices=4", "fleet.cohort=4",
    "fleet.latency_s=0.2", "limits.beta_max=0.3", "training.batch=5", "workload.epochs=6",
)  # fmt: skip
"""Enough for a hundred recordings to be told apart within five rounds."""


def test_four_speakers_train_a_model_over_tls_as_simulated_and_a_stranger_is_refused(
    processes: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four widths; each device has a key and a file of its own, and the server has no data."""
    fleet = Fleet(processes)
    own = fleet.folder / "mine" / "tasks"
    own.mkdir(parents=True)
    (own / "digits_elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.setenv("ANYCOSTFL_PATH", str(own.parent))
    raw = write_speakers(fleet.folder)
    make_keys(fleet.folder / "elsewhere", [], ["stranger"])
    given = [part for item in LEARNS for part in ("--set", item)]
    server = fleet.serve(about=["spoken-digits", "--rounds", "5", "--out", "run", *given])
    files = [["--data", f"speaker-{i}.npz"] for i in range(4)]
    devices = [fleet.join(i, data=files[i]) for i in range(4)]
    key = KeyFolder(fleet.folder / "elsewhere").device("stranger")
    stranger = fleet.join(0, key, data=files[0])
    assert ends(server) == 0, processes.log("serve")

    records = fleet.records()
    assert [[d.explained for d in record.devices] for record in records] == 5 * [4 * ["ok"]]
    assert [d.samples for d in records[0].devices] == 4 * [63]  # of 70, a tenth is held out
    assert len({d.alpha for d in records[0].devices}) == 4
    assert records[-1].metric is not None
    assert records[-1].metric > 0.5
    fleet.assert_same(simulated_speakers(fleet.run, raw))
    for record in records:
        assert all(d.wire_bytes_down > d.bytes_down and d.wire_bytes_up for d in record.devices)
        assert all(d.busy_s > 0 for d in record.devices)
    for device in devices:
        device.terminate()
    assert [ends(device) for device in devices] == [143] * 4
    said = (fleet.run / "flower" / "server.log").read_text()
    assert "device 0 is ready" in said
    assert "round 5 is done" in said
    assert "refused by the server" in processes.log("stranger")
    assert "joined" not in processes.log("stranger")
    assert (fleet.run / "report.html").exists()
    stranger.terminate()
    ends(stranger)
    wait_until(lambda: not processes.pids(), 20, "every process is gone")


def simulated_speakers(run: Path, raw: Dataset) -> list[RoundResult]:
    """The rounds of a run if all speakers lived on this machine."""
    saved = load_file(run / "checkpoint-5.safetensors")
    fitted = {name: saved[f"fitted/{name}"] for name in ("mean", "std")}
    task = tasks.load("spoken-digits")
    here = prepare_dataset(task.preparation, raw).fitted
    for name, tensor in here.items():  # the server fitted it on sums
        torch.testing.assert_close(fitted[name], tensor)
    config = parse_config((run / "config.toml").read_text(), "run", foreign=True)
    dataset = prepare_dataset(task.preparation, raw, fitted)
    return list(simulate_on(build_experiment(config, dataset, task=task), dataset))


@pytest.mark.slow
def test_every_attack_of_a_device_is_refused_and_the_run_goes_on(
    processes: Loopback,
) -> None:
    fleet = Fleet(processes, f"run.rounds={len(ATTACKS)}", "gate.strikes=0")  # else suspended
    server = fleet.serve()
    for i in range(3):
        fleet.join(i)
    fleet.join(3, program=[sys.executable, str(Path(__file__).with_name("attacker.py"))])
    assert ends(server) == 0, processes.log("serve")
    told = [{d.device: d.explained for d in record.devices} for record in fleet.records()]
    assert len(told) == len(ATTACKS)
    assert all(statuses[i] == "ok" for statuses in told for i in range(3))
    for attack, statuses in zip(ATTACKS, told, strict=True):
        assert statuses[3].startswith(REFUSALS[attack]), (attack, statuses[3])


@pytest.mark.slow
def test_a_key_that_returns_under_another_number_is_rejected(processes: Loopback) -> None:
    fleet = Fleet(processes, "run.rounds=400")
    server = fleet.serve("--wait-for", "2")
    devices = [fleet.join(0), fleet.join(1)]
    fleet.wait_for_rounds(1)
    devices[1].terminate()
    ends(devices[1])
    other = fleet.join(3, fleet.keys.device("d1"))
    assert ends(other) == 2
    assert "key d1 is device 1 in this run, not 3" in processes.log("d1")
    os.killpg(server.pid, signal.SIGINT)
    ends(server)


# --- drills: what is killed comes back, and nothing is lost ---------------------------------------


@pytest.mark.slow
def test_a_killed_device_misses_one_round_and_is_used_again(processes: Loopback) -> None:
    fleet = Fleet(processes, "run.rounds=400")
    server = fleet.serve("--deadline-s", "10", "--min-replies", "2")
    devices = [fleet.join(i) for i in range(4)]
    fleet.wait_for_rounds(2)
    os.kill(devices[2].pid, signal.SIGSTOP)  # it cannot answer the round that runs
    stopped_in = len(fleet.records())
    fleet.wait_for_rounds(stopped_in + 1)
    os.kill(devices[2].pid, signal.SIGKILL)
    fleet.wait_for_rounds(stopped_in + 4)
    rounds = fleet.records()[stopped_in - 1 :]
    missed = [r for r in rounds if any(d.status is Status.MISSING for d in r.devices)]
    assert len(missed) == 1
    assert {d.device: d.explained for d in missed[0].devices} == {
        0: "ok", 1: "ok", 2: "missing: no reply within 10 s", 3: "ok",
    }  # fmt: skip
    assert [d.device for d in rounds[-1].devices] == [0, 1, 3]
    back = fleet.join(2)
    before = len(fleet.records())

    def is_used_again() -> bool:
        return any(
            d.device == 2 and d.status is Status.OK
            for record in fleet.records()[before:]
            for d in record.devices
        )

    wait_until(is_used_again, 90, "the restarted device takes part")
    os.killpg(server.pid, signal.SIGINT)
    assert ends(server) == 130, processes.log("serve")
    assert "anycostfl serve --resume run" in processes.log("serve")
    for device in (*devices, back):
        device.kill()
        ends(device)
    wait_until(lambda: not processes.pids(), 20, "every process is gone")


@pytest.mark.slow
def test_a_killed_server_app_is_restarted_and_nothing_is_lost(processes: Loopback) -> None:
    fleet = Fleet(processes, "run.rounds=6")
    server = fleet.serve()
    for i in range(4):
        fleet.join(i)
    fleet.wait_for_rounds(2)
    (app,) = processes.pids("flwr-serverapp")
    os.kill(app, signal.SIGKILL)
    assert ends(server) == 0, processes.log("serve")
    assert "server app restarted" in processes.log("serve")
    fleet.assert_as_simulated()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_superlink_that_hangs_or_dies_is_replaced_and_nothing_is_lost(
    processes: Loopback, how: int
) -> None:
    fleet = Fleet(processes, "run.rounds=5")
    server = fleet.serve()
    for i in range(4):
        fleet.join(i)
    fleet.wait_for_rounds(2)
    (superlink,) = processes.pids("anycostfl.flower.superlink")
    os.kill(superlink, how)
    assert ends(server) == 0, processes.log("serve")
    assert "died or hangs; starting it again" in processes.log("serve")
    fleet.assert_as_simulated()


@pytest.mark.slow
def test_what_flower_documents_is_enough_and_gives_the_same_run(processes: Loopback) -> None:
    documented = [sys.executable, "-P", str(Path(__file__).with_name("documented.py"))]
    fleet = Fleet(processes, "run.rounds=2")
    server = fleet.serve("--deadline-s", "250", program=documented)
    for i in range(4):
        fleet.join(i, program=documented)
    assert ends(server) == 0, processes.log("serve")
    fleet.assert_as_simulated()
    assert "flower-supernode` runs this device" in processes.log("d0")
    assert "the `flwr` program registers devices" in processes.log("serve")


@pytest.mark.slow
def test_a_killed_server_is_resumed_for_longer_and_nothing_is_lost(processes: Loopback) -> None:
    fleet = Fleet(processes, "run.rounds=6", "compression.feedback=true")
    server = fleet.serve("--rounds", "4")
    devices = [fleet.join(i) for i in range(4)]
    fleet.wait_for_rounds(2)
    server.kill()
    wait_until(lambda: len(processes.pids()) == len(devices), 30, "the server's processes follow")
    again = fleet.serve("--rounds", "6", resume=True)
    assert ends(again) == 0, processes.log("serve")
    fleet.assert_as_simulated()
