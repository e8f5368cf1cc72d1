"""A hostile network: a thousand connections, giant headers, half requests, floods.

Everything comes from this machine and goes to a server on 127.0.0.1. From there the server accepts
any number of connections, so the strangers' are not limited: what they take must still be bounded,
and every round of the honest fleet is played.
"""

from __future__ import annotations

import resource
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from anycostfl.errors import AnycostError
from anycostfl.flower.keys import private_key
from anycostfl.flower.node import Address, open_client
from drills.common import Order, Report
from drills.connections import BEGINNINGS, half_open
from drills.fleet import DEVICES, Fleet, fleet

CONNECTIONS = 1000
HEADER, PART = 64, bytes([120]) * (1 << 20)  # MiB of a giant header, and one of them
PAUSE_S = 0.02  # between two requests of a flood
MOST_MEMORY = 2 << 30  # bytes of the server's processes together
MOST_LOG = 25_000_000  # bytes of logs in the run directory
ROUNDS = 12
REQUEST = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n"


def drill(order: Order) -> Report:
    """Attack for so many seconds, at least until all rounds are played."""
    report = Report("hostile network")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with fleet(order.folder, rounds=ROUNDS) as there:
        there.serve("--deadline-s", "120", "--close-after", str(DEVICES))
        for device in range(DEVICES):
            there.join(device)
        there.wait_for_rounds(1)
        attackers = Attackers(there)
        begun, peak = time.monotonic(), 0
        attackers.start()
        while len(there.records()) < ROUNDS or time.monotonic() < begun + order.times:
            peak = max(peak, memory(there.processes.pids("superlink")))
            if time.monotonic() > begun + order.times + 900:
                break
            time.sleep(1.0)
        attackers.stop.set()
        there.check(report, exact=False)
        log = sum(path.stat().st_size for path in (there.run / "flower").glob("server.log*"))
        report.injected = sum(attackers.done.values())
        report.expect(peak < MOST_MEMORY, f"memory: {peak >> 20} MiB")
        report.expect(log < MOST_LOG, f"disk: {log / 1e6:.1f} MB of logs")
        did = ", ".join(f"{count} {name}" for name, count in sorted(attackers.done.items()))
        report.note += f"; {did}; {peak >> 20} MiB of the SuperLink, {log / 1e6:.1f} MB of logs"
    return report


class Attackers:
    """Threads that do what strangers do, until they are stopped."""

    def __init__(self, there: Fleet) -> None:
        self.stop, self.done = threading.Event(), Counter[str]()
        self._there = there
        self._tls = ssl.create_default_context(cafile=there.keys.authority)
        self._held: list[socket.socket] = []

    def start(self) -> None:
        """Start them all."""
        for what in (self._hold, self._giant, self._half, self._flood, self._keyed):
            threading.Thread(target=self._repeat, args=(what,), daemon=True).start()

    def _repeat(self, what: Callable[[], None]) -> None:
        while not self.stop.wait(PAUSE_S):
            with suppress(OSError, httpx.HTTPError, ValueError, AnycostError):
                what()
                self.done[what.__name__.strip("_")] += 1

    def _hold(self) -> None:
        """One more connection that stays, of a thousand."""
        if len(self._held) >= CONNECTIONS:
            self._held.pop(0).close()
        kind = BEGINNINGS[len(self._held) % len(BEGINNINGS)]
        self._held.append(half_open(self._there.port, kind))

    def _connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self._there.port), 10)
        return self._tls.wrap_socket(plain, server_hostname="127.0.0.1")

    def _giant(self) -> None:
        """A header without an end."""
        with self._connect() as line:
            line.sendall(REQUEST + b"X: ")
            for _ in range(HEADER):
                line.sendall(PART)

    def _half(self) -> None:
        """Half of a body that is announced, and then nothing."""
        line = self._connect()
        line.sendall(REQUEST + b"Content-Length: 6000000\r\n\r\n" + PART)
        self._held.append(line)

    def _flood(self) -> None:
        """Requests of a stranger, as fast as they are answered."""
        url = f"https://127.0.0.1:{self._there.port}/v1/fleet/pull-messages"
        with httpx.Client(verify=self._tls, timeout=10.0, trust_env=False) as client:
            while not self.stop.wait(PAUSE_S):
                client.post(url, content=b"\x1b[2Jgarbage" * 100)
                self.done["flood"] += 1

    def _keyed(self) -> None:
        """Requests that are signed with a device's key, for a node that is not its own."""
        keys = self._there.keys
        address = Address(f"127.0.0.1:{self._there.port}", keys.authority, keys.device("d0"), 10.0)
        client = open_client(address, private_key(keys.device("d0")))
        try:
            while not self.stop.wait(PAUSE_S):
                with suppress(httpx.HTTPStatusError):
                    client.pull(12345)
                self.done["keyed"] += 1
        finally:
            client.close()


def memory(pids: list[int]) -> int:
    """Resident bytes of processes."""
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += 1024 * int(status.split("VmRSS:")[1].split()[0])
    return total
