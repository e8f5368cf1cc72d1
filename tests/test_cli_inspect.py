"""`anycostfl inspect` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Call


def test_tables_name_groups_pins_and_costs(call: Call) -> None:
    code, shown, _ = call("inspect", "--model", "cnn", "--alpha", "0.25")
    assert code == 0
    for text in ("conv2", "1,663,370", "is an output of the model", "72.4"):
        assert text in shown


def test_json_is_one_document_with_the_same_numbers(call: Call) -> None:
    _, text, _ = call("inspect", "--model", "vgg9", "--alpha", "0.25", "--json")
    document = json.loads(text)
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


def test_what_is_frozen_is_not_uploaded(call: Call, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    first = nn.Linear(7, 12).requires_grad_(False)\n"
        "    return nn.Sequential(first, nn.ReLU(), nn.Linear(12, 2))\n"
    )
    _, text, _ = call("inspect", "--model", "half:make", "--alpha", "0.25", "--json", "--input=7")
    document = json.loads(text)
    assert document["parameters"] == {"full": 7 * 12 + 12 + 26, "sub": 7 * 6 + 6 + 14}
    assert document["update_bits"] == {"full": 32 * 26, "sub": 32 * 14}


def test_anybodys_model_can_be_inspected(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 2))\n"
    )
    model = ["inspect", "--model", "mine:make", "--alpha", "0.25", "--json"]
    _, text, _ = call(*model, "--input", "7")
    assert json.loads(text)["groups"][0]["width"] == 6
    code, _, complaint = call(*model, "--input", "seven")
    assert code == 2
    assert "shape of one sample" in complaint


def test_a_function_may_bring_its_inputs_and_obstacles_are_named(
    call: Call, tmp_path: Path
) -> None:
    """Tokens are no random numbers; a product of 12 channels that no rule knows is pinned."""
    (tmp_path / "words.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Words(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.a = nn.Embedding(9, 8), nn.Linear(8, 12)\n"
        "        self.b, self.head = nn.Linear(12, 20), nn.Linear(20, 3)\n"
        "    def forward(self, x):\n"
        "        h = self.a(self.embed(x).mean(1))\n"
        "        return self.head(self.b(torch.cdist(h, h) @ h).relu())\n"
        "def make():\n"
        "    return Words(), torch.randint(9, (2, 5))\n"
    )
    code, text, _ = call("inspect", "--model", "words:make", "--json")
    assert code == 0
    document = json.loads(text)
    assert {group["name"] for group in document["groups"]} == {"embed", "b"}
    assert document["coverage"]["parameters"] == 1 - (12 + 3) / (72 + 108 + 260 + 63)
    assert 0 < document["coverage"]["training_flops"] < 1
    assert document["would_raise_it"][0]["operation"] == "_cdist_forward"
    assert document["trace_cpu_seconds"] > 0
    _, shown, _ = call("inspect", "--model", "words:make")
    assert "Would raise it: _cdist_forward" in shown
