"""TOML files → checked dataclasses: presets (a whole experiment) and device profiles.

A file is read against the annotations and rules of its dataclass. Unknown keys, missing keys, wrong
types and values out of range are collected over the whole file and reported at once, each with its
key, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import tomllib
import types
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from anycostfl import methods, models
from anycostfl.aggregate import Rules
from anycostfl.attacks import Attack
from anycostfl.bench import Gate
from anycostfl.checks import Count, Interval, OneOf, Positive, check_fields, rule_problems
from anycostfl.codec import CODECS
from anycostfl.codec.frame import OVERHEAD
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.registry import meant
from anycostfl.shrink import ElasticModel
from anycostfl.types import Caps, Devices, FleetSpec, Limits, Profile, Strategies, Workload

Record = TypeVar("Record")
BEYOND = 1 << 62  # no whole number is so large


@dataclass(frozen=True, slots=True)
class Training:
    """Local training; the number of local epochs τ is part of the workload."""

    learning_rate: Positive
    batch: Count
    momentum: Annotated[float, Interval(0.0, 0.999)] = 0.0
    weight_decay: Annotated[float, Interval(0.0)] = 0.0
    clip_norm: Annotated[float, Interval(0.0)] = 0.0  # 0 is off
    precision: Annotated[str, OneOf(("auto", "fp32", "bf16"))] = "auto"
    device: Annotated[str, OneOf(("auto", "cpu", "cuda"))] = "auto"
    channels_last: bool = True
    winograd: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Data:
    """The dataset and how it is split over the fleet."""

    name: str
    path: str = ""
    partition: Annotated[str, OneOf(("iid", "dirichlet"))] = "iid"
    concentration: Positive = 0.5

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Model:
    """The architecture, a file of `anycostfl.models`."""

    name: str
    widths: Annotated[str, OneOf(("sqrt", "fast", "even"))] = "sqrt"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Compression:
    """How updates become bytes, where the method leaves it open.

    codec: the paper's `kernel`, `kernel+` or `lowrank`; STC, QSGD, UVeQFed, FedHQ and FedAvg have a
        coding of their own.
    feedback: keep what a payload could not carry for later rounds.

    downlink: what the step that keeps devices up to date may take, as a share of the model; at 0
        they get their sub-models uncompressed.

    Codec and feedback unset: as the method does.
    """

    codec: Annotated[str | None, OneOf(CODECS)] = None
    feedback: bool | None = None
    downlink: Annotated[float, Interval(0.0, 1.0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Run:
    """How long to train, with which method, from which seed."""

    rounds: Count
    target_accuracy: Annotated[float, Interval(0.0, 1.0)]
    method: str = "anycostfl"
    seed: Annotated[int, Interval(0.0)] = 0
    evaluate_every: Count = 1
    checkpoint_every: Count = 5
    weigh_samples: bool | None = None  # multiply weights by |D_i|; unset: as the method does

    def __post_init__(self) -> None:
        check_fields(self)

    def evaluates(self, number: int) -> bool:
        """Whether a round ends with an evaluation; the last one always does."""
        return (number + 1) % self.evaluate_every == 0 or number + 1 == self.rounds


@dataclass(frozen=True, slots=True)
class Config:
    """One experiment, as a preset describes it."""

    fleet: FleetSpec
    workload: Workload
    training: Training
    data: Data
    model: Model
    run: Run
    limits: Caps = field(default_factory=Caps)
    compression: Compression = field(default_factory=Compression)
    aggregation: Rules = field(default_factory=Rules)
    gate: Gate = field(default_factory=Gate)
    attack: Attack = field(default_factory=Attack)
    rates: Mapping[str, float] = field(default_factory=dict)
    summary: str = ""

    @staticmethod
    def cross_check(values: Mapping[str, Any]) -> list[str]:
        """Rates are shares of methods that take one; no more must agree than take part."""
        problems = []
        fleet, rules = values.get("fleet"), values.get("aggregation")
        if fleet and rules and rules.least > fleet.cohort:
            allowed = f"at most fleet.cohort ({fleet.cohort})"
            problems.append(f"aggregation.least: given {rules.least}, allowed {allowed}")
        for name, rate in (values.get("rates") or {}).items():
            try:
                if not methods.load(name).takes_rate:
                    problems.append(f"rates.{name}: it plans its uploads itself, within [limits]")
            except UnknownNameError as error:
                problems.append(f"rates.{name}: {error}")
            if isinstance(rate, int | float) and not 0 < rate <= 1:
                problems.append(f"rates.{name}: given {rate:g}, allowed above 0 and at most 1")
        return problems

    def method_of(self, name: str) -> methods.Method:
        """A method with what this configuration says otherwise of it."""
        asked: dict[str, Any] = {
            "codec": self.compression.codec,
            "feedback": self.compression.feedback,
            "momentum": self.aggregation.momentum,
            "by_samples": self.run.weigh_samples,
        }
        said = {key: value for key, value in asked.items() if value is not None}
        return replace(methods.load(name), **said)

    def limits_of(self, method: str) -> Limits:
        """The limits for a method: its rate, if the preset gives it one, and the codec.

        No upload is planned that has no room for the frame of a payload, if β^max has.
        """
        caps = self.limits
        frame = 8 * (OVERHEAD + 1) / (caps.alpha_min * self.workload.size_bits)
        caps = replace(
            caps,
            rate=self.rates.get(method, caps.rate),
            beta_min=min(max(caps.beta_min, frame), caps.beta_max),
        )
        return Limits(**asdict(caps), codec=self.method_of(method).codec)

    def plan(self, devices: Devices) -> Strategies:
        """The strategy of every device, as the method of the run plans it (Sec. IV)."""
        name = self.run.method
        return methods.load(name).plan(devices, self.workload, self.limits_of(name))


def preset_names() -> list[str]:
    """Every preset that comes with the package."""
    return _names("presets")


def profile_names() -> list[str]:
    """Every device profile that comes with the package."""
    return _names("profiles")


def load_preset(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a preset by its name, or any file that ends in .toml; overrides are `a.b=value`.

    A preset with a `base` says only what differs from that preset. A workload that is left out is
    the model's own.
    """
    changes: dict[str, Any] = {}
    problems = [text for item in overrides if (text := _override(changes, item))]
    table = _instead(_read_preset(name), changes)
    _find_in(Path.cwd(), table)
    _fill_workload(table)
    return _checked(Config, table, name, [*problems, *_unknown_names(table)])


