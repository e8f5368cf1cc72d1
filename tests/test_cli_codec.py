"""`anycostfl codec` shows true figures, and says what is wrong with its input."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anycostfl.cli import main
from anycostfl.codec import compress

Run = Callable[..., tuple[int, str]]
UPDATE = {"fc.weight": torch.randn(60, 98, generator=torch.Generator().manual_seed(0))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(UPDATE, tmp_path / "update.safetensors")
    return tmp_path / "update.safetensors"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["anycostfl", "codec", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    return command


def test_json_says_what_the_codec_does(file: Path, run: Run) -> None:
    options = ("--beta", 0.1, "--seed", 4, "--block", "fc.weight=49", "--json")
    code, text = run(file, *options)
    shown = json.loads(text)
    payload = compress(UPDATE, 0.1, seed=4, blocks={"fc.weight": 49})
    assert code == 0
    assert shown["payload_bytes"] == len(payload) == sum(shown["bytes_by_section"].values())
    assert shown["budget_bytes"] == int(0.1 * 4 * 60 * 98)
    assert 0 < shown["relative_error"] < 1
    assert shown["cosine"] == pytest.approx(math.sqrt(1 - shown["relative_error"]), abs=0.1)
    assert shown["sweep"] == []


def test_table_names_every_kind_of_byte(file: Path, run: Run) -> None:
    _, text = run(file, "--beta", 0.1)
    for word in ("payload", "cosine", "encode", "mask", "levels", "signs", "table", "header"):
        assert word in text


def test_sweep_draws_a_picture_and_leaves_out_rates_below_an_empty_payload(
    file: Path, tmp_path: Path, run: Run
) -> None:
    code, text = run(file, "--beta", 0.1, "--sweep", tmp_path / "curve.png")
    assert code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "1/630" in text
    assert "1/1000" not in text


def test_sweep_without_matplotlib_says_what_to_install(
    file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text = run(file, "--beta", 0.1, "--sweep", tmp_path / "curve.png")
    assert code == 2
    assert "anycostfl[plots]" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["TEXT"], "is not a safetensors file"),
        (["missing"], "no file"),
        (["FILE", "--block", "49"], "NAME=N"),
        (["FILE", "--block", "foo=9"], "no foo; there are fc.weight"),
        (["FILE", "--beta", "0"], "must be in (0, 1]"),
        (["FILE", "--beta", "0.1", "--sweep", "/dev/null/x.png"], "figure: given"),
    ],
)
def test_bad_input_is_named(
    file: Path, tmp_path: Path, run: Run, words: list[str], message: str
) -> None:
    (tmp_path / "text").write_text("not tensors")
    places = {"FILE": file, "TEXT": tmp_path / "text", "missing": tmp_path / "missing"}
    code, text = run(*(places.get(word, word) for word in words))
    assert code == 2
    assert message in " ".join(text.split())
