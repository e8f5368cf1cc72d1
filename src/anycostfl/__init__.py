"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from importlib.metadata import version

from anycostfl.aggregate import Contribution, optimal_weights
from anycostfl.codec import compress, decompress
from anycostfl.config import load_preset
from anycostfl.elastic_file import load_elastic, save_elastic
from anycostfl.errors import (
    AlphaError,
    AnycostError,
    BetaError,
    ConfigError,
    DamagedPayload,
    ForeignPayload,
    InfeasibleBudget,
    MissingExtra,
    NotShrinkable,
    PayloadError,
    ShapeMismatch,
    TraceError,
    UnknownName,
    UpdateError,
)
from anycostfl.planner import plan_strategies
from anycostfl.shrink import ElasticModel, SubModel, WidthPlan, recalibrate
from anycostfl.simulate import run
from anycostfl.types import Limits, RoundRecord, Update, Workload, make_devices

__version__ = version("anycostfl")

__all__ = [
    "AlphaError",
    "AnycostError",
    "BetaError",
    "ConfigError",
    "Contribution",
    "DamagedPayload",
    "ElasticModel",
    "ForeignPayload",
    "InfeasibleBudget",
    "Limits",
    "MissingExtra",
    "NotShrinkable",
    "PayloadError",
    "RoundRecord",
    "ShapeMismatch",
    "SubModel",
    "TraceError",
    "UnknownName",
    "Update",
    "UpdateError",
    "WidthPlan",
    "Workload",
    "__version__",
    "compress",
    "decompress",
    "load_elastic",
    "load_preset",
    "make_devices",
    "optimal_weights",
    "plan_strategies",
    "recalibrate",
    "run",
    "save_elastic",
]