def load_profile(name: str) -> Profile:
    """Read a device profile by its name, or any file that ends in .toml."""
    return _checked(
        Profile, tomllib_load(_find("profiles", name, "device profile"), name), name, []
    )


def profiles_of(fleet: FleetSpec) -> dict[str, Profile]:
    """The device profiles that a fleet is made of, by name."""
    return {name: load_profile(name) for name in fleet.profiles}


def parse_config(text: str, source: str, *, foreign: bool = False) -> Config:
    """A configuration from TOML text, such as `to_toml` writes.

    Model and method of a `foreign` one need not be at hand: enough to read about somebody's run.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"not TOML: {error}"], source) from error
    return _checked(Config, table, source, [] if foreign else _unknown_names(table))


def _unknown_names(table: Mapping[str, Any]) -> list[str]:
    """The problems, if there is no architecture or method of that name."""
    problems = []
    for section, key, load in (("model", "name", models.load), ("run", "method", methods.load)):
        name = _given(table, section, key)
        try:
            if isinstance(name, str):
                load(name)
        except UnknownNameError as error:
            problems.append(f"{section}.{key}: {error}")
    return problems


def to_toml(config: Config) -> str:
    """The configuration as TOML text that reads back as the same configuration."""
    lines = toml_lines({"summary": config.summary})
    for section in (item.name for item in fields(config) if item.name != "summary"):
        lines += ["", f"[{section}]"]
        record = getattr(config, section)
        lines += toml_lines(record if isinstance(record, Mapping) else asdict(record))
    return "\n".join(lines) + "\n"


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """One line for each value that is set."""
    return [f"{_key(name)} = {_toml(value)}" for name, value in values.items() if value is not None]


def _key(name: str) -> str:
    """A key as TOML writes it: methods may be called anycostfl+."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def essence(config: Config) -> str:
    """What decides the rounds of a run: all but its title, its end, and how often it is saved."""
    run = replace(config.run, rounds=1, target_accuracy=1.0, checkpoint_every=1)
    return to_toml(replace(config, summary="", run=run))


def identity(config: Config) -> str:
    """What decides the rounds, wherever the data lies."""
    return essence(replace(config, data=replace(config.data, path="")))


def _toml(value: str | bool | float | tuple[str, ...]) -> str:
    """One value as TOML writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """As JSON, but for the one character that TOML wants escaped besides."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def tomllib_load(file: Traversable, name: str) -> dict[str, Any]:
    """Parse one TOML file; a syntax error is a ConfigError too."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], name) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"not a TOML file: {error}"], name) from error


def _names(folder: str) -> list[str]:
    files = resources.files("anycostfl").joinpath(folder).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def _find(folder: str, name: str, what: str) -> Traversable:
    if name in _names(folder):
        return resources.files("anycostfl").joinpath(folder, f"{name}.toml")
    if name.endswith(".toml"):
        if not Path(name).is_file():
            where = "" if Path(name).is_absolute() else f" in {Path.cwd()}"
            raise UnknownNameError(f"there is no file {name}{where}")
        return Path(name)
    known = ", ".join(_names(folder))
    raise UnknownNameError(
        f"no {what} {name!r}; {meant(name, _names(folder))}there are {known}, or give a .toml file"
    )


def _read_preset(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The table of a preset, laid over that of its base; a .toml base lies beside the file."""
    if name in above:
        raise ConfigError([f"base: {' → '.join((*above, name))} goes round in a circle"], above[0])
    table = tomllib_load(_find("presets", name, "preset"), name)
    if name.endswith(".toml"):
        _find_in(Path(name).parent, table)
    if "base" not in table:
        return table
    base = str(table.pop("base"))
    if base.endswith(".toml"):
        base = str((Path(name).parent / base).resolve())
    return _instead(_read_preset(base, (*above, name)), table)


