"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from importlib import import_module
from typing import TYPE_CHECKING

from anycostfl.errors import (
    AlphaError,
    AnycostError,
    BetaError,
    CalibrationError,
    ConfigError,
    DamagedPayloadError,
    ForeignPayloadError,
    InfeasibleBudgetError,
    MissingExtraError,
    NotShrinkableError,
    PayloadError,
    ShapeMismatchError,
    TaskError,
    TraceError,
    UnknownNameError,
    UpdateError,
)

if TYPE_CHECKING:
    from anycostfl.api import Comparison, Run, compare, run
    from anycostfl.codec import compress, decompress
    from anycostfl.config import load_preset
    from anycostfl.export.elastic_file import load_elastic, save_elastic
    from anycostfl.metrics import Metric, MetricInfo
    from anycostfl.planning.cost import Workload, make_devices
    from anycostfl.planning.planner import plan_strategies
    from anycostfl.planning.strategy import Limits
    from anycostfl.records.round import RoundRecord
    from anycostfl.server.aggregate import Contribution, aggregate, optimal_weights
    from anycostfl.shrink import ElasticModel, SubModel, WidthPlan, recalibrate
    from anycostfl.state import Update
    from anycostfl.tasks import Task
else:
    # The same, imported when they are asked for: torch takes seconds that `--help` need not wait.
    _HOMES = {
        "api": ("Comparison", "Run", "compare", "run"),
        "codec": ("compress", "decompress"),
        "config": ("load_preset",),
        "export.elastic_file": ("load_elastic", "save_elastic"),
        "metrics": ("Metric", "MetricInfo"),
        "planning.cost": ("Workload", "make_devices"),
        "planning.planner": ("plan_strategies",),
        "planning.strategy": ("Limits",),
        "records.round": ("RoundRecord",),
        "server.aggregate": ("Contribution", "aggregate", "optimal_weights"),
        "shrink": ("ElasticModel", "SubModel", "WidthPlan", "recalibrate"),
        "state": ("Update",),
        "tasks": ("Task",),
    }

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.2.0"

__all__ = [
    "AlphaError",
    "AnycostError",
    "BetaError",
    "CalibrationError",
    "Comparison",
    "ConfigError",
    "Contribution",
    "DamagedPayloadError",
    "ElasticModel",
    "ForeignPayloadError",
    "InfeasibleBudgetError",
    "Limits",
    "Metric",
    "MetricInfo",
    "MissingExtraError",
    "NotShrinkableError",
    "PayloadError",
    "RoundRecord",
    "Run",
    "ShapeMismatchError",
    "SubModel",
    "Task",
    "TaskError",
    "TraceError",
    "UnknownNameError",
    "Update",
    "UpdateError",
    "WidthPlan",
    "Workload",
    "__version__",
    "aggregate",
    "compare",
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
