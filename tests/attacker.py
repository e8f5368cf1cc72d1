"""`anycostfl` with a device that attacks in every way: an attack a round between honest ones.

python tests/attacker.py join …
"""

from __future__ import annotations

import math
from dataclasses import replace

from anycostfl.cli import main
from anycostfl.codec import frame, sections
from anycostfl.device import Job, Reply, learn_honestly
from anycostfl.flower.device import Device
from anycostfl.state import State
from anycostfl.wire.messages import TrainTask

ATTACKS = ("", "garbage", "stale", "width", "nan", "")  # by the round
MOST_TENSORS = 100

perform_honestly = Device.perform
bindings: list[bytes] = []


def perform(device: Device, task: TrainTask, public: State, memory: State | None) -> Reply:
    """What a device that has a key can send."""
    bindings.append(task.upload.binding)
    reply = perform_honestly(device, task, public, memory)
    attack = ATTACKS[task.info.round % len(ATTACKS)]
    if attack == "garbage":
        return replace(reply, payload=bytes(range(256)) * (len(reply.payload) // 256))
    if attack == "stale":
        stale = replace(task.upload, binding=bindings[0])
        return perform_honestly(device, replace(task, upload=stale), public, memory)
    if attack == "width":
        return another_width(device, task)
    if attack == "nan":
        return replace(reply, payload=with_nan(reply.payload))
    return reply


def another_width(device: Device, task: TrainTask) -> Reply:
    """An intact update of this round, but of a sub-model that was not asked for."""
    net = device.runtime.net
    alpha = next(a for a in (0.1, 0.9) if net.plan(a).widths != task.widths)
    upload = replace(task.upload, beta=0.01, blocks=net.blocks())
    job = Job(task.device, alpha, upload, task.seed, task.learning_rate)
    return device.runtime.perform(net.shrink(alpha), device.samples, job, learn_honestly)


def with_nan(payload: bytes) -> bytes:
    """The payload with NaN as its largest magnitude, otherwise intact and bound as before."""
    _, binding, _ = frame.open_any(payload, sections.MAGIC)
    body = sections.read(payload, binding, MOST_TENSORS)
    assert body is not None
    return sections.write(replace(body, grid=replace(body.grid, u_max=math.nan)), binding)


if __name__ == "__main__":
    setattr(Device, "perform", perform)  # noqa: B010 - mypy does not let a method be assigned
    main()
