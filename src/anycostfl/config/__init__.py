"""Experiments and device profiles from TOML files: presets, custom files, run directories."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w

from anycostfl import methods, models, tasks
from anycostfl.checks import FINITE, Count, Interval, OneOf, check_fields
from anycostfl.codec import CODECS
from anycostfl.codec.frame import OVERHEAD
from anycostfl.config.loading import checked, find_file, merge, names_in, read_toml, set_key
from anycostfl.data.split import Data
from anycostfl.device import Training
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.metrics import MetricInfo
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.draw import FleetSpec, Profile
from anycostfl.planning.strategy import Caps, Limits, Strategies
from anycostfl.server.aggregate import ServerOptimizer
from anycostfl.server.privacy import Privacy
from anycostfl.server.robust import Robustness
from anycostfl.server.suspensions import Gate
from anycostfl.shrink import ElasticModel

RENAMED = {
    "rates": "upload_ratio",
    "run.target_accuracy": "run.target",
    "limits.rate": "limits.upload_ratio",
    "aggregation.step": "server_optimizer.step",
    "aggregation.momentum": "server_optimizer.momentum",
    "gate.bench_rounds": "gate.suspend_rounds",
}
"""Keys as older files have them, and as they are called now."""


NAMED: tuple[tuple[str, str, Callable[[str], object]], ...] = (
    ("model", "name", models.load),
    ("run", "method", methods.load),
    ("data", "name", tasks.find),
)
"""Which keys name a file, and what reads it."""


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

    codec: the paper's `kernel`, or `lowrank`; STC, QSGD, UVeQFed, FedHQ and FedAvg have their own
        coding.
    feedback: keep what a payload could not carry for later rounds.
    downlink: the size of the step that keeps devices up to date, as a share of the model; at 0 they
        get their sub-models uncompressed.

    Codec and feedback unset: as the method has them.
    """

    codec: Annotated[str | None, OneOf(CODECS)] = None
    feedback: bool | None = None
    downlink: Annotated[float, Interval(0.0, 1.0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Run:
    """How long to train, with which method, from which seed.

    `target` is a value of the task's metric, in its own direction. With strict budgets, every
    method keeps those of every device; `own` is as its paper has it.
    """

    rounds: Count
    target: Annotated[float | None, FINITE] = None
    method: str = "anycostfl"
    seed: Annotated[int, Interval(0.0)] = 0
    evaluate_every: Count = 1
    checkpoint_every: Count = 5
    budgets: Annotated[str, OneOf(("own", "strict"))] = "own"
    weigh_samples: bool | None = None  # multiply weights by |D_i|; unset: as the method has it

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Attack:
    """How many simulated devices attack, and how (`fleets.attackers`)."""

    kind: Annotated[str, OneOf(("none", "sign-flip", "scale", "random", "poison", "inflate"))] = (
        "none"
    )
    share: Annotated[float, Interval(0.0, 1.0)] = 0.2

    def __post_init__(self) -> None:
        check_fields(self)


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
    aggregation: Robustness = field(default_factory=Robustness)
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    gate: Gate = field(default_factory=Gate)
    privacy: Privacy = field(default_factory=Privacy)
    attack: Attack = field(default_factory=Attack)
    metric: MetricInfo = field(default_factory=MetricInfo)  # of the task, if not said otherwise
    upload_ratio: Mapping[str, float] = field(default_factory=dict)
    summary: str = ""

    @staticmethod
    def cross_check(values: Mapping[str, Any]) -> list[str]:
        """Upload ratios belong to methods that take one; no more must agree than take part."""
        problems = []
        fleet, rules = values.get("fleet"), values.get("aggregation")
        if fleet and rules and rules.least > fleet.cohort:
            problems.append(
                f"aggregation.least: given {rules.least}, must be <= fleet.cohort ({fleet.cohort})"
            )
        problems += _privacy_problems(values)
        for name, ratio in (values.get("upload_ratio") or {}).items():
            key = f"upload_ratio.{name}"
            try:
                if not methods.load(name).takes_upload_ratio:
                    problems.append(f"{key}: the method plans its uploads, within [limits]")
            except UnknownNameError as error:
                problems.append(f"{key}: {error}")
            if isinstance(ratio, int | float) and not 0 < ratio <= 1:
                problems.append(f"{key}: given {ratio:g}, must be > 0 and <= 1")
        return problems

    def method_of(self, name: str) -> methods.Method:
        """A method as budgets ask for it, with what this configuration overrides."""
        asked: dict[str, Any] = {
            "codec": self.compression.codec,
            "feedback": self.compression.feedback,
            "momentum": self.server_optimizer.momentum,
            "server": self.server_optimizer.kind,
            "average": self.server_optimizer.average,
            "by_samples": self.run.weigh_samples,
        }
        given = {key: value for key, value in asked.items() if value is not None}
        return replace(self._method_as_budgeted(name), **given)

    def _method_as_budgeted(self, name: str) -> methods.Method:
        method = methods.load(name)
        return method.strict or method if self.run.budgets == "strict" else method

    def limits_of(self, method: str) -> Limits:
        """The limits for a method: its upload ratio, if the preset gives one, and its codec.

        No upload is planned that has no room for the frame of a payload, if β^max has.
        """
        caps = self.limits
        frame = 8 * (OVERHEAD + 1) / (caps.alpha_min * self.workload.size_bits)
        caps = replace(
            caps,
            upload_ratio=self.upload_ratio.get(method, caps.upload_ratio),
            beta_min=min(max(caps.beta_min, frame), caps.beta_max),
        )
        return Limits(**asdict(caps), codec=self.method_of(method).codec)

    def plan(self, devices: Devices) -> Strategies:
        """The strategy of every device, as the method of the run plans it (Sec. IV)."""
        name = self.run.method
        return self.method_of(name).plan(devices, self.workload, self.limits_of(name))


def _privacy_problems(values: Mapping[str, Any]) -> list[str]:
    """What has no bound on what one device adds to a model (`server.privacy`)."""
    privacy, run, rules = (values.get(key) for key in ("privacy", "run", "aggregation"))
    if privacy is None or run is None or privacy.mode == "none":
        return []
    problems, given = [], f"privacy.mode: given {privacy.mode}"
    feedback = values["compression"].feedback if values.get("compression") else None
    with suppress(UnknownNameError):  # told with all other problems
        if methods.load(run.method).feedback if feedback is None else feedback:
            problems.append(
                f"{given}, which error feedback breaks: residuals return what clipping cut off; "
                "set compression.feedback=false or choose a method without it"
            )
        if privacy.mode == "central" and methods.load(run.method).rescale:
            problems.append(f"{given}, without {run.method}: its factors follow from all devices")
    if privacy.mode == "central" and rules:
        wrong = {"agree": rules.agree, "least": rules.least > 1, "combine": rules.combine != "mean"}
        problems += [
            f"{given}, without aggregation.{name}: it lets one update change how others count"
            for name, bad in wrong.items()
            if bad
        ]
    if (data := values.get("data")) and data.evaluate == "devices":
        problems.append(f"{given}, without data.evaluate=devices: metrics tell about the data")
    return problems


def preset_names() -> list[str]:
    """Every preset that comes with the package."""
    return names_in("presets")


def profile_names() -> list[str]:
    """Every device profile that comes with the package."""
    return names_in("profiles")


def load_preset(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a preset by its name, or any file that ends in .toml; overrides are `a.b=value`.

    A preset with a `base` says only what differs from that preset. A workload that is left out is
    the model's own.
    """
    changes: dict[str, Any] = {}
    problems = [text for item in overrides if (text := set_key(changes, item))]
    table = _derive(_read_preset(name), _modernized(changes))
    _find_in(Path.cwd(), table)
    _fill_workload(table)
    _fill_metric(table)
    return checked(Config, table, name, [*problems, *_unknown_names(table)])


def load_profile(name: str) -> Profile:
    """Read a device profile by its name, or any file that ends in .toml."""
    return checked(
        Profile, read_toml(find_file("profiles", name, "device profile"), name), name, []
    )


def profiles_of(fleet: FleetSpec) -> dict[str, Profile]:
    """The device profiles that a fleet is made of, by name."""
    return {name: load_profile(name) for name in fleet.profile_names}


def parse_config(text: str, source: str, *, foreign: bool = False) -> Config:
    """A configuration from TOML text, such as `to_toml` writes.

    The model and method of a `foreign` one may be missing here: enough to read about the run.
    """
    try:
        table = _modernized(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"not TOML: {error}"], source) from error
    return checked(Config, table, source, [] if foreign else _unknown_names(table))


def _unknown_names(table: Mapping[str, Any]) -> list[str]:
    """The problems, if there is no architecture, method or task of that name."""
    problems = []
    for section, key, load in NAMED:
        name = _given(table, section, key)
        try:
            if isinstance(name, str):
                load(name)
        except UnknownNameError as error:
            problems.append(f"{section}.{key}: {error}")
    return problems


def to_toml(config: Config) -> str:
    """The configuration as TOML text that reads back as the same configuration."""
    return tomli_w.dumps(_without_none(asdict(config)))


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table as TOML can write it: scalars first, nothing that is unset."""
    known = {key: _plain(value) for key, value in table.items() if value is not None}
    return dict(sorted(known.items(), key=lambda item: isinstance(item[1], dict)))


def _plain(value: Any) -> Any:
    """A value as TOML can write it; tables within lists too."""
    if isinstance(value, Mapping):
        return _without_none(value)
    is_tables = isinstance(value, tuple) and value and isinstance(value[0], Mapping)
    return [_without_none(table) for table in value] if is_tables else value


def fingerprint(config: Config) -> str:
    """A digest of what decides the rounds of a run.

    Not its title, its end, how often it is saved, how it is measured, nor where the data lies.
    """
    rounds = 1 if config.training.schedule == "constant" else config.run.rounds
    run = replace(config.run, rounds=rounds, target=None, checkpoint_every=1)
    data = replace(config.data, path="")
    same = replace(config, summary="", run=run, data=data, metric=MetricInfo())
    return hashlib.blake2s(json.dumps(asdict(same), sort_keys=True).encode()).hexdigest()


def _modernized(table: dict[str, Any]) -> dict[str, Any]:
    """The table with keys of older versions under their new names."""
    for old, new in RENAMED.items():
        *section, key = old.split(".")
        home = table.get(section[0]) if section else table
        if isinstance(home, dict) and key in home:
            renamed = home.pop(key)
            for name in reversed(new.split(".")):
                renamed = {name: renamed}
            table = merge(renamed, table)  # a new key beside the old one wins
    return table


def _read_preset(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The table of a preset, laid over that of its base; a .toml base lies beside the file."""
    if name in above:
        raise ConfigError([f"circular `base`: {' → '.join((*above, name))}"], above[0])
    table = _modernized(read_toml(find_file("presets", name, "preset"), name))
    if name.endswith(".toml"):
        _find_in(Path(name).parent, table)
    if "base" not in table:
        return table
    base = str(table.pop("base"))
    if base.endswith(".toml"):
        base = str((Path(name).parent / base).resolve())
    return _derive(_read_preset(base, (*above, name)), table)


def _find_in(folder: Path, table: dict[str, Any]) -> None:
    """Data and profiles that lie beside a preset, or where the command runs, by their whole path.

    So the run can be resumed from anywhere.
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
    if isinstance(fleet, dict) and isinstance(groups := fleet.get("group"), list):
        for group in groups:
            if isinstance(group, dict) and "profile" in group:
                group["profile"] = there(group["profile"])


def _derive(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A preset over its base, without what holds only for the base's model or data."""
    merged = merge(below, above)
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


def _fill_metric(table: dict[str, Any]) -> None:
    """How the task's metric is shown, but for what is given."""
    name, given = _given(table, "data", "name"), table.get("metric", {})
    with suppress(UnknownNameError, ConfigError):  # told with all other problems
        if isinstance(name, str) and isinstance(given, dict):
            table["metric"] = {**asdict(tasks.load(name).metrics[0].info), **given}
