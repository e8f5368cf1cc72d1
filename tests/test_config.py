"""Shipped files are valid, bad ones report every problem at once, old ones are still read."""

from __future__ import annotations

import copy
import errno
import tomllib
from dataclasses import fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from anycostfl import config, models
from anycostfl.codec.frame import OVERHEAD
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.metrics import MetricInfo
from anycostfl.planning.cost import Workload, make_devices
from anycostfl.planning.strategy import Limits
from anycostfl.records.run import RunWriter
from anycostfl.runs import resume

PAPER = {"cifar10-iid", "cifar10-noniid", "fmnist-iid", "fmnist-noniid"}
BOARDS = {
    "jetson-agx-xavier",
    "jetson-nano",
    "jetson-xavier-nx",
    "phone-midrange",
    "raspberry-pi-4",
    "raspberry-pi-5",
}


def test_the_papers_presets_and_the_boards_are_there() -> None:
    assert set(config.preset_names()) >= PAPER
    assert set(config.profile_names()) >= BOARDS


@pytest.mark.parametrize("name", config.preset_names())
def test_a_preset_has_the_size_of_its_model(name: str) -> None:
    settings = config.load_preset(name)
    network = models.load(settings.model.name).build()
    bits = 32 * sum(p.numel() for p in network.parameters())
    assert settings.workload.size_bits == bits


@pytest.mark.parametrize("name", config.profile_names())
def test_a_profile_cites_sources_and_marks_guesses(name: str) -> None:
    profile = config.load_profile(name)
    assert profile.sources
    assert profile.guess
    full_load_w = profile.energy_coefficient * profile.frequency_max_hz**3
    assert 1.0 < full_load_w < 50.0  # ε·f³ is the dynamic power


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    good = resources.files("anycostfl").joinpath("presets", "fmnist-iid.toml").read_text("utf-8")
    bad = (
        good.replace("radius_m = 550.0", "radiu_m = 550.0")
        .replace("bandwidth_hz = 1e6", "bandwidth_hz = 0")
        .replace("latency_s = 5.0", "latency_s = -1.0")
        .replace("energy_max_j = 4.5", "energy_max_j = nan")
        .replace("alpha_min = 0.25", "alpha_min = 1.5")
        .replace("cohort = 15", 'cohort = "fifteen"')
        .replace('partition = "iid"', 'partition = "halves"')
        .replace('name = "cnn"', 'name = "resnet9000"')
    )
    file = tmp_path / "mine.toml"
    file.write_text(bad + "\n[extra]\nx = 1\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load_preset(str(file))
    told = "\n".join(caught.value.problems)
    for expected in (
        "fleet.radiu_m: unknown key, did you mean radius_m?",
        "fleet.radius_m: missing, allowed a number",
        "fleet.bandwidth_hz: given 0, allowed a finite number > 0",
        "fleet.latency_s: given -1, allowed a finite number > 0",
        "fleet.energy_max_j: given nan, allowed a finite number > 0",
        "limits.alpha_min: given 1.5, allowed a number in (0, 1]",
        "fleet.cohort: given 'fifteen' (str), allowed a whole number",
        "data.partition: given 'halves', allowed iid, dirichlet, shards, skew, owner",
        "model.name: no model 'resnet9000'; did you mean 'resnet18'? there are air_cnn",
        "extra: unknown key",
    ):
        assert expected in told
    assert len(caught.value.problems) == 10
    assert str(file) in str(caught.value)


def test_overrides_are_toml_values_and_bare_words() -> None:
    changes = ["fleet.cohort=20", "run.method=fedavg", 'fleet.profiles=["jetson-nano"]']
    settings = config.load_preset("fmnist-iid", changes)
    assert settings.fleet.cohort == 20
    assert settings.run.method == "fedavg"
    assert settings.fleet.profiles == ("jetson-nano",)


def test_an_unknown_model_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load_preset("demo", ["model.name=cnnn"])
    assert [text.split(";")[0] for text in caught.value.problems] == ["model.name: no model 'cnnn'"]


def test_overrides_may_be_numbers_that_toml_does_not_know() -> None:
    changes = ["fleet.latency_s=.5", "fleet.radius_m=400.", "run.seed=007", "data.path=007"]
    settings = config.load_preset("fmnist-iid", [*changes, "fleet.bandwidth_shared=True"])
    assert (settings.fleet.latency_s, settings.fleet.radius_m) == (0.5, 400.0)
    assert (settings.run.seed, settings.data.path) == (7, "007")
    assert settings.fleet.bandwidth_shared


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("nonsense", "section.key=value"),
        ("fleet.cohrt=3", "did you mean cohort"),
        ("rounds=2", "rounds: unknown key, did you mean run.rounds?"),
        ("base=demo", "base: only the file of a preset may have one"),
        ("bsae=demo", "bsae: unknown key, did you mean base?"),
        ("fleet.cohort=61", "at most devices (60)"),
        ("fleet.bandwidth_shared=1", "true or false"),
        ("summary.x=1", "allowed a string"),
        ("fleet=3", "a section"),
        ("fleet.profiles=3", "a list of strings"),
        ("fleet.distance_mean_m=far", "given 'far' (str), allowed a number"),
        ("fleet.distance_std_m=500", "beside a mean"),
        ("run.target=nan", "run.target: given nan, allowed a finite number"),
        ("metric.factor=inf", "metric.factor: given inf, allowed a finite number"),
        ("upload_ratio.stk=0.1", "upload_ratio.stk: no method 'stk'; did you mean 'stc'?"),
    ],
)
def test_a_bad_override_is_refused_with_what_is_allowed(change: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load_preset("fmnist-iid", [change])
    assert told in str(caught.value)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fmnist-iid'"):
        config.load_preset("fmnist")
    with pytest.raises(UnknownNameError, match="jetson-nano, jetson-xavier-nx"):
        config.load_profile("toaster")


def test_a_file_that_cannot_be_read_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "locked.toml"
    file.touch()

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_text", refuse)  # root may read anything
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        config.load_profile(str(file))


def test_a_file_that_is_not_toml_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("a = = 1", "utf-8")
    with pytest.raises(ConfigError, match="not a TOML file"):
        config.load_profile(str(file))


def test_a_profile_with_unknown_keys_or_guesses_of_nothing_is_refused(tmp_path: Path) -> None:
    text = resources.files("anycostfl").joinpath("profiles", "jetson-nano.toml").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("guess")]
    file = tmp_path / "odd.toml"
    file.write_text("\n".join(['colour = "green"', 'guess = ["weight"]', *lines]), "utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load_profile(str(file))
    assert len(caught.value.problems) == 2


def test_values_built_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="at most beta_max"):
        Limits(beta_min=0.5, beta_max=0.1)
    with pytest.raises(ConfigError) as caught:
        Workload(flops_per_sample=-1.0, size_bits=float("inf"), epochs=0)
    assert len(caught.value.problems) == 3


