"""What the owner of a device allows a server to ask of it, checked on the device.

    t = bits/r,   f = max(f_min, C / (T − t)) ≤ f_max,   ε·f²·C + P·t ≤ E

The cost of a task is computed anew from what came: its width, its upload, and the FLOPs of the
model as it was traced here. A server that plans badly, or dishonestly, gets a refusal instead of
an update (docs/security.md). Evaluations are not counted: they have no backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from anycostfl.checks import AtLeastZero, check_fields
from anycostfl.errors import AnycostError
from anycostfl.planning.cost import (
    Devices,
    Workload,
    compute_energy_j,
    sub_model_cycles,
    upload_energy_j,
)

SLACK = 1.05  # of a budget: the server rounds, and may have traced another build of torch


class PolicyError(AnycostError):
    """A task beyond what the owner of this device allows."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an owner allows; empty or 0 is no limit.

    methods: their names, separated by commas. min_batch: with fewer samples in a batch, an update
    says much about single samples.
    """

    methods: str = ""
    max_epochs: Annotated[int, AtLeastZero] = 0
    min_batch: Annotated[int, AtLeastZero] = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, method: str, epochs: float, batch: int) -> None:
        """Raise a PolicyError if an experiment is not what the owner allows."""
        problems = []
        allowed = [name.strip() for name in self.methods.split(",") if name.strip()]
        if allowed and method not in allowed:
            problems.append(f"method {method}, allowed {', '.join(allowed)}")
        if self.max_epochs and epochs > self.max_epochs:
            problems.append(f"{epochs:g} epochs, allowed {self.max_epochs}")
        if batch < self.min_batch:
            problems.append(f"batches of {batch}, allowed from {self.min_batch}")
        if problems:
            raise PolicyError(f"the owner of this device does not allow {'; '.join(problems)}")


def check_cost(device: Devices, workload: Workload, flops_ratio: float, bits: float) -> None:
    """Raise a PolicyError if a task cannot be done within the device's budgets.

    At the lowest clock that is fast enough, which is the cheapest.
    """
    upload_s = bits / device.rate_bps
    cycles = sub_model_cycles(device, workload, flops_ratio)
    left_s = SLACK * device.latency_s - upload_s
    fastest_s = float((cycles / device.frequency_max_hz + upload_s)[0])
    if left_s[0] <= 0 or fastest_s > SLACK * device.latency_s[0]:
        raise PolicyError(
            f"this task takes {fastest_s:.3g} s at the least; the owner of this device allows "
            f"{device.latency_s[0]:.3g} s a round"
        )
    clock = (cycles / left_s).clip(device.frequency_min_hz, device.frequency_max_hz)
    energy = compute_energy_j(cycles, clock, device.energy_coefficient)
    joules = float((energy + upload_energy_j(upload_s, device.power_w))[0])
    if joules > SLACK * device.energy_j[0]:
        raise PolicyError(
            f"this task takes {joules:.3g} J at the least; the owner of this device allows "
            f"{device.energy_j[0]:.3g} J a round"
        )
