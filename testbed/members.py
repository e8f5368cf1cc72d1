"""Who the devices are: a share of a processor, a link, budgets; and what happens to them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """One device of the testbed."""

    cpu: float  # share of one processor
    up_bps: float
    down_bps: float
    delay_ms: float
    loss: float
    latency_s: float
    memory_mb: float = 0.0  # 0: no budget


MEMBERS = (
    Member(0.20, 8e6, 40e6, 10, 0.000, 5.0),
    Member(0.12, 6e6, 30e6, 15, 0.000, 7.0),
    Member(0.08, 4e6, 20e6, 20, 0.001, 9.0),
    Member(0.16, 2e6, 12e6, 30, 0.002, 6.0),
    Member(0.10, 12e6, 60e6, 5, 0.000, 7.5),
    Member(0.14, 3e6, 16e6, 25, 0.001, 6.5),
    Member(0.20, 10e6, 50e6, 10, 0.000, 9.0, memory_mb=1.0),
    Member(0.16, 5e6, 25e6, 20, 0.001, 9.0, memory_mb=1.0),
)
"""Together about one core. A memory budget of 1 becomes one that binds on this machine."""

SWING, PERIOD = 0.10, 9.0  # of a link's rate, and how many changes a full wave takes
CHANGE_S = 2.0  # between two changes of a link
TENTH, HALVED = 0, 1  # the devices that something happens to


def swung(member: Member, step: int, device: int, seed: int) -> tuple[float, float]:
    """A link's rates at one of its changes: a slow wave and some noise."""
    noise = random.Random(f"{seed} {device} {step}").gauss(0.0, 0.02)
    factor = 1.0 + SWING * math.sin(2 * math.pi * step / PERIOD + device) + noise
    return member.up_bps * factor, member.down_bps * factor