def test_every_bad_quantity_of_many_devices_is_named_with_its_device() -> None:
    with pytest.raises(ConfigError) as caught:
        make_devices(
            samples=[10, 10, 10],
            flops_per_cycle=4,
            energy_coefficient=1e-26,
            frequency_min_hz=[1e8, 3e9, 1e8],
            frequency_max_hz=2e9,
            rate_bps=[1e6, 1e6, 0.0],
            power_w=0.1,
            latency_s=[5.0, -1.0, 5.0],
            energy_j=[np.nan, 1.0, 1.0],
        )
    told = caught.value.problems
    assert len(told) == 4
    assert "frequency_min_hz: given 3e+09 for device 1, allowed at most frequency_max_hz" in told[0]
    assert "rate_bps: given 0 for device 2" in told[1]
    assert "latency_s: given -1 for device 1" in told[2]
    assert "energy_j: given nan for device 0" in told[3]


def test_a_preset_with_a_base_says_only_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "fmnist-iid"\n[run]\nrounds = 7\n[upload_ratio]\nstc = 0.5\n')
    mine, base = config.load_preset(str(file), ["run.seed=3"]), config.load_preset("fmnist-iid")
    assert (mine.run.rounds, mine.run.seed, mine.upload_ratio["stc"]) == (7, 3, 0.5)
    assert mine.upload_ratio["qsgd"] == base.upload_ratio["qsgd"]
    assert replace(mine, run=base.run, upload_ratio=base.upload_ratio) == base


