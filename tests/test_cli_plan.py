"""`anycostfl plan` shows, explains and refuses."""

import json
import sys
from pathlib import Path

import pytest

from anycostfl.cli import main

PNG = b"\x89PNG"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["anycostfl", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_cohort_table_and_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--preset", "fmnist-iid", "--round", "0") == 0
    told = capsys.readouterr().out
    assert told.count("T E") == 15
    assert "devices taking part: 15" in told
    assert "round energy j" in told


def test_json_is_one_document_that_agrees_with_the_budgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "cifar10-iid", "--round", "3", "--seed", "1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["devices"]) == 15
    for device in document["devices"]:
        assert device["energy_j"] <= device["energy_budget_j"] * (1 + 1e-9)
        assert device["gain"] == pytest.approx(device["alpha"] ** 4 * device["beta"])
    total = sum(device["energy_j"] for device in document["devices"])
    assert document["summary"]["round_energy_j"] == pytest.approx(total)


@pytest.mark.parametrize("who", [(), ("--device", "jetson-nano", "--latency", "10")])
def test_plots_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    who: tuple[str, ...],
) -> None:
    file = tmp_path / "new folder" / "plan.png"
    assert run(monkeypatch, *who, "--plot", str(file)) == 0
    assert file.read_bytes().startswith(PNG)
    assert "plan.png" in capsys.readouterr().out.replace("\n", "")


def test_plot_of_a_cohort_that_cannot_take_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "plan.png"
    assert run(monkeypatch, "--set", "fleet.latency_s=0.001", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(PNG)


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(monkeypatch, "--plot", str(tmp_path / "x.png")) == 2
    assert "anycostfl[plots]" in capsys.readouterr().err


def test_one_device_within_its_budgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--device", "jetson-nano", "--latency", "10", "--energy", "6", "--distance", "200")
    assert run(monkeypatch, *words, "--samples", "5000", "--json") == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["latency_budget_s"], device["energy_budget_j"]) == (10.0, 6.0)
    assert device["feasible"]


def test_infeasible_device_is_explained_and_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--device", "raspberry-pi-4", "cifar10-iid") == 2
    told = capsys.readouterr()
    assert "sits out (latency and energy together)" in told.out
    assert "cannot afford" in told.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--preset", "nope"), "there are best, cifar10-iid"),
        (("--device", "toaster"), "there are jetson-agx-xavier"),
        (("--device", "jetson-nano", "--energy", "-1"), "energy_j: given -1"),
        (("--device", "jetson-nano", "--latency", "nan"), "latency_s: given nan"),
        (("--set", "fleet.bandwidth_hz=0", "--set", "limits.alpha_min=2"), "2 problems"),
        (("--device", "jetson-nano", "--distance", "0"), "distance_m: given 0"),
        (("--device", "jetson-nano", "--samples", "-3"), "samples: given -3"),
        (("--plot", "figure.nonsense"), "figure: given figure.nonsense"),
        (("--latency", "3"), "only with --device"),
    ],
)
def test_what_the_user_can_mend_ends_with_two(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, *words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
