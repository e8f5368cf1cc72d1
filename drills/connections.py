"""Connections that stall or stay silent: a device behind a frozen proxy, and idle strangers."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from anycostfl.cli.fleet import free_port
from drills.common import Order, Report
from drills.fleet import DEVICES, fleet

BEGINNINGS = (
    b"",  # connected, and then silence
    b"\x16\x03\x01\x02\x00\x01\x00",  # half of a TLS handshake
    b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n",
)
STALL_S = 3.0
STRANGERS = 40  # at a time


def drill(order: Order) -> Report:
    """Freeze a device's connection and open silent ones, N times, while a fleet trains."""
    report, dice = Report("stalled and half-open connections"), order.dice()
    with fleet(order.folder, rounds=order.times + 2) as there:
        proxy = StallingProxy(there.port)
        there.serve()
        there.join(0, proxy.port)
        for device in range(1, DEVICES):
            there.join(device)
        held: list[socket.socket] = []
        for number in range(order.times):
            there.wait_for_rounds(number + 1)
            time.sleep(dice.uniform(0.0, 0.5))
            held += [half_open(there.port, dice.choice(BEGINNINGS)) for _ in range(STRANGERS)]
            proxy.stall(STALL_S)
            report.injected += 1
        there.check(report, exact=True)
        for one in held:
            one.close()
        proxy.close()
    return report


def half_open(port: int, beginning: bytes) -> socket.socket:
    """Connect, send only a beginning, and stay connected."""
    connection = socket.create_connection(("127.0.0.1", port), 10)
    with suppress(OSError):
        connection.sendall(beginning)
    return connection


class StallingProxy:
    """Forwards bytes to a port, except while it stalls."""

    def __init__(self, target: int) -> None:
        self._target, self.port = target, free_port()
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self, seconds: float) -> None:
        """Forward nothing for a while."""
        self._open.clear()
        time.sleep(seconds)
        self._open.set()

    def close(self) -> None:
        """Accept no new connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), 10)
                except OSError:
                    near.close()  # the server is not there yet
                    continue
                far.settimeout(None)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
