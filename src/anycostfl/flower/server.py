"""The server's half of a round over Flower: `play` is the simulator's, with real devices.

A round: sort, gather offers, plan, send every device its sub-model, wait until all have replied or
the deadline has passed, aggregate what counts. What is late, missing or refused is recorded and the
round goes on. Devices come and go between rounds; whoever answers is used again.

Flower's `Strategy.start` is not used: it waits in steps of three seconds and cannot be resumed
(docs/decisions/0050). Whoever wants it nevertheless takes `strategy.AnycostStrategy`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from logging import ERROR, INFO, WARNING, Formatter, StreamHandler, getLogger
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.app.user_config import UserConfig
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from anycostfl.attacks import check_honest
from anycostfl.config import Config
from anycostfl.errors import AnycostError
from anycostfl.files import append_line, no_link, only_one, write_whole
from anycostfl.flower.broadcast import Chain
from anycostfl.flower.messages import Ask, Task, pack_weights
from anycostfl.flower.numbers import Numbers
from anycostfl.flower.orphans import end_with_parent
from anycostfl.flower.post import PostOffice, quicken
from anycostfl.flower.roster import Roster, Terms
from anycostfl.planner import needed_budgets
from anycostfl.rounds import Outcome, receive
from anycostfl.runs import Snapshot, Turn, Turns, check_engine, keep, take_up
from anycostfl.server import Round, Server
from anycostfl.state import tensors_of
from anycostfl.types import DeviceRecord, Reason
from anycostfl.workers import InProcess, one_thread

LOG = "flower/server.log"  # what the SuperLink and the server app say
LOCK = "server.lock"  # held by the server app
FAILURE = "failure.txt"  # why the server app gave up
PACE = "pace.jsonl"  # where the seconds of each round went
FAR = 2.0  # a device that works so many times its planned seconds is not what its profile says

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run of a run directory from where it stopped."""
    quicken()
    # Flower would go on trying to reach the dead for minutes.
    end_with_parent(lambda: os._exit(1), os.getppid())
    folder = Path(str(context.run_config["run-dir"]))
    log_to(folder / LOG)
    with only_one(folder, name=LOCK, mark=mark_of(context.run_id)):
        try:
            before = take_up(folder)
            check_engine(before, simulated=False)
            for remark in before.remarks:
                log(WARNING, "%s", remark)
            terms, pace = read_terms(context.run_config), Pace(folder / PACE)
            numbers = Numbers(folder)
            turns = play(before.config, grid, terms, before.start, pace, numbers=numbers)
            for turn in keep(turns, before.config, before.writer):
                log(INFO, "round %d is done", turn.record.round + 1)
        except AnycostError as error:
            with suppress(OSError):  # a full disk, perhaps
                write_whole(folder / FAILURE, str(error).encode())
            raise
        except Exception:
            log(ERROR, "the server app died", exc_info=True)
            raise


def mark_of(run_id: int) -> str:
    """What stands in the lock of a run directory while Flower's run of this id plays it."""
    return f"Flower's run {run_id}"


def log_to(path: Path) -> None:
    """Write down what is said here: Flower shows nobody what a server app prints."""
    handler = StreamHandler(open(path, "a", opener=no_link))  # noqa: SIM115 - for good
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(message)s"))
    getLogger("flwr").addHandler(handler)


def read_terms(table: UserConfig) -> Terms:
    """From Flower's run configuration."""
    return Terms(
        deadline_s=float(table["deadline-s"]),
        wait_for=int(table["wait-for"]),
        min_replies=int(table["min-replies"]),
        patience_s=float(table["patience-s"]),
    )


