"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from anycostfl.aggregate import optimal_weights
from anycostfl.planner import plan_strategies
from anycostfl.types import AnycostError, Limits, Workload, make_devices

__all__ = [
    "AnycostError",
    "Limits",
    "Workload",
    "make_devices",
    "optimal_weights",
    "plan_strategies",
]
