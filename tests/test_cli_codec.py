"""`anycostfl codec` shows true figures, and says what is wrong with its input."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anycostfl.codec import compress
from command_line import Call

UPDATE = {"fc.weight": torch.randn(60, 98, generator=torch.Generator().manual_seed(0))}


@pytest.fixture(autouse=True)
def _file(tmp_path: Path) -> None:
    save_file(UPDATE, tmp_path / "update.safetensors")


def test_json_says_what_the_codec_does(call: Call) -> None:
    options = ("--beta", 0.1, "--seed", 4, "--block", "fc.weight=49", "--json")
    code, text, _ = call("codec", "update.safetensors", *options)
    shown = json.loads(text)
    payload = compress(UPDATE, 0.1, seed=4, blocks={"fc.weight": 49})
    assert code == 0
    assert shown["payload_bytes"] == len(payload) == sum(shown["bytes_by_section"].values())
    assert shown["budget_bytes"] == int(0.1 * 4 * 60 * 98)
    assert 0 < shown["relative_error"] < 1
    assert shown["cosine"] == pytest.approx(math.sqrt(1 - shown["relative_error"]), abs=0.1)
    assert shown["sweep"] == []


def test_an_update_of_zeros_has_no_error(call: Call, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(30, 30)}, tmp_path / "zeros.safetensors")
    shown = json.loads(call("codec", "zeros.safetensors", "--beta", 0.1, "--json")[1])
    assert (shown["relative_error"], shown["cosine"]) == (0, 0)


def test_tables_and_plot(call: Call, tmp_path: Path) -> None:
    code, text, _ = call("codec", "update.safetensors", "--beta", 0.1, "--sweep", "curve.png")
    assert code == 0
    for word in ("payload", "cosine", "encode", "mask", "levels", "signs", "table", "header"):
        assert word in text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "1/630" in text
    assert "1/1000" not in text  # below the size of an empty payload


def test_sweep_without_matplotlib_says_what_to_install(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, told = call("codec", "update.safetensors", "--beta", 0.1, "--sweep", "curve.png")
    assert code == 2
    assert "anycostfl[plots]" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["text"], "is not a safetensors file"),
        (["missing"], "no file"),
        (["update.safetensors", "--block", "49"], "NAME=N"),
        (["update.safetensors", "--block", "foo=9"], "no foo; there are fc.weight"),
        (["update.safetensors", "--beta", "0"], "must be in (0, 1]"),
        (["update.safetensors", "--beta", "1", "--sweep", "/dev/null/x.png"], "figure: given"),
    ],
)
def test_bad_input_is_named(call: Call, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "text").write_text("not tensors")
    code, _, told = call("codec", *words)
    assert code == 2
    assert message in told