def _find_in(folder: Path, table: dict[str, Any]) -> None:
    """Data and profiles that lie beside a preset, or where the command runs, by their whole path.

    So whoever goes on with the run finds them from anywhere.
    """

    def there(given: Any) -> Any:
        is_file = isinstance(given, str) and given.endswith((".npz", ".toml"))
        found = is_file and (folder / given).is_file()
        return str((folder / given).resolve()) if found else given

    data, fleet = table.get("data"), table.get("fleet")
    if isinstance(data, dict) and "name" in data:
        data["name"] = there(data["name"])
    if isinstance(data, dict) and isinstance(path := data.get("path"), str) and path:
        data["path"] = str((folder / path).resolve()) if (folder / path).is_dir() else path
    if isinstance(fleet, dict) and isinstance(fleet.get("profiles"), list):
        fleet["profiles"] = [there(name) for name in fleet["profiles"]]


def _instead(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One table laid over another, without what holds only for the model or data below."""
    merged = _laid_over(below, above)
    other_model = _given(merged, "model", "name") != _given(below, "model", "name")
    if other_model or _given(merged, "data", "name") != _given(below, "data", "name"):
        merged["summary"] = above.get("summary", "")
    if other_model and isinstance(workload := merged.get("workload"), dict):
        given = above.get("workload", {})
        for key in ("flops_per_sample", "size_bits"):
            if key not in given:
                workload.pop(key, None)
    return merged


def _given(table: Mapping[str, Any], section: str, key: str) -> object:
    inner = table.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


def _fill_workload(table: dict[str, Any]) -> None:
    """What a preset leaves out of W and S, measured on the model."""
    workload, name = table.setdefault("workload", {}), _given(table, "model", "name")
    if not isinstance(workload, dict) or {"flops_per_sample", "size_bits"} <= workload.keys():
        return
    flops, bits = 1.0, 1.0  # of an unknown model, which is refused for its name alone
    if name in models.names():
        spec = models.load(str(name))
        net = ElasticModel(spec.build(), spec.example(2))
        flops, bits = net.training_flops, net.size_bits
    workload.setdefault("flops_per_sample", flops)
    workload.setdefault("size_bits", bits)


def _laid_over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One table with what another says instead, section by section."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _laid_over(old or {}, value) if both else value
    return merged


class _Bare(str):
    """What `--set` was given where TOML knows no such value: a string without quotes, .5, True."""

    __slots__ = ()


def _override(table: dict[str, Any], item: str) -> str:
    """Set `a.b=value` in the table; the problem, if it cannot be."""
    key, equals, text = item.partition("=")
    *sections, name = (part.strip() for part in key.split("."))
    if not equals or not name or not all(sections):
        return f"--set {item}: allowed section.key=value"
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


def _checked(
    kind: type[Record], table: Mapping[str, Any], source: str, problems: list[str]
) -> Record:
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
    known = [*names, "base"] if kind is Config else names
    problems += [_unknown(prefix, key, known) for key in table if key not in names]
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
        if get_origin(option) is tuple and _is_strings(given):
            return tuple(given)
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


def _is_strings(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(item, str) for item in given)


def _words(hint: Any) -> str:
    words = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}
    if is_dataclass(hint):
        return "a section"
    if get_origin(hint) is Mapping:
        return "a section of numbers"
    if isinstance(hint, types.UnionType):
        return _words(get_args(hint)[0])
    return "a list of strings" if get_origin(hint) is tuple else words[hint]


def _unknown(prefix: str, key: str, names: Sequence[str]) -> str:
    if key in names:
        return f"{prefix}{key}: only the file of a preset has one"
    inside = [] if prefix else _sections_with(key)
    close = inside or difflib.get_close_matches(key, names, n=1)
    allowed = f"did you mean {' or '.join(close)}?" if close else f"allowed {', '.join(names)}"
    return f"{prefix}{key}: unknown key, {allowed}"


def _sections_with(key: str) -> list[str]:
    """Where a key belongs that was given without its section."""
    sections = _hints(Config).items()
    return [f"{name}.{key}" for name, kind in sections if key in getattr(kind, "__slots__", ())]
