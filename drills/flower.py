"""kill -9 of the server app, of the whole server and of devices, while a real fleet trains."""

from __future__ import annotations

import time

from drills.common import Order, Report
from drills.fleet import DEVICES, Fleet, fleet, kill

APART = 2  # rounds between two kills


def drill(order: Order) -> Report:
    """Kill devices, the server app and the server in turns; restart what does not do so itself."""
    report, dice = Report("SIGKILL of server app, server, device"), order.dice()
    with fleet(order.folder, rounds=APART * (order.times + 1)) as there:
        there.serve("--deadline-s", "30", "--wait-for", "1")
        for device in range(DEVICES):
            there.join(device)
        for number in range(order.times):
            there.wait_for_rounds(APART * (number + 1))
            time.sleep(dice.uniform(0.0, 0.5))
            killed = KILLS[number % len(KILLS)](there, dice.randrange(DEVICES))
            report.injected += killed
        there.check(report, exact=False)
    return report


def kill_app(there: Fleet, _device: int) -> bool:
    """The server restarts its app by itself."""
    return any(kill(pid) for pid in there.processes.pids("flwr-serverapp"))


def kill_server(there: Fleet, _device: int) -> bool:
    """All processes of the server end with the first one; then the run is resumed."""
    assert there.server is not None
    killed = kill(there.server.pid)
    there.server.wait()
    until = time.monotonic() + 30
    while len(there.processes.pids()) > DEVICES and time.monotonic() < until:
        time.sleep(0.1)
    there.serve("--deadline-s", "30", "--wait-for", "1")
    return killed


def kill_device(there: Fleet, device: int) -> bool:
    """It joins again, like a board whose power was cut."""
    process = there.devices[device]
    killed = kill(process.pid)
    process.wait()
    there.join(device)
    return killed


KILLS = (kill_device, kill_app, kill_server)