def test_an_unknown_base_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "fmnist-id"\n')
    with pytest.raises(UnknownNameError, match="no preset 'fmnist-id'; did you mean 'fmnist-iid'"):
        config.load_preset(str(file))


@pytest.mark.parametrize("name", ["cnn", "vgg9"])
def test_another_model_brings_its_own_workload(name: str) -> None:
    theirs = {"cnn": "fmnist-iid", "vgg9": "cifar10-iid"}
    preset = next(p for model, p in theirs.items() if model != name)
    changed = config.load_preset(preset, [f"model.name={name}"])
    assert changed.workload == config.load_preset(theirs[name]).workload
    assert changed.summary == ""
    asked = config.load_preset(preset, [f"model.name={name}", "workload.size_bits=1000"])
    assert asked.workload == replace(changed.workload, size_bits=1000.0)


def test_another_dataset_drops_the_title() -> None:
    assert config.load_preset("demo", ["data.partition=iid"]).summary
    assert not config.load_preset("demo", ["data.name=fashion-mnist"]).summary
    assert config.load_preset("demo", ["data.name=x.npz", "summary=mine"]).summary == "mine"


def test_files_that_a_preset_names_lie_beside_it_or_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "mine", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    board = resources.files("anycostfl").joinpath("profiles", "jetson-nano.toml").read_text()
    (folder / "board.toml").write_text(board)
    text = 'base = "demo"\n[data]\nname = "{}.npz"\n[fleet]\nprofiles = ["board.toml"]\n'
    (folder / "own.toml").write_text(text.format("own"))
    (folder / "own.npz").touch()
    (folder / "other.toml").write_text(text.format("other"))
    settings = config.load_preset(str(folder / "own.toml"))
    assert settings.data.name == str(folder / "own.npz")
    assert settings.fleet.profiles == (str(folder / "board.toml"),)
    assert list(config.profiles_of(settings.fleet)) == [str(folder / "board.toml")]
    assert config.load_preset(str(folder / "other.toml")).data.name == "other.npz"
    (here / "other.npz").touch()
    assert config.load_preset(str(folder / "other.toml")).data.name == str(here / "other.npz")
    assert config.load_preset("demo", ["data.name=other.npz"]).data.name == str(here / "other.npz")
    (here / "images").mkdir()
    assert config.load_preset("demo", ["data.path=images"]).data.path == str(here / "images")
    assert config.load_preset("demo", ["data.path=elsewhere"]).data.path == "elsewhere"
    with pytest.raises(UnknownNameError, match=f"there is no file board.toml in {here}"):
        config.load_profile("board.toml")


def test_a_base_may_have_a_base_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n[run]\nseed = 5\n')
    (tmp_path / "b.toml").write_text('base = "fmnist-noniid"\n[run]\nrounds = 7\n')
    mine, base = config.load_preset(str(tmp_path / "a.toml")), config.load_preset("fmnist-noniid")
    assert mine == replace(base, run=replace(base.run, seed=5, rounds=7))


VARIANT = "anycostfl/without-ems"


@pytest.mark.parametrize("name", ["anycostfl+", VARIANT, 'a "b"\\', "\x7f", "é"])
def test_names_of_any_kind_read_back(name: str) -> None:
    named = replace(config.load_preset("demo"), upload_ratio={name: 0.02}, summary=name)
    read = tomllib.loads(config.to_toml(named))
    assert (read["upload_ratio"], read["summary"]) == ({name: 0.02}, name)


@pytest.mark.parametrize("method", ["anycostfl", "anycostfl+", VARIANT, "fedavg"])
def test_an_upload_ratio_for_a_method_that_plans_its_uploads_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="plans its uploads, within"):
        config.load_preset("demo", [f"upload_ratio.{method}=0.02"])


def test_no_more_devices_can_be_asked_to_agree_than_take_part() -> None:
    assert config.load_preset("demo", ["aggregation.least=10"]).aggregation.least == 10
    with pytest.raises(ConfigError, match=r"aggregation.least: given 11.*fleet.cohort \(10\)"):
        config.load_preset("demo", ["aggregation.least=11"])


def test_the_metric_is_the_tasks_but_for_what_is_given() -> None:
    info = config.load_preset("air").metric
    assert (info.name, info.unit, info.factor, info.higher_is_better) == ("mae", "µg/m³", 1, False)
    renamed = config.load_preset("air", ["metric.name=error"]).metric
    assert renamed == replace(info, name="error")
    assert config.load_preset("demo").metric == MetricInfo()


