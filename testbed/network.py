"""Devices' own network namespaces, joined by a bridge; rates by tc."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BRIDGE, PREFIX = "acfltb", "10.77.0"
SERVER = f"{PREFIX}.1"
BURST, QUEUE_MS = 16_000, 400  # bytes; milliseconds that packets may wait


def run(*words: str, must: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one of the system's programs."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    if must and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done


def namespace(device: int) -> str:
    """The name of a device's namespace."""
    return f"{BRIDGE}-{device}"


def ends(device: int) -> tuple[str, str]:
    """The two ends of a device's cable: at the bridge, and in its namespace."""
    return f"{BRIDGE}b{device}", f"{BRIDGE}d{device}"


@contextmanager
def network(devices: int) -> Iterator[None]:
    """A bridge with a cable to every namespace; all gone afterwards."""
    remove(devices)
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{SERVER}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for device in range(devices):
            _connect(device)
        yield
    finally:
        remove(devices)


def _connect(device: int) -> None:
    name, (outer, inner) = namespace(device), ends(device)
    inside = ("ip", "netns", "exec", name)
    run("ip", "netns", "add", name)
    run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
    run("ip", "link", "set", inner, "netns", name)
    run("ip", "link", "set", outer, "master", BRIDGE, "up")
    run(*inside, "ip", "addr", "add", f"{PREFIX}.{10 + device}/24", "dev", inner)
    run(*inside, "ip", "link", "set", inner, "up")
    run(*inside, "ip", "link", "set", "lo", "up")


def remove(devices: int) -> None:
    """Everything that `network` made, as far as it is there."""
    for device in range(devices):
        run("ip", "link", "del", ends(device)[0], must=False)
        run("ip", "netns", "del", namespace(device), must=False)
    run("ip", "link", "del", BRIDGE, must=False)


def shape(device: int, up_bps: float, down_bps: float, delay_ms: float, loss: float) -> None:
    """Give a link its rates; delay and loss too where the kernel has netem."""
    outer, inner = ends(device)
    _limit((), outer, down_bps, delay_ms, loss)
    _limit(("ip", "netns", "exec", namespace(device)), inner, up_bps, delay_ms, loss)


def _limit(where: Sequence[str], name: str, bps: float, delay_ms: float, loss: float) -> None:
    change = (*where, "tc", "qdisc", "replace", "dev", name, "root")
    kinds = {
        "netem": ("rate", f"{bps:.0f}", "delay", f"{delay_ms}ms", "loss", f"{100 * loss}%"),
        "tbf": ("rate", f"{bps:.0f}", "burst", str(BURST), "latency", f"{QUEUE_MS}ms"),
    }
    kind = "netem" if has_netem() else "tbf"
    run(*change, kind, *kinds[kind])


_netem: list[bool] = []  # asked once


def has_netem() -> bool:
    """Whether the kernel delays and loses packets (sch_netem)."""
    if not _netem:
        name = f"{BRIDGE}probe"
        run("ip", "link", "add", name, "type", "dummy", must=False)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}2", must=False)
        tried = run("tc", "qdisc", "add", "dev", name, "root", "netem", "delay", "1ms", must=False)
        run("ip", "link", "del", name, must=False)
        _netem.append(tried.returncode == 0)
    return _netem[0]
