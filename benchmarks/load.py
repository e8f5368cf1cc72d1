"""One `serve`, many connected devices on this machine: seconds of a round, CPU and memory.

    python benchmarks/load.py --devices 200 --cohort 50 --rounds 20
    python benchmarks/load.py --devices 1000 --cohort 50 --rounds 5 --processes 5

Server and TLS are real, and every device has its own key, connections and heartbeats. Devices share
a few processes, as 200 imports of torch would not fit: each is two threads there, and they train a
tiny model one after the other.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anycostfl.cli.fleet import free_port
from anycostfl.flower import node
from anycostfl.flower.device import Setup, app
from anycostfl.records.round import Status
from anycostfl.records.run import read_journal

EACH, COLUMNS = 5, 13  # samples of a device; columns of a sample, as the preset's model takes
OVERRIDES = (
    "data.partition=iid", "run.evaluate_every=100", "fleet.latency_s=20", "fleet.energy_min_j=50",
    "fleet.energy_max_j=60", f"fleet.samples={EACH}", "training.schedule=constant",
)  # fmt: skip
PROGRAM = [sys.executable, "-P", "-m", "anycostfl"]


def main() -> None:
    """Measure, or be a process of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--preset", default="heart")
    parser.add_argument("--be", nargs=4, metavar=("PORT", "FOLDER", "FIRST", "LAST"))
    args = parser.parse_args()
    if args.be:
        port, folder, first, last = args.be
        be_devices(int(port), Path(folder), range(int(first), int(last)))
    else:
        with tempfile.TemporaryDirectory(prefix="load-") as folder:
            print(json.dumps(measure(args, Path(folder)), indent=1))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Serve the rounds to all devices; what they took."""
    port, run = free_port(), folder / "run"
    write_samples(folder, args.devices)
    names = [f"d{i}" for i in range(args.devices)]
    keys = ["keys", "--out", str(folder / "keys"), *names]
    subprocess.run([*PROGRAM, *keys], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own program
    settings = [f"fleet.devices={args.devices}", f"fleet.cohort={args.cohort}", *OVERRIDES]
    settings += [f"run.rounds={args.rounds}", f"data.name={folder / 'data.npz'}"]
    sets = [word for setting in settings for word in ("--set", setting)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--keys", str(folder / "keys")]
    serve = [
        "serve",
        args.preset,
        *sets,
        *where,
        "--out",
        str(run),
        "--wait-for",
        str(args.devices),
    ]
    begun = time.monotonic()
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen([*PROGRAM, *serve], stdout=log, stderr=log)  # noqa: S603
    hosts = [be(args, port, folder, i) for i in range(args.processes)]
    peak = 0
    try:
        while server.poll() is None:
            peak = max(peak, memory_kib(server.pid))
            time.sleep(1.0)
    finally:
        server.terminate()
        server.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        devices_kib = sum(memory_kib(host.pid) for host in hosts)
        for host in hosts:
            host.send_signal(signal.SIGKILL)
            host.wait()
    every = resource.getrusage(resource.RUSAGE_CHILDREN)
    server_s = used.ru_utime + used.ru_stime
    devices_s = every.ru_utime + every.ru_stime - server_s
    return summary(run, args, time.monotonic() - begun) | {
        "server CPU, s": round(server_s, 1),
        "devices CPU, s": round(devices_s, 1),
        "server peak, MiB": peak // 1024,
        "a device, MiB": round(devices_kib / 1024 / args.devices, 2),
    }


def write_samples(folder: Path, devices: int) -> None:
    """A table of random numbers with two classes."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EACH * devices, COLUMNS)).astype(np.float32)
    targets = (inputs[:, 0] > 0).astype(np.int64)
    np.savez(
        folder / "data.npz",
        train_inputs=inputs,
        train_targets=targets,
        test_inputs=inputs[:50],
        test_targets=targets[:50],
    )


def be(args: argparse.Namespace, port: int, folder: Path, number: int) -> subprocess.Popen[bytes]:
    """A process of devices."""
    ends = [args.devices * i // args.processes for i in (number, number + 1)]
    words = ["--be", str(port), str(folder), *map(str, ends)]
    with (folder / f"devices-{number}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, __file__, *words], stdout=log, stderr=log
        )


def memory_kib(root: int) -> int:
    """Resident memory of a process and all that it started."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) if "VmRSS:" in status else 0
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


def summary(run: Path, args: argparse.Namespace, seconds: float) -> dict[str, object]:
    """Seconds of a round by phase, and how many replies counted."""
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    records, _ = read_journal(run)
    statuses = [d.status for r in records for d in r.devices]
    busy = [sum(d.busy_s for d in r.devices) / args.processes for r in records]
    later = timing[1:] or timing
    phases = {
        key: round(statistics.median(line[key] for line in later), 2)
        for key in ("seconds", "offers_s", "plan_s", "devices_s", "evaluate_s")
    }
    return {
        "devices": args.devices,
        "cohort": args.cohort,
        "rounds": len(records),
        "replies ok": sum(status is Status.OK for status in statuses),
        "of": len(statuses),
        "until the end of the first round, s": round(seconds - sum(t["seconds"] for t in later), 1),
        "median of a round": phases,
        "devices' own work in a round, s": round(statistics.median(busy), 2),
    }


def be_devices(port: int, folder: Path, numbers: range) -> None:
    """Be some devices until the process is killed."""
    torch.set_num_threads(1)
    one_at_a_time, answer = threading.Lock(), node.answer

    def locked(*args: Any) -> Any:
        with one_at_a_time:  # they share one traced model, and Flower's identity of a process
            return answer(*args)

    vars(node)["answer"] = locked
    threads = [threading.Thread(target=be_device, args=(port, folder, i)) for i in numbers]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()


def be_device(port: int, folder: Path, number: int) -> None:
    """Be one device: what `anycostfl join` does, but for signals."""
    key = folder / "keys" / "devices" / f"d{number}"
    address = node.Address(f"127.0.0.1:{port}", folder / "keys" / "ca.crt", key)
    join: Callable[..., None] = node.join
    while True:
        with suppress(node.RefusedError):  # the server registers a thousand keys one by one
            join(address, app, Setup(number, data=str(folder / "data.npz"), split=True))


if __name__ == "__main__":
    main()
