"""FedNova (Wang et al., 2020): updates normalised by the local steps that led to them.

    w ← w − τ_eff·Σ_i p_i u_i / ‖a_i‖₁,   τ_eff = Σ_i p_i ‖a_i‖₁

For plain SGD ‖a_i‖₁ is the number of local steps τ_i; with a local momentum ρ it is
(τ_i − ρ(1 − ρ^τ_i)/(1 − ρ)) / (1 − ρ). Without it, a device that computes more pulls the model
towards its own data by more than its share. Where all do equal work it is FedAvg.
"""

from __future__ import annotations

from dataclasses import replace

from anycostfl.checks import FloatArray
from anycostfl.methods.fedavg import METHOD as FEDAVG
from anycostfl.methods.fedavg import STRICT


def accumulated(steps: FloatArray, momentum: float) -> FloatArray:
    """‖a‖₁: how far that many unit steps of SGD with momentum go."""
    geometric = momentum * (1.0 - momentum**steps) / (1.0 - momentum)
    reach: FloatArray = (steps - geometric) / (1.0 - momentum)
    return reach


def rescale(weights: FloatArray, steps: FloatArray, momentum: float) -> FloatArray:
    """τ_eff / ‖a_i‖₁ for every update; aggregation divides by Σ p."""
    reach = accumulated(steps, momentum)
    mean = (weights * reach).sum() / weights.sum()
    factors: FloatArray = mean / reach
    return factors


METHOD = replace(
    FEDAVG,
    summary="FedNova: FedAvg with updates normalised by their local steps, partial work",
    rescale=rescale,
    strict=replace(STRICT, rescale=rescale),
)
