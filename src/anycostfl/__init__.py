"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from anycostfl.aggregate import optimal_weights
from anycostfl.codec import compress, decompress
from anycostfl.elastic_file import load_elastic, save_elastic
from anycostfl.errors import (
    AlphaError,
    AnycostError,
    ConfigError,
    InfeasibleBudget,
    NotShrinkable,
    PayloadError,
    ShapeMismatch,
    TraceError,
    UnknownName,
)
from anycostfl.planner import plan_strategies
from anycostfl.shrink import ElasticModel, SubModel, WidthPlan, recalibrate
from anycostfl.types import Limits, Update, Workload, make_devices

__all__ = [
    "AlphaError",
    "AnycostError",
    "ConfigError",
    "ElasticModel",
    "InfeasibleBudget",
    "Limits",
    "NotShrinkable",
    "PayloadError",
    "ShapeMismatch",
    "SubModel",
    "TraceError",
    "UnknownName",
    "Update",
    "WidthPlan",
    "Workload",
    "compress",
    "decompress",
    "load_elastic",
    "make_devices",
    "optimal_weights",
    "plan_strategies",
    "recalibrate",
    "save_elastic",
]
