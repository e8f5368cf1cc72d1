"""Every error this package raises on purpose; each says what was given and what to do.

Also what makes text of strangers safe to show.
"""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Text with control characters replaced, which could steer a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class AnycostError(Exception):
    """Base of every error this package raises on purpose."""


class AlphaError(AnycostError, ValueError):
    """A shrinking factor outside (0, 1]."""


class TraceError(AnycostError):
    """The model could not be run on its example input."""


class NotShrinkableError(AnycostError):
    """A narrower sub-model was asked of a model that has no free channel."""


class ShapeMismatchError(AnycostError, ValueError):
    """A state whose keys or shapes are not those of the model."""


class CalibrationError(AnycostError, ValueError):
    """Statistics were to be measured on no data."""


class BetaError(AnycostError, ValueError):
    """A compression rate outside (0, 1], or too low for even an empty payload."""


class UpdateError(AnycostError, ValueError):
    """An update that cannot be sent: not floating point, or not finite."""


class PayloadError(AnycostError, ValueError):
    """Bytes that are not a payload of the expected plan; `cause` says in one word why."""

    cause = "malformed"


class DamagedPayloadError(PayloadError):
    """A payload that is not as long as it says, or not what its checksum is of."""

    cause = "damaged"


class ForeignPayloadError(PayloadError):
    """A payload of another run, round, device or plan: a mix-up, or a replay."""

    cause = "foreign"


class UnknownNameError(AnycostError, LookupError):
    """A model, preset, method or profile that does not exist."""


class ConfigError(AnycostError, ValueError):
    """Values that are not allowed; every problem of one source at once."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        where = f"{source}: " if source else ""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  - ".join([f"{where}{count}", *self.problems]))


class MissingExtraError(AnycostError, ImportError):
    """A feature whose optional dependencies are not installed."""


class InfeasibleBudgetError(AnycostError):
    """A device that cannot afford even the smallest strategy; says the least that would do."""


class TaskError(AnycostError, ValueError):
    """Samples, a model, a loss and a metric that do not fit each other."""
