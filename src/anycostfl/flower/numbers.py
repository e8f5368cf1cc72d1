"""Which key has which number in the fleet: the first that a device gives, for the life of a run.

    flower/nodes.json    node of Flower → name of the key; written by `link`, which registers keys
    devices.json         name of the key → number; kept by the server app

Node ids change whenever the SuperLink restarts, so the key's name is bound. Without keys devices
cannot be told apart, and nothing is bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anycostfl.errors import AnycostError
from anycostfl.files import atomic_write

NODES = "flower/nodes.json"
DEVICES = "devices.json"


class NotReadyError(AnycostError):
    """A node whose key is not known yet, but may be in a moment."""


class NumberTakenError(AnycostError):
    """A number that belongs to another key."""


class Numbers:
    """The number of each key in a run; without a folder, or without keys, every number is free."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._bound: dict[str, int] = _read(folder / DEVICES) if folder else {}

    def claim(self, node: int, device: int) -> None:
        """Bind the number that a node asks for to its key; raise if it is taken."""
        if self._folder is None or not (self._folder / NODES).exists():
            return
        name = _read(self._folder / NODES).get(str(node))
        if name is None:
            raise NotReadyError(f"the key of node {node} is not known yet")
        if self._bound.get(name, device) != device:
            raise NumberTakenError(
                f"key {name} is device {self._bound[name]} in this run, not {device}"
            )
        owner = {number: key for key, number in self._bound.items()}.get(device, name)
        if owner != name:
            raise NumberTakenError(f"device {device} is key {owner} in this run, not {name}")
        if name not in self._bound:
            self._bound[name] = device
            _write(self._folder / DEVICES, self._bound)


def note_nodes(folder: Path, nodes: Mapping[str, int] | None) -> None:
    """Record the node of every key; without keys, that there is none."""
    if nodes is None:
        (folder / NODES).unlink(missing_ok=True)
    else:
        _write(folder / NODES, {str(node): name for name, node in nodes.items()})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise AnycostError(
            f"{path} is damaged ({error}). Delete it, and the next numbers that devices give count"
        ) from error


def _write(path: Path, table: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(table, indent=1) + "\n").encode())
