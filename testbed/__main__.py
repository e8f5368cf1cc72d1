"""Run the testbed: `python -m testbed --rounds 30 --seed 0`, as root."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from anycostfl.config import load_preset
from anycostfl.device import threads
from anycostfl.files import exclusive_lock
from anycostfl.flower.keys import KeyFolder, make_keys
from anycostfl.profile.speed import elastic_model, timed_epoch
from anycostfl.records.run import JOURNAL, read_journal
from testbed import groups, network
from testbed.members import CHANGE_S, HALVED, MB, MEMBERS, TENTH, Member, swung
from testbed.peak import BATCH, SAMPLES
from testbed.verdict import rounds_over_after, uses, verdict

PORT = 9543
SETTLED = 10  # rounds after which devices should have learnt
KERNEL_BYTES = 48 * MB  # sockets and page tables, which count for a group and not for a process
BESIDES_MB = 60.0  # that a device holds beside training: connections and messages
PROGRAM = [sys.executable, "-P", "-c", "from anycostfl.cli import main; main()"]


def main() -> int:
    """Start everything, wait for the end, say how budgets were kept."""
    options = parse(sys.argv[1:])
    if missing := what_is_missing():
        sys.stderr.write("the testbed cannot run here: " + "; ".join(missing) + "\n")
        return 2
    if not network.has_netem():
        say("this kernel has no netem: links have rates, but neither delay nor loss")
    signal.signal(signal.SIGTERM, _leave)
    out = options.out or Path(tempfile.mkdtemp(prefix="anycostfl-testbed-"))
    with exclusive_lock(Path(tempfile.gettempdir()), name="anycostfl-testbed.lock"):
        told = run(options, out)
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m testbed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="anycostfl")
    parser.add_argument(
        "--believe", action="store_true", help="profiles as they are, for comparison"
    )
    parser.add_argument("--event", type=int, default=0, help="round of the events; 0: half way")
    parser.add_argument(
        "--no-events", action="store_true", help="no tenth of a link, no half quota"
    )
    parser.add_argument("--out", type=Path, help="run directory to write")
    return parser.parse_args(words)


def what_is_missing() -> list[str]:
    """Why the testbed cannot run on this machine."""
    missing = [] if os.geteuid() == 0 else ["it needs root, for namespaces and control groups"]
    missing += [
        f"the program {name} (iproute2) is not installed"
        for name in ("ip", "tc")
        if shutil.which(name) is None
    ]
    if missing:
        return missing
    try:
        with network.network(1):
            network.shape(0, 1e6, 1e6, 1, 0.0)
    except RuntimeError as error:
        missing.append(f"network namespaces or tc do not work ({error})")
    try:
        groups.make(0)
        groups.set_cpu(0, 0.5)
        groups.set_memory(0, 1 << 30)
    except OSError as error:
        missing.append(f"control groups for cpu and memory cannot be made ({error})")
    finally:
        groups.remove(0)
    return missing


def say(words: str) -> None:
    """One line about what goes on."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {words}\n")
    sys.stderr.flush()


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


# --- a run ----------------------------------------------------------------------------------------