def play(
    config: Config,
    grid: Grid,
    terms: Terms,
    start: Snapshot | None = None,
    pace: Pace | None = None,
    *,
    numbers: Numbers | None = None,
) -> Turns:
    """The training procedure of the paper on the devices behind a Grid, round after round.

    Devices keep their memories themselves.
    """
    check_honest(config.attack)
    server = Server(config, start)
    scale = server.side.shared.scale
    roster = Roster(PostOffice(grid), config, terms, scale=scale, numbers=numbers)
    chain = Chain(server.public)
    pace = pace or Pace()

    with one_thread():
        for number in range(server.first, config.run.rounds):
            pace.begin(number)
            server.begin(number)
            chain.add(server.step, server.public)

            least = terms.wait_for if number == server.first else terms.min_replies
            gathered = roster.gather(number, least, server.bench)
            pace.lap("gather_s")
            planned = server.plan(number, gathered.cohort, gathered.drawn)
            name_those_who_sit_out(planned)
            tasks = make_tasks(server, roster.ask(number), planned, chain, gathered.holds)
            pace.lap("plan_s")

            answers = roster.perform(tasks)
            pace.lap("devices_s")
            pace.note("send_s", roster.send_s)
            pace.note("slowest_device_s", max((a.busy_s for a in answers), default=0.0))
            pace.busy(planned, {a.reply.device: a.busy_s for a in answers if a.busy_s > 0})
            replies = (answer.reply for answer in answers)
            outcomes = receive(server.method, planned.assignments, replies)
            outcomes = server.absorb(enough(outcomes, terms.min_replies))
            pace.lap("aggregate_s")

            accuracy = server.accuracy(number, InProcess(server.side))
            record = server.close(
                planned,
                outcomes,
                accuracy,
                downloads={task.device: task.size for task in tasks},
                absent=absent(gathered.silent),
            )
            after = server.snapshot(number, {})
            pace.lap("evaluate_s")
            yield Turn(record, after)
            pace.lap("write_s")
            pace.end()


def name_those_who_sit_out(planned: Round) -> None:
    """Say in the log which budgets would do."""
    strategies, cohort = planned.strategies, planned.cohort
    for i in np.flatnonzero(~strategies.feasible).tolist():
        log(
            WARNING,
            "device %d sits out (%s); it needs %s",
            *(cohort.index[i], Reason(int(strategies.reason[i]))),
            needed_budgets(strategies, cohort.devices, i),
        )


def make_tasks(
    server: Server, ask: Ask, planned: Round, chain: Chain, holds: Mapping[int, bytes]
) -> list[Task]:
    """What each device is sent: the channels of its sub-model, or the steps that it has missed."""
    net, state = server.net, tensors_of(server.net.module)
    tasks = [
        Task(
            ask=ask,
            device=a.device,
            alpha=a.plan.alpha,
            widths=a.plan.widths,
            upload=a.upload,
            seed=a.seed,
            weights=b"" if server.step else pack_weights(net, state, a.plan),
            moved=server.moved if a.upload.feedback else {},
        )
        for a in planned.assignments
    ]
    if not server.step:
        return tasks
    return [replace(t, download=chain.since(holds.get(t.device, b""))) for t in tasks]


def enough(outcomes: list[Outcome], least: int) -> list[Outcome]:
    """With too few usable replies, none is used."""
    usable = sum(outcome.status == "ok" for outcome in outcomes)
    if usable >= least:
        return outcomes
    why = f"unused: {usable} usable replies, at least {least} needed"
    return [replace(o, status=why) if o.status == "ok" else o for o in outcomes]


def absent(devices: Sequence[int]) -> tuple[DeviceRecord, ...]:
    """Records of devices that were chosen and never said what they can afford."""
    why = "missing: it did not say what it can afford"
    return tuple(DeviceRecord(device, why) for device in devices)


class Pace:
    """Where the wall seconds of a round go; written to a file if there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seconds: dict[str, float | dict[int, float]] = {}
        self._slow: set[int] = set()  # devices that were named already
        self._last = 0.0

    def begin(self, number: int) -> None:
        """A round begins."""
        self._seconds = {"round": number}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap."""
        now = time.perf_counter()
        self._seconds[name] = round(now - self._last, 4)
        self._last = now

    def note(self, name: str, seconds: float) -> None:
        """Seconds that somebody else measured."""
        self._seconds[name] = round(seconds, 4)

    def busy(self, planned: Round, busy_s: Mapping[int, float]) -> None:
        """How long each device worked; who took far longer than planned is named, once."""
        self._seconds["busy_s"] = {device: round(s, 4) for device, s in busy_s.items()}
        plan = zip(planned.cohort.index.tolist(), planned.strategies.latency_s, strict=True)
        for device, planned_s in plan:
            worked_s = busy_s.get(device, 0.0)
            if self._path and worked_s > FAR * planned_s and device not in self._slow:
                self._slow.add(device)
                log(
                    WARNING,
                    "device %d worked %.2f s where %.2f s were planned; measure its profile on it "
                    "with `anycostfl profile`",
                    *(device, worked_s, planned_s),
                )

    def end(self) -> None:
        """The round is over."""
        if self._path is not None:
            with suppress(OSError):
                append_line(self._path, json.dumps(self._seconds))
