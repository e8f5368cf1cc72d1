"""`anycostfl` with a device that lies once in every way: honest, then a lie a round, then honest.

python tests/liar.py join …
"""

from __future__ import annotations

import math
from dataclasses import replace

from anycostfl.cli import main
from anycostfl.codec import frame, sections
from anycostfl.flower.device import Device
from anycostfl.flower.messages import Task
from anycostfl.state import State
from anycostfl.workers import Job, Reply

LIES = ("", "garbage", "stale", "width", "nan", "")  # by the round
honest = Device.perform
MOST_TENSORS = 100
bindings: list[bytes] = []


def perform(device: Device, task: Task, public: State, memory: State | None) -> Reply:
    """What a device with a key sends if it wants to."""
    bindings.append(task.upload.binding)
    reply = honest(device, task, public, memory)
    lie = LIES[task.ask.round % len(LIES)]
    if lie == "garbage":
        return replace(reply, payload=bytes(range(256)) * (len(reply.payload) // 256))
    if lie == "stale":
        stale = replace(task.upload, binding=bindings[0])
        return honest(device, replace(task, upload=stale), public, memory)
    if lie == "width":
        return another_width(device, task)
    if lie == "nan":
        return replace(reply, payload=with_nan(reply.payload))
    return reply


def another_width(device: Device, task: Task) -> Reply:
    """A whole update of this round, but of a sub-model that nobody asked for."""
    alpha = next(a for a in (0.1, 0.9) if device.side.net.plan(a).widths != task.widths)
    upload = replace(task.upload, beta=0.01, blocks=device.side.net.blocks())
    job = Job(task.device, alpha, upload, task.seed)
    return device.side.work(device.side.net.shrink(alpha), device.samples(), job)


def with_nan(payload: bytes) -> bytes:
    """The payload with NaN as its largest magnitude, otherwise whole and bound as before."""
    _, tie, _ = frame.open_any(payload, sections.MAGIC)
    body = sections.read(payload, tie, MOST_TENSORS)
    assert body is not None
    return sections.write(replace(body, grid=replace(body.grid, u_max=math.nan)), tie)


if __name__ == "__main__":
    setattr(Device, "perform", perform)  # noqa: B010 - mypy knows that this is not done
    main()
