"""`anycostfl inspect` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def inspect(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("anycostfl")
    return subprocess.run(
        [str(program), "inspect", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_tables_name_groups_pins_and_costs() -> None:
    done = inspect("--model", "cnn", "--alpha", "0.25")
    assert done.returncode == 0
    for text in ("conv2", "1,663,370", "is an output of the model", "72.4"):
        assert text in done.stdout


def test_json_is_one_document_with_the_same_numbers() -> None:
    done = inspect("--model", "vgg9", "--alpha", "0.25", "--json")
    document = json.loads(done.stdout)
    assert document["parameters"]["full"] == 3_491_530
    assert document["groups"][0] == {
        "name": "convs.0",
        "channels": 32,
        "width": 16,
        "parameters_per_channel": 3 * 9 + 1 + 64 * 9,
        "training_flops_per_channel": 2 * 1024 * 27 * 2 + 2 * 1024 * 9 * 64 * 3,
        "produced_by": ["convs.0.weight"],
        "tensors": ["convs.0.bias", "convs.0.weight", "convs.1.weight"],
    }


def test_anybodys_model_can_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 2))\n"
    )
    model = ["--model", "mine:make", "--alpha", "0.25", "--json"]
    done = inspect(*model, "--input", "7", cwd=tmp_path)
    assert json.loads(done.stdout)["groups"][0]["width"] == 6
    refused = inspect(*model, "--input", "seven", cwd=tmp_path)
    assert refused.returncode == 2
    assert "shape of one sample" in refused.stderr


def test_mistakes_end_with_one_message_and_code_two() -> None:
    for arguments, message in (
        (("--model", "resnet19"), "resnet18"),
        (("--model", "cnn", "--alpha", "1.5"), "at most 1"),
        (("--model", "no.such:thing"), "cannot load"),
        (("--model", "cnn", "--rule", "cubic"), "sqrt, fast"),
    ):
        done = inspect(*arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
