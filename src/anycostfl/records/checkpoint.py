"""Checkpoints: named tensors of several kinds in one safetensors file, with a checksum.

The kinds are `model`, `velocity`, `second`, `average`, `public`, `moved`, `fitted` and
`memory/DEVICE`. A checkpoint is written
beside its place and renamed into it, so that it is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anycostfl.files import memory_bytes, sync
from anycostfl.state import State

KEPT_CHECKPOINTS = 2
MEMORY = "memory"
DAMAGE = (SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError)
"""What `read_checkpoint` raises if a file is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The states after a number of rounds, by kind."""

    rounds: int
    states: Mapping[str, State]

    def __getitem__(self, kind: str) -> State:
        return self.states.get(kind, {})

    def memories(self) -> dict[int, State]:
        """What each simulated device remembered."""
        kinds = [kind for kind in self.states if kind.startswith(f"{MEMORY}/")]
        return {int(kind.removeprefix(f"{MEMORY}/")): self.states[kind] for kind in kinds}


def write_checkpoint(folder: Path, point: Checkpoint) -> None:
    """Save a checkpoint, then delete all but the newest ones."""
    tensors = {
        # Copies, for safetensors refuses tensors that share memory (tied weights).
        f"{kind}/{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for kind, state in point.states.items()
        for name, tensor in state.items()
    }
    about = {"rounds": point.rounds, "crc32": _checksum(tensors)}
    path = folder / f"checkpoint-{point.rounds}.safetensors"
    part = path.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        part.touch(exist_ok=False)  # never through a link left there
        save_file(tensors, part, {"checkpoint": json.dumps(about)})
        sync(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise OSError(str(error)) from error
    sync(folder)
    for old in checkpoints(folder)[KEPT_CHECKPOINTS:]:
        old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, newest first."""
    every = folder.glob("checkpoint-*.safetensors")
    found = (path for path in every if path.is_file() and not path.is_symlink())
    return sorted((path for path in found if rounds_in(path) >= 0), key=rounds_in, reverse=True)


def rounds_in(path: Path) -> int:
    """How many rounds a checkpoint's name says it has; -1 if it is none's."""
    found = re.fullmatch(r"checkpoint-(\d+)\.safetensors", path.name)
    return int(found[1]) if found else -1


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a file; one of `DAMAGE` if that is not what it holds."""
    if path.stat().st_size > (most := memory_bytes() // 2):
        raise ValueError(f"it has {path.stat().st_size} bytes, at most {most} fit into memory")
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["checkpoint"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    if about["crc32"] != _checksum(tensors):
        raise ValueError("its checksum does not match")
    rounds = about["rounds"]
    if type(rounds) is not int or rounds < 0:
        raise ValueError(f"it says {rounds!r} rounds")
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == MEMORY:
            device, _, name = name.partition("/")
            kind = f"{MEMORY}/{int(device)}"
        states.setdefault(kind, {})[name] = tensor
    return Checkpoint(rounds, states)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of names and bytes, in the order of the names."""
    crc = 0
    for name in sorted(tensors):
        content = tensors[name].contiguous().flatten().view(torch.uint8).numpy()
        crc = zlib.crc32(content.tobytes(), crc)
        crc = zlib.crc32(name.encode(), crc)
    return f"{crc:08x}"
