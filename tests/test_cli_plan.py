"""`anycostfl plan` shows, explains and refuses."""

import json
import sys
from pathlib import Path

import pytest

from command_line import Call

PNG = b"\x89PNG"
NANO = ("--device", "jetson-nano")


def test_cohort_table_and_summary(call: Call) -> None:
    code, told, _ = call("plan", "--preset", "fmnist-iid", "--round", "0")
    assert code == 0
    assert told.count("T E") == 15
    assert "devices taking part: 15" in told
    assert "round energy j" in told


def test_json_is_one_document_that_agrees_with_the_budgets(call: Call) -> None:
    code, told, _ = call("plan", "cifar10-iid", "--round", "3", "--seed", "1", "--json")
    assert code == 0
    document = json.loads(told)
    assert len(document["devices"]) == 15
    for device in document["devices"]:
        assert device["energy_j"] <= device["energy_budget_j"] * (1 + 1e-9)
        assert device["gain"] == pytest.approx(device["alpha"] ** 4 * device["beta"])
    total = sum(device["energy_j"] for device in document["devices"])
    assert document["summary"]["round_energy_j"] == pytest.approx(total)


@pytest.mark.parametrize(
    "words",
    [
        (),
        (*NANO, "--latency", "10"),
        ("--set", "fleet.latency_s=0.001"),  # nobody can take part
    ],
)
def test_plots_are_drawn(call: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    code, told, _ = call("plan", *words, "--plot", "new folder/plan.png")
    assert code == 0
    assert (tmp_path / "new folder/plan.png").read_bytes().startswith(PNG)
    assert "figure: new folder/plan.png" in told


@pytest.mark.parametrize("words", [(), NANO])
def test_plot_without_matplotlib_says_what_to_install(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, told = call("plan", *words, "--plot", "x.png")
    assert code == 2
    assert "anycostfl[plots]" in told


def test_one_device_within_its_budgets(call: Call) -> None:
    words = ("--latency", "10", "--energy", "6", "--distance", "200", "--samples", "5000")
    code, told, _ = call("plan", *NANO, *words, "--json")
    (device,) = json.loads(told)["devices"]
    assert (code, device["latency_budget_s"], device["energy_budget_j"]) == (0, 10.0, 6.0)
    assert device["feasible"]


def test_infeasible_device_is_explained_and_ends_with_two(call: Call) -> None:
    code, told, complaint = call("plan", "--device", "raspberry-pi-4", "cifar10-iid")
    assert code == 2
    assert "sits out (latency and energy)" in told
    assert "cannot afford" in complaint


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--preset", "nope"), "there are air, bench-cifar"),
        (("--device", "toaster"), "there are jetson-agx-xavier"),
        ((*NANO, "--energy", "-1"), "energy_j: given -1"),
        ((*NANO, "--latency", "nan"), "latency_s: given nan"),
        (("--set", "fleet.bandwidth_hz=0", "--set", "limits.alpha_min=2"), "2 problems"),
        ((*NANO, "--distance", "0"), "distance_m: given 0"),
        ((*NANO, "--samples", "-3"), "samples: given -3"),
        (("--plot", "figure.nonsense"), "figure: given figure.nonsense"),
        (("--latency", "3"), "only with --device"),
    ],
)
def test_what_the_user_can_fix_ends_with_two(call: Call, words: tuple[str, ...], told: str) -> None:
    code, _, complaint = call("plan", *words)
    assert code == 2
    assert told in complaint
