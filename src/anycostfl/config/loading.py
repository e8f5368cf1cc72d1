"""TOML tables → checked dataclasses.

A table is read against the annotations and rules of its dataclass. Unknown keys, missing keys,
wrong types and values out of range are collected over the whole file and reported at once, each
with its key, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
import types
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from importlib import resources
from importlib.metadata import entry_points
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from anycostfl.checks import rule_problems
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.registry import meant

Record = TypeVar("Record")
BEYOND = 1 << 62  # whole numbers stay below
FILE_ONLY = "base"  # a key that the file of a preset may have, and nothing else


def read_toml(file: Traversable, name: str) -> dict[str, Any]:
    """The table of one TOML file; a syntax error is a ConfigError too."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], name) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"not a TOML file: {error}"], name) from error


def _packaged(folder: str) -> dict[str, Traversable]:
    """Every TOML file of one of the package's folders and of plugins, by name.

    An entry point `board = "their_package.boards"` is the file board.toml in that package.
    """
    files = resources.files("anycostfl").joinpath(folder).iterdir()
    found = {f.name.removesuffix(".toml"): f for f in files if f.name.endswith(".toml")}
    for point in entry_points(group=f"anycostfl.{folder}"):
        if point.name in found:
            raise UnknownNameError(
                f"the entry point {point.group}: {point.name} = {point.value} has the name of "
                f"another of the {folder}; rename it"
            )
        found[point.name] = resources.files(point.module).joinpath(f"{point.name}.toml")
    return found


def names_in(folder: str) -> list[str]:
    """The names of the presets or profiles that are installed."""
    return sorted(_packaged(folder))


def find_file(folder: str, name: str, what: str) -> Traversable:
    """An installed file by its name, or any file that ends in .toml."""
    if name in (packaged := _packaged(folder)):
        return packaged[name]
    if name.endswith(".toml"):
        if not Path(name).is_file():
            where = "" if Path(name).is_absolute() else f" in {Path.cwd()}"
            raise UnknownNameError(f"there is no file {name}{where}")
        return Path(name)
    known = ", ".join(names_in(folder))
    raise UnknownNameError(
        f"no {what} {name!r}; {meant(name, names_in(folder))}there are {known}, or give a .toml "
        "file"
    )


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One table updated by another, section by section."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(old or {}, value) if both else value
    return merged


class _Bare(str):
    """A value of `--set` that is not TOML: a string without quotes, .5, True."""

    __slots__ = ()


def set_key(table: dict[str, Any], item: str) -> str:
    """Set `a.b=value` in a table; returns the problem, or an empty text."""
    key, equals, text = item.partition("=")
    *sections, name = (part.strip() for part in key.split("."))
    if not equals or not name or not all(sections):
        return f"--set {item}: must be section.key=value"
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            return f"--set {item}: {section} is not a section"
        table = inner
    try:
        table[name] = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        table[name] = _Bare(text.strip())
    return ""


def checked(
    kind: type[Record], table: Mapping[str, Any], source: str, problems: list[str]
) -> Record:
    """The record of a table; ConfigError with all problems, those found before included."""
    record = _build(kind, table, "", problems)
    if problems or record is None:
        raise ConfigError(problems, source)
    return record


def _build(
    kind: type[Record], table: Mapping[str, Any], prefix: str, problems: list[str]
) -> Record | None:
    """The record, or None after adding to the problems."""
    before = len(problems)
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]  # always a dataclass
    problems += [_unknown(kind, prefix, key, names) for key in table if key not in names]
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]  # as above
        required = item.default is MISSING and item.default_factory is MISSING
        if item.name in table:
            key = f"{prefix}{item.name}"
            values[item.name] = _value(table[item.name], hints[item.name], key, problems)
        elif required:
            problems.append(f"{prefix}{item.name}: missing, allowed {_words(hints[item.name])}")
    problems += [prefix + text for text in rule_problems(kind, values)]
    return kind(**values) if len(problems) == before else None


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(given: Any, hint: Any, key: str, problems: list[str]) -> Any:
    """The value as its annotation wants it; None after adding to the problems."""
    if is_dataclass(hint) and isinstance(given, dict):
        return _build(hint, given, f"{key}.", problems)  # type: ignore[arg-type]  # is a class
    if get_origin(hint) is Mapping and isinstance(given, dict):
        return {k: _value(v, float, f"{key}.{k}", problems) for k, v in given.items()}
    options = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(given, _Bare):
        given = _meant(given, options)
    for option in options if not isinstance(given, int) or abs(given) < BEYOND else ():
        if option is float and isinstance(given, int | float) and not isinstance(given, bool):
            return float(given)
        if option in (int, str, bool) and type(given) is option:
            return given
        if get_origin(option) is tuple and isinstance(given, list):
            [kind, *_] = get_args(option)
            if all(isinstance(item, dict if is_dataclass(kind) else kind) for item in given):
                return _items(given, kind, key, problems)
    shown = repr(given)[:80] if not isinstance(given, int) or abs(given) < BEYOND else "a huge"
    problems.append(f"{key}: given {shown} ({type(given).__name__}), allowed {_words(hint)}")
    return None


def _meant(text: str, options: Sequence[Any]) -> str | bool | float:
    """What a bare word says to someone who expects one of these kinds."""
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if int in options or float in options:
        for number in (int, float):
            with suppress(ValueError):
                return number(text)
    return str(text)


def _items(given: Sequence[Any], kind: Any, key: str, problems: list[str]) -> tuple[Any, ...]:
    """The items of a list: strings, or sections as the records they are."""
    if not is_dataclass(kind):
        return tuple(given)
    built = [_build(kind, x, f"{key}[{i}].", problems) for i, x in enumerate(given)]  # type: ignore[arg-type]  # is a class
    return tuple(item for item in built if item is not None)


def _words(hint: Any) -> str:
    words = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}
    if is_dataclass(hint):
        return "a section"
    if get_origin(hint) is Mapping:
        return "a section of numbers"
    if isinstance(hint, types.UnionType):
        return _words(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return "a list of strings" if get_args(hint)[0] is str else "a list of sections"
    return words[hint]


def _unknown(kind: type, prefix: str, key: str, names: Sequence[str]) -> str:
    if key == FILE_ONLY and not prefix:
        return f"{prefix}{key}: only the file of a preset may have one"
    inside = [] if prefix else _sections_with(kind, key)
    known = names if prefix else [*names, FILE_ONLY]
    close = inside or difflib.get_close_matches(key, known, n=1)
    allowed = f"did you mean {' or '.join(close)}?" if close else f"allowed {', '.join(names)}"
    return f"{prefix}{key}: unknown key, {allowed}"


def _sections_with(kind: type, key: str) -> list[str]:
    """Where a key belongs that was given without its section."""
    sections = _hints(kind).items()
    return [f"{name}.{key}" for name, inner in sections if key in getattr(inner, "__slots__", ())]
