"""Every file that ships is valid, and a bad one says all that is wrong with it at once."""

import errno
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from anycostfl import config, models
from anycostfl.codec.frame import OVERHEAD
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.planning.cost import Workload, make_devices
from anycostfl.planning.strategy import Limits

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
def test_preset_has_the_size_of_its_model(name: str) -> None:
    settings = config.load_preset(name)
    network = models.load(settings.model.name).build()
    bits = 32 * sum(p.numel() for p in network.parameters())
    assert settings.workload.size_bits == bits


@pytest.mark.parametrize("name", config.profile_names())
def test_profile_cites_sources_and_marks_guesses(name: str) -> None:
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
        .replace('partition = "iid"', 'partition = "shards"')
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
        "data.partition: given 'shards', allowed iid, dirichlet",
        "model.name: no model 'resnet9000'; did you mean 'resnet18'? there are cnn",
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
        ("base=demo", "base: only the file of a preset has one"),
        ("bsae=demo", "bsae: unknown key, did you mean base?"),
        ("fleet.cohort=61", "at most devices (60)"),
        ("fleet.bandwidth_shared=1", "true or false"),
        ("summary.x=1", "allowed a string"),
        ("fleet=3", "a section"),
        ("fleet.profiles=3", "a list of strings"),
        ("fleet.distance_mean_m=far", "given 'far' (str), allowed a number"),
        ("fleet.distance_std_m=500", "beside a mean"),
        ("rates.stk=0.1", "rates.stk: no method 'stk'; did you mean 'stc'? there are anycostfl"),
    ],
)
def test_bad_override_says_what_is_allowed(change: str, told: str) -> None:
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


def test_profile_refuses_unknown_keys_and_guesses_of_nothing(tmp_path: Path) -> None:
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
    file.write_text('base = "fmnist-iid"\n[run]\nrounds = 7\n[rates]\nstc = 0.5\n')
    mine, base = config.load_preset(str(file), ["run.seed=3"]), config.load_preset("fmnist-iid")
    assert (mine.run.rounds, mine.run.seed, mine.rates["stc"]) == (7, 3, 0.5)
    assert mine.rates["qsgd"] == base.rates["qsgd"]
    assert replace(mine, run=base.run, rates=base.rates) == base


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


def test_other_data_do_not_keep_the_title() -> None:
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
    named = replace(config.load_preset("demo"), rates={name: 0.02}, summary=name)
    read = tomllib.loads(config.to_toml(named))
    assert (read["rates"], read["summary"]) == ({name: 0.02}, name)


@pytest.mark.parametrize("method", ["anycostfl", "anycostfl+", VARIANT, "fedavg"])
def test_a_rate_of_a_method_that_plans_its_own_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="plans its uploads itself"):
        config.load_preset("demo", [f"rates.{method}=0.02"])


def test_no_more_devices_can_be_asked_to_agree_than_take_part() -> None:
    assert config.load_preset("demo", ["aggregation.least=10"]).aggregation.least == 10
    with pytest.raises(ConfigError, match=r"aggregation.least: given 11.*fleet.cohort \(10\)"):
        config.load_preset("demo", ["aggregation.least=11"])


@pytest.mark.parametrize("rate", ["0", "-1", "5"])
def test_a_rate_that_is_no_share_is_refused_at_once(rate: str) -> None:
    with pytest.raises(ConfigError, match=rf"rates\.stc: given {rate}, allowed above 0"):
        config.load_preset("demo", [f"rates.stc={rate}"])


def test_no_upload_is_planned_without_room_for_its_frame() -> None:
    asked = config.load_preset("demo", ["limits.beta_min=0"])
    least = asked.limits_of("anycostfl").beta_min
    budget = least * asked.limits.alpha_min * asked.workload.size_bits / 8
    assert OVERHEAD < budget <= OVERHEAD + 1.01


def test_bases_in_a_circle_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(ConfigError, match="goes round in a circle"):
        config.load_preset(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").unlink()
    with pytest.raises(UnknownNameError, match=r"there is no file .*b\.toml"):
        config.load_preset(str(tmp_path / "a.toml"))