@pytest.mark.parametrize("ratio", ["0", "-1", "5"])
def test_an_upload_ratio_outside_its_range_is_refused(ratio: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"upload_ratio\.stc: given {ratio}, must be > 0 and <= 1"
    ):
        config.load_preset("demo", [f"upload_ratio.stc={ratio}"])


def test_no_upload_is_planned_without_room_for_its_frame() -> None:
    asked = config.load_preset("demo", ["limits.beta_min=0"])
    least = asked.limits_of("anycostfl").beta_min
    budget = least * asked.limits.alpha_min * asked.workload.size_bits / 8
    assert OVERHEAD < budget <= OVERHEAD + 1.01


def test_circular_bases_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"circular `base`: .*a\.toml → .*b\.toml → .*a\.toml"):
        config.load_preset(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").unlink()
    with pytest.raises(UnknownNameError, match=r"there is no file .*b\.toml"):
        config.load_preset(str(tmp_path / "a.toml"))


# --- keys of older versions -----------------------------------------------------------------------

OLD_KEYS = {
    "rates.stc": 0.5,
    "limits.rate": 0.25,
    "aggregation.step": 0.75,
    "aggregation.momentum": 0.125,
    "gate.bench_rounds": 7,
    "run.target_accuracy": 0.75,
}
NEW_KEYS = {
    "rates.stc": "upload_ratio.stc",
    **{old: new for old, new in config.RENAMED.items() if "." in old},
}
OLD_CONFIG = Path(__file__).parent / "data" / "config-schema-1.toml"
"""Of a run directory that an older version wrote."""


def value_of(settings: Any, key: str) -> Any:
    """The value of a key with dots."""
    for name in key.split("."):
        settings = settings[name] if isinstance(settings, dict) else getattr(settings, name)
    return settings


def as_file(key: str, value: object) -> str:
    section, name = key.split(".")
    return f"[{section}]\n{name} = {value}\n"


def test_every_renamed_key_is_tested() -> None:
    assert {key if key in config.RENAMED else key.split(".")[0] for key in OLD_KEYS} == set(
        config.RENAMED
    )


@pytest.mark.parametrize(("old", "value"), OLD_KEYS.items())
def test_an_old_key_means_the_new_one(tmp_path: Path, old: str, value: float) -> None:
    new, file, base = NEW_KEYS[old], tmp_path / "mine.toml", tmp_path / "base.toml"
    meant = config.load_preset("demo", [f"{new}={value}"])
    assert value_of(meant, new) == value != value_of(config.load_preset("demo"), new)
    assert config.load_preset("demo", [f"{old}={value}"]) == meant
    file.write_text('base = "demo"\n' + as_file(old, value))
    assert config.load_preset(str(file)) == meant
    base.write_text('base = "mine.toml"\n')
    assert config.load_preset(str(base)) == meant
    saved = tomllib.loads(config.to_toml(meant))
    (section, name), (old_section, old_name) = new.split("."), old.split(".")
    del saved[section][name]
    saved.setdefault(old_section, {})[old_name] = value
    assert config.parse_config(tomli_w.dumps(saved), "an old run") == meant


@pytest.mark.parametrize(("old", "value"), OLD_KEYS.items())
def test_a_new_key_beside_the_old_one_wins(tmp_path: Path, old: str, value: float) -> None:
    new, newer = NEW_KEYS[old], 3 * value if old == "gate.bench_rounds" else value / 2
    both = [f"{old}={value}", f"{new}={newer}"]
    for changes in (both, both[::-1]):
        assert value_of(config.load_preset("demo", changes), new) == newer
    sections = {key.split(".")[0]: as_file(key, v) for key, v in ((old, value), (new, newer))}
    if len(sections) == 1:  # both keys in one section
        sections = {"both": as_file(old, value) + f"{new.split('.')[1]} = {newer}\n"}
    file = tmp_path / "mine.toml"
    file.write_text('base = "demo"\n' + "".join(sections.values()))
    assert value_of(config.load_preset(str(file)), new) == newer


def test_old_and_new_upload_ratios_are_merged() -> None:
    changed = config.load_preset("demo", ["rates.stc=0.5", "upload_ratio.qsgd=0.25"])
    assert (changed.upload_ratio["stc"], changed.upload_ratio["qsgd"]) == (0.5, 0.25)


def test_an_old_key_beside_a_bad_new_section_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="server_optimizer: given 3"):
        config.load_preset("demo", ["server_optimizer=3", "aggregation.step=0.5"])


