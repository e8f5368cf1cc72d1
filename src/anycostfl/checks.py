"""Rules in the annotations of dataclasses, checked where a record is built or read from a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt

from anycostfl.errors import ConfigError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers a field allows; NaN and infinity are in none."""

    low: float
    high: float = math.inf
    open_low: bool = False
    whole: bool = False

    def contains(self, value: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each value lies inside."""
        x = np.asarray(value, dtype=np.float64)
        above = x > self.low if self.open_low else x >= self.low
        inside: npt.NDArray[np.bool_] = np.isfinite(x) & above & (x <= self.high)
        return inside & (x == np.floor(x)) if self.whole else inside

    def __str__(self) -> str:
        if self.whole and math.isinf(self.high):
            return f"a whole number >= {self.low:g}"
        if math.isinf(self.low):
            return "a finite number"
        if math.isinf(self.high):
            return f"a finite number {'>' if self.open_low else '>='} {self.low:g}"
        return f"a number in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """A field that may not exceed another field of the same record."""

    other: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """A field that takes one of these words."""

    choices: tuple[str, ...]


POSITIVE = Interval(0.0, open_low=True)
Positive = Annotated[float, POSITIVE]
Count = Annotated[int, Interval(1.0, whole=True)]
PositiveArray = Annotated[FloatArray, POSITIVE]
AtLeastZero = Interval(0.0)
FINITE = Interval(-math.inf)


def check_fields(record: object) -> None:
    """Raise one ConfigError with every field of a dataclass that breaks its annotated rule."""
    kind: Any = type(record)
    values = {name: getattr(record, name) for name in rules_of(kind)}
    if problems := rule_problems(kind, values):
        raise ConfigError(problems, source=kind.__name__)


@functools.cache
def rules_of(kind: type) -> Mapping[str, tuple[object, ...]]:
    """The rules in the annotations of a dataclass, by field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def rule_problems(kind: type, values: Mapping[str, Any]) -> list[str]:
    """Every given value that breaks the rule of its field in this dataclass.

    A dataclass may add a static method `cross_check(values)` for rules over several fields; it has
    to bear with values that are missing.
    """
    found = [
        _problem(name, rule, values)
        for name, rules in rules_of(kind).items()
        for rule in rules
        if values.get(name) is not None
    ]
    if cross_check := getattr(kind, "cross_check", None):
        found += cross_check(values)
    return [problem for problem in found if problem]


def _problem(name: str, rule: object, values: Mapping[str, Any]) -> str:
    value = values[name]
    if isinstance(rule, OneOf) and value not in rule.choices:
        return f"{name}: given {value!r}, allowed {', '.join(rule.choices)}"
    if isinstance(rule, Interval) and np.asarray(value).dtype.kind not in "iufb":
        return f"{name}: given {value!r}, allowed {rule}"
    if isinstance(rule, Interval) and np.any(bad := ~rule.contains(value)):
        return f"{name}: given {_first(value, bad)}, allowed {rule}"
    if isinstance(rule, AtMost) and values.get(rule.other) is not None:
        other = values[rule.other]
        if np.any(bad := np.asarray(value) > np.asarray(other)):
            limit = f"at most {rule.other} ({_first(other, bad)})"
            return f"{name}: given {_first(value, bad)}, allowed {limit}"
    return ""


def _first(value: npt.ArrayLike, bad: npt.NDArray[np.bool_]) -> str:
    if np.ndim(value) == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    index = int(np.argmax(bad))
    return f"{np.asarray(value)[index]:g} for device {index}"