def run(options: argparse.Namespace, out: Path) -> dict[str, object]:
    """Train, and read the journal."""
    members = with_memory(MEMBERS)
    event = 0 if options.no_events else options.event or options.rounds // 2
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="acfltb-")))
        stack.enter_context(network.network(len(members)))
        keys = scratch / "keys"
        names = [f"device-{number}" for number in range(len(members))]
        make_keys(keys, [network.SERVER], names)
        server = stack.enter_context(
            process(serve_command(options, keys, out), scratch / "serve.log")
        )
        stack.enter_context(devices(options, members, KeyFolder(keys), scratch))
        stop = threading.Event()
        stack.callback(stop.set)
        world = threading.Thread(
            target=change_the_world, args=(members, options.seed, event, out, stop), daemon=True
        )
        world.start()
        code = server.wait()
        kills = {i: groups.kills(i) for i in range(len(members))}
        logs = out / "logs"
        shutil.copytree(scratch, logs, ignore=shutil.ignore_patterns("keys"), dirs_exist_ok=True)
    if code:
        raise SystemExit(f"the server ended with code {code}; see {logs / 'serve.log'}")
    records, _ = read_journal(out)
    found = uses(records)
    told = verdict(found, min(SETTLED, options.rounds // 2))
    if event:
        told["over_after_tenth"] = rounds_over_after(found, TENTH, event)
        told["over_after_halved"] = rounds_over_after(found, HALVED, event)
    told |= {"killed": sum(kills.values()), "final": records[-1].metric, "rounds": len(records)}
    told |= {"seed": options.seed, "believe": options.believe, "run": str(out)}
    return told


def with_memory(members: Sequence[Member]) -> list[Member]:
    """Memory budgets between what the narrowest and the widest sub-model take on this machine."""
    low, high = (training_mb(alpha) for alpha in (0.25, 1.0))
    say(f"training takes {low:.0f} MB at the narrowest and {high:.0f} MB at the full width")
    budget = low + 0.5 * (high - low) + BESIDES_MB
    return [replace(m, memory_mb=budget) if m.memory_mb else m for m in members]


def training_mb(alpha: float) -> float:
    """Peak memory of a process that trains at a width, and does nothing else."""
    words = [sys.executable, "-m", "testbed.peak", str(alpha)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603
    return float(done.stdout.split()[-1]) / MB


def serve_command(options: argparse.Namespace, keys: Path, out: Path) -> list[str]:
    """The server: all devices in every round."""
    count = len(MEMBERS)
    changes = [
        f"fleet.devices={count}",
        f"fleet.cohort={count}",
        f"fleet.samples={SAMPLES}",
        "data.partition=iid",
        f"training.batch={BATCH}",
        f"run.rounds={options.rounds}",
        "run.evaluate_every=5",
        f"run.seed={options.seed}",
        f"run.method={options.method}",
    ]
    command = ["serve", "demo", "--host", network.SERVER, "--port", str(PORT)]
    command += ["--keys", str(keys), "--out", str(out), "--wait-for", str(count)]
    command += ["--deadline-s", "90", "--patience-s", "900"]
    return [*command, *(word for change in changes for word in ("--set", change))]


@contextmanager
def devices(
    options: argparse.Namespace, members: Sequence[Member], keys: KeyFolder, scratch: Path
) -> Iterator[None]:
    """Every device in its namespace and its groups."""
    full_s = epoch_s() if options.believe else 0.0
    children: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for number, member in enumerate(members):
            stack.callback(groups.remove, number)
            files = groups.make(number)
            network.shape(number, member.up_bps, member.down_bps, member.delay_ms, member.loss)
            command = ["join", f"{network.SERVER}:{PORT}", "--device", str(number)]
            command += ["--key", str(keys.device(f"device-{number}"))]
            command += ["--trust", str(keys.authority), "--threads", "1", "--patience-s", "600"]
            command += ["--latency-s", str(member.latency_s)]
            if member.memory_mb:
                command += ["--memory-bytes", f"{member.memory_mb * MB:.0f}"]
            if options.believe:
                profile = scratch / f"profile-{number}.toml"
                profile.write_text(believed(full_s / member.cpu))
                command += ["--believe", "--profile", str(profile), "--energy-j", "1e6"]
                command += ["--rate-bps", str(member.up_bps)]
            inside = ["ip", "netns", "exec", network.namespace(number)]
            log = scratch / f"device-{number}.log"
            children.append(stack.enter_context(process(command, log, inside, files)))
        yield
        for number, child in enumerate(children):  # all at once, and at full speed
            groups.set_cpu(number, 1.0)
            child.terminate()


def believed(seconds: float) -> str:
    """The profile of a device whose full model takes that long, as a data sheet would have it."""
    workload = load_preset("demo").workload
    speed = SAMPLES * workload.flops_per_sample / seconds
    return (
        f'name = "believed"\nflops_per_cycle = {speed / 1e9:.6g}\nenergy_coefficient = 1e-28\n'
        "frequency_min_hz = 1e9\nfrequency_max_hz = 1e9\npower_w = 0.1\n"
    )


def epoch_s() -> float:
    """Seconds of a round of the full model on one whole processor."""
    config = load_preset("demo")
    with threads(1):
        train = timed_epoch(config, elastic_model(config), 1.0, time.process_time)
        train(2 * config.training.batch)
        return min(train(SAMPLES) for _ in range(3))


@contextmanager
def process(
    command: Sequence[str], log: Path, inside: Sequence[str] = (), joins: Sequence[Path] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A command of this program, with its output in a file; stopped at the end."""
    words = [*inside, *PROGRAM, *command]
    if joins:  # a group is joined before anything else, so that all of the process counts
        enter = "; ".join(f"echo $$ > {file}" for file in joins)
        words = ["sh", "-c", f'{enter}; exec "$@"', "sh", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        child = subprocess.Popen(  # noqa: S603 - our own program
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        )
    try:
        yield child
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        child.kill()
        child.wait()


# --- what happens meanwhile -----------------------------------------------------------------------


def change_the_world(
    members: Sequence[Member], seed: int, event: int, out: Path, stop: threading.Event
) -> None:
    """Limits once all are there, links that swing, and the two events."""
    while not stop.wait(1.0) and rounds_done(out) < 0:
        pass
    say("all devices are there: limits apply from now on")
    for number, member in enumerate(members):
        groups.set_cpu(number, member.cpu)
        if member.memory_mb:
            with suppress(OSError):  # it may hold more from its start
                groups.set_memory(number, int(member.memory_mb * MB) + KERNEL_BYTES)
    step, told, done = 0, False, -1
    while not stop.wait(CHANGE_S):
        step += 1
        if rounds_done(out) != done:
            done = rounds_done(out)
            say(f"{done} rounds")
        happened = 0 < event <= done
        if happened and not told:
            told = True
            say(f"the link of device {TENTH} falls to a tenth, the quota of {HALVED} is halved")
            groups.set_cpu(HALVED, members[HALVED].cpu / 2)
        for number, member in enumerate(members):
            up, down = swung(member, step, number, seed)
            share = 0.1 if happened and number == TENTH else 1.0
            network.shape(number, share * up, share * down, member.delay_ms, member.loss)


def rounds_done(out: Path) -> int:
    """How many rounds the journal has; −1 before the first one is planned."""
    log = out / "flower" / "server.log"
    try:
        if sum("is ready" in line for line in log.read_text(errors="replace").splitlines()) < len(
            MEMBERS
        ):
            return -1
        journal = out / JOURNAL
        return len(journal.read_bytes().splitlines()) if journal.exists() else 0
    except OSError:
        return -1


if __name__ == "__main__":
    sys.exit(main())
