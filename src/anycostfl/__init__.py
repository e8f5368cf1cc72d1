"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from importlib import import_module
from importlib.metadata import version
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
    TraceError,
    UnknownNameError,
    UpdateError,
)

if TYPE_CHECKING:
    from anycostfl.codec import compress, decompress
    from anycostfl.config import load_preset
    from anycostfl.export.elastic_file import load_elastic, save_elastic
    from anycostfl.planning.cost import Workload, make_devices
    from anycostfl.planning.planner import plan_strategies
    from anycostfl.planning.strategy import Limits
    from anycostfl.records.round import RoundRecord
    from anycostfl.server.aggregate import Contribution, aggregate, optimal_weights
    from anycostfl.shrink import ElasticModel, SubModel, WidthPlan, recalibrate
    from anycostfl.simulate import run
    from anycostfl.state import Update
else:
    # The same, imported when they are asked for: torch takes seconds that `--help` need not wait.
    _HOMES = {
        "codec": ("compress", "decompress"),
        "config": ("load_preset",),
        "export.elastic_file": ("load_elastic", "save_elastic"),
        "planning.cost": ("Workload", "make_devices"),
        "planning.planner": ("plan_strategies",),
        "planning.strategy": ("Limits",),
        "records.round": ("RoundRecord",),
        "server.aggregate": ("Contribution", "aggregate", "optimal_weights"),
        "shrink": ("ElasticModel", "SubModel", "WidthPlan", "recalibrate"),
        "simulate": ("run",),
        "state": ("Update",),
    }

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = version("anycostfl")

__all__ = [
    "AlphaError",
    "AnycostError",
    "BetaError",
    "CalibrationError",
    "ConfigError",
    "Contribution",
    "DamagedPayloadError",
    "ElasticModel",
    "ForeignPayloadError",
    "InfeasibleBudgetError",
    "Limits",
    "MissingExtraError",
    "NotShrinkableError",
    "PayloadError",
    "RoundRecord",
    "ShapeMismatchError",
    "SubModel",
    "TraceError",
    "UnknownNameError",
    "Update",
    "UpdateError",
    "WidthPlan",
    "Workload",
    "__version__",
    "aggregate",
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
