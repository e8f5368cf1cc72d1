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
    from anycostfl.aggregate import Contribution, optimal_weights
    from anycostfl.codec import compress, decompress
    from anycostfl.config import load_preset
    from anycostfl.elastic_file import load_elastic, save_elastic
    from anycostfl.planner import plan_strategies
    from anycostfl.shrink import ElasticModel, SubModel, WidthPlan, recalibrate
    from anycostfl.simulate import run
    from anycostfl.state import Update
    from anycostfl.types import Limits, RoundRecord, Workload, make_devices
else:
    # The same, imported when they are asked for: torch takes seconds that `--help` need not wait.
    _HOMES = {
        "aggregate": ("Contribution", "optimal_weights"),
        "codec": ("compress", "decompress"),
        "config": ("load_preset",),
        "elastic_file": ("load_elastic", "save_elastic"),
        "planner": ("plan_strategies",),
        "shrink": ("ElasticModel", "SubModel", "WidthPlan", "recalibrate"),
        "simulate": ("run",),
        "state": ("Update",),
        "types": ("Limits", "RoundRecord", "Workload", "make_devices"),
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
