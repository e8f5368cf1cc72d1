"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from anycostfl.shrink import ElasticModel, SubModel, WidthPlan, recalibrate
from anycostfl.types import (
    AlphaError,
    AnycostError,
    NotShrinkable,
    ShapeMismatch,
    TraceError,
    UnknownName,
    Update,
)

__all__ = [
    "AlphaError",
    "AnycostError",
    "ElasticModel",
    "NotShrinkable",
    "ShapeMismatch",
    "SubModel",
    "TraceError",
    "UnknownName",
    "Update",
    "WidthPlan",
    "recalibrate",
]