def test_the_configuration_of_an_old_run_directory_is_read(tmp_path: Path) -> None:
    text = OLD_CONFIG.read_text()
    RunWriter.create(tmp_path / "run", text)
    settings, old = resume(tmp_path / "run").config, tomllib.loads(text)
    assert settings.upload_ratio == old["rates"]
    assert settings.limits.upload_ratio == old["limits"]["rate"] == 0.5
    assert settings.server_optimizer.step == old["aggregation"]["step"] == 0.9
    assert settings.server_optimizer.momentum == old["aggregation"]["momentum"] == 0.3
    assert settings.gate.suspend_rounds == old["gate"]["bench_rounds"] == 1
    assert settings.aggregation.agree == old["aggregation"]["agree"] == 0.9
    assert settings.run.target == old["run"]["target_accuracy"] == 0.8
    assert settings.metric == MetricInfo()  # as every run of then was measured
    assert config.parse_config(config.to_toml(settings), "again") == settings


# --- fingerprint ----------------------------------------------------------------------------------

UNDECIDED = {
    "summary",
    "run.rounds",
    "run.target",
    "run.checkpoint_every",
    "data.path",
    "metric.name",
    "metric.unit",
    "metric.factor",
    "metric.higher_is_better",
}
"""What does not decide the rounds of a run."""


def keys_of(settings: Any, prefix: str = "") -> list[str]:
    """Every key of a configuration, with dots."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return [
        key
        for name, value in values.items()
        for key in (keys_of(value, f"{prefix}{name}.") if is_dataclass(value) else [prefix + name])
    ]


def changed(settings: config.Config, key: str) -> config.Config:
    """The same with one other value, allowed or not."""
    *section, name = key.split(".")
    inner: Any = copy.copy(getattr(settings, section[0]) if section else settings)
    value = getattr(inner, name)
    # checked again in the fingerprint
    choices = {"evaluate": "devices", "partition": "iid", "budgets": "strict"}
    if isinstance(value, bool) or value is None:
        value = not value
    elif isinstance(value, int | float):
        value = value + 1 if isinstance(value, int) else (value / 2 or 0.5)
    elif isinstance(value, str):
        value = choices.get(name, f"another {value}")
    else:
        value = {"another": 0.5} if name == "upload_ratio" else ("another",)
    object.__setattr__(inner, name, value)
    return replace(settings, **{section[0]: inner}) if section else inner


@pytest.mark.parametrize("key", keys_of(config.load_preset("demo")))
def test_the_fingerprint_changes_with_what_decides_rounds_and_nothing_else(key: str) -> None:
    settings = config.load_preset("demo")
    other = changed(settings, key)
    assert value_of(other, key) != value_of(settings, key)
    same = config.fingerprint(other) == config.fingerprint(settings)
    assert same == (key in UNDECIDED)


def test_with_a_schedule_the_end_of_a_run_decides_its_rounds() -> None:
    plain = [config.load_preset("demo", [f"run.rounds={n}"]) for n in (5, 6)]
    schedule = "training.schedule=cosine"
    cosine = [config.load_preset("demo", [f"run.rounds={n}", schedule]) for n in (5, 6)]
    assert len(set(map(config.fingerprint, plain))) == 1
    assert len(set(map(config.fingerprint, [*plain, *cosine]))) == 3


def test_the_fingerprint_survives_saving_and_old_keys() -> None:
    settings = config.load_preset("demo", ["gate.suspend_rounds=7", "limits.upload_ratio=0.5"])
    read = config.parse_config(config.to_toml(settings), "saved")
    changes = ["gate.bench_rounds=7", "limits.rate=0.5", "run.target_accuracy=0.7"]
    old = config.load_preset("demo", changes)
    digests = {config.fingerprint(each) for each in (settings, read, old)}
    assert len(digests) == 1
    assert int(digests.pop(), 16) > 0
