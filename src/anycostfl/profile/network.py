"""The rate to a server: bytes into a sink that counts them and says so.

A request is a count (eight bytes, big endian) and that many bytes; the answer is the count. A
count of zero tells the round trip, which is not part of the rate.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from anycostfl.errors import AnycostError, ConfigError

LARGEST_BYTES = 1 << 28
TIMEOUT_S = 30.0
CHUNK = 1 << 16
HEAD = 8
MAPPED = "::ffff:"  # before an IPv4 address that an IPv6 socket shows


class NetworkError(AnycostError, OSError):
    """A server that cannot be reached, or is no sink."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a connection carries upwards, and how long an answer takes."""

    rate_bps: float
    round_trip_s: float


def parse_address(text: str, option: str = "--server") -> tuple[str, int]:
    """HOST:PORT, as an option of the command line gives it; an IPv6 host may be in brackets."""
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError([f"{option}: given {text!r}, allowed HOST:PORT"])
    return host.strip("[]"), int(port)


def measure_rate(host: str, port: int, *, least_s: float = 0.5) -> Rate:
    """Send more and more until it takes a while."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trip = statistics.median(_send(server, 0) for _ in range(5))
            count = CHUNK
            while True:
                seconds = _send(server, count)
                if seconds - round_trip >= least_s or count >= LARGEST_BYTES:
                    break
                count *= 2
    except OSError as error:
        raise NetworkError(
            f"cannot measure the rate to {host}:{port} ({error}); "
            f"start there: anycostfl profile --listen {port}"
        ) from error
    return Rate(8 * count / max(seconds - round_trip, 1e-9), round_trip)


def _send(server: socket.socket, count: int) -> float:
    """Seconds until the sink has counted so many bytes."""
    chunk = os.urandom(min(count, CHUNK))  # so that nothing on the way can compress it
    start = time.perf_counter()
    server.sendall(count.to_bytes(HEAD, "big"))
    for sent in range(0, count, CHUNK):
        server.sendall(chunk[: count - sent])
    answer = _receive(server, HEAD)
    if int.from_bytes(answer, "big") != count or len(answer) < HEAD:
        raise ConnectionError("it answers, but not as a sink does")
    return time.perf_counter() - start


def listen(
    port: int, *, host: str = "", ready: Callable[[int], None], served: Callable[[str, int], None]
) -> None:
    """Be a sink, one connection after the other, until interrupted.

    `ready` hears the port, `served` who sent how many bytes.
    """
    try:
        sink = _bound(host, port)
    except (OSError, OverflowError) as error:
        raise NetworkError(f"cannot listen on port {port}: {error}; choose another") from error
    with sink:
        ready(sink.getsockname()[1])
        while True:
            connection, (peer, *_) = sink.accept()
            with connection:
                served(peer.removeprefix(MAPPED), _swallow(connection))


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket; without a host, for IPv4 and, where there is one, IPv6 alike."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, port))
    return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)


def _swallow(connection: socket.socket) -> int:
    """Answer requests until the peer leaves, falls silent or asks for something absurd."""
    connection.settimeout(TIMEOUT_S)
    total = 0
    try:
        while len(head := _receive(connection, HEAD)) == HEAD:
            count = int.from_bytes(head, "big")
            if count > LARGEST_BYTES:
                break
            left = count
            while left and (part := connection.recv(min(left, CHUNK))):
                left -= len(part)
            if left:
                break
            total += count
            connection.sendall(head)
    except OSError:
        pass  # whoever left will measure again
    return total


def _receive(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer if the other side ends first."""
    received = b""
    while len(received) < count and (part := connection.recv(count - len(received))):
        received += part
    return received
