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
from anycostfl.files import atomic_write, read_file
from anycostfl.wire.messages import DeviceRejectedError

NODES = "flower/nodes.json"
DEVICES = "devices.json"
LONGEST = 1 << 24  # bytes of either


class NotReadyError(AnycostError):
    """A node whose key is not known yet, but may be in a moment."""


def claim_number(folder: Path, node: int, device: int) -> None:
    """Bind the number that a node asks for to its key in a run; raise if it is taken."""
    if not (folder / NODES).exists():
        return
    name, bound = _read(folder / NODES).get(str(node)), _read(folder / DEVICES)
    if name is None:
        raise NotReadyError(f"the key of node {node} is not known yet")
    if bound.get(name, device) != device:
        raise DeviceRejectedError(f"key {name} is device {bound[name]} in this run, not {device}")
    owner = {number: key for key, number in bound.items()}.get(device, name)
    if owner != name:
        raise DeviceRejectedError(f"device {device} is key {owner} in this run, not {name}")
    if name not in bound:
        _write(folder / DEVICES, {**bound, name: device})


def note_nodes(folder: Path, nodes: Mapping[str, int] | None) -> None:
    """Record the node of every key; without keys, that there is none."""
    if nodes is None:
        (folder / NODES).unlink(missing_ok=True)
    else:
        _write(folder / NODES, {str(node): name for name, node in nodes.items()})


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_file(path, LONGEST)))
    except FileNotFoundError:
        return {}
    except (TypeError, ValueError) as error:
        raise AnycostError(
            f"{path} is damaged ({error}). Delete it, and the next numbers that devices give count"
        ) from error


def _write(path: Path, table: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(table, indent=1) + "\n").encode())
