"""Exported widths compute what the sub-model computes, fit what they should, and say so."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import anycostfl
from anycostfl import SubModel, models
from anycostfl.config import load_preset, to_toml
from anycostfl.device import measure
from anycostfl.errors import (
    AlphaError,
    ConfigError,
    InfeasibleBudgetError,
    MissingExtraError,
)
from anycostfl.experiment import load_data
from anycostfl.export import cut, least_alpha, open_trained
from anycostfl.export.elastic_file import METADATA, ElasticFileError
from anycostfl.export.formats import FORMATS, ExportError, _difference, write, write_elastic
from anycostfl.export.widths import Width, measure_widths, parse_limit, widest, width_of_file
from anycostfl.files import StorageError
from anycostfl.metrics import ACCURACY
from anycostfl.records.run import RunWriter, read_run
from anycostfl.runs import journal
from anycostfl.simulate import simulate
from anycostfl.state import tensors_of
from command_line import Call
from small_runs import small_overrides


def colour_dataset(folder: Path) -> Path:
    """Two classes of noisy colour stripes, 32 pixels wide."""
    random = np.random.default_rng(0)
    labels = np.arange(60) % 2
    images = random.integers(0, 255, (60, 32, 32, 3)).astype(np.uint8)
    images[labels == 1, ::2] //= 4
    path = folder / "colour.npz"
    np.savez(
        path,
        train_images=images[:48],
        train_labels=labels[:48],
        test_images=images[48:],
        test_labels=labels[48:],
    )
    return path


def make_run(folder: Path, *more: str) -> Path:
    """A run directory after really training."""
    config = load_preset("demo", small_overrides(folder, "training.precision=fp32", *more))
    writer = RunWriter.create(folder / "run", to_toml(config))
    for _ in journal(simulate(config), config, writer):
        pass
    return folder / "run"


@pytest.fixture(scope="session")
def cnn_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("cnn"), "run.rounds=2")


@pytest.fixture(scope="session")
def colour_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def train(model: str) -> Path:
        folder = tmp_path_factory.mktemp(model)
        data = f'data.name="{colour_dataset(folder)}"'
        fleet = ("fleet.devices=4", "fleet.cohort=2")
        return make_run(folder, data, f"model.name={model}", "run.rounds=1", *fleet)

    return train


# --- files that agree -----------------------------------------------------------------------------


def check_onnx(run: Path, alpha: float, path: Path) -> None:
    trained = open_trained(run)
    sub = cut(trained, alpha)
    assert write(trained, sub, path, "onnx") <= 1e-4
    onnx.checker.check_model(onnx.load(path), full_check=True)
    about = {p.key: p.value for p in onnx.load(path).metadata_props}["anycostfl"]
    assert json.loads(about)["alpha"] == alpha
    assert b"/site-packages/" not in path.read_bytes()  # nor any other path of this machine
    session = onnxruntime.InferenceSession(path)
    prepared, raw = trained.data().test.inputs, trained.raw().test.inputs
    for batch in (1, 2, 9):
        (logits,) = session.run(["logits"], {"raw_input": raw[:batch].numpy()})
        with torch.no_grad():
            assert np.abs(np.asarray(logits) - sub.module(prepared[:batch]).numpy()).max() <= 1e-4


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75, 1.0])
def test_cnn_in_onnxruntime_agrees_with_pytorch(
    cnn_run: Path, alpha: float, tmp_path: Path
) -> None:
    check_onnx(cnn_run, alpha, tmp_path / "cnn.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.25, 1.0])
@pytest.mark.parametrize("model", ["vgg9", "resnet18"])
def test_colour_models_in_onnxruntime_agree_with_pytorch(
    colour_run: Callable[[str], Path], model: str, alpha: float, tmp_path: Path
) -> None:
    check_onnx(colour_run(model), alpha, tmp_path / "model.onnx")


def test_torch_program_runs_without_this_package_and_holds_no_pickle(
    cnn_run: Path, tmp_path: Path
) -> None:
    trained, path = open_trained(cnn_run), tmp_path / "cnn.pt2"
    sub = cut(trained, 0.5)
    assert write(trained, sub, path, "torch", prepare=False) <= 1e-6
    x = trained.example(3)
    assert torch.equal(torch.export.load(path).module()(x), sub.module(x))
    with zipfile.ZipFile(path) as archive:
        members = [archive.read(name) for name in archive.namelist()]
    assert not any(member.startswith((b"PK", b"\x80")) for member in members)


def test_safetensors_holds_the_sub_models_state(cnn_run: Path, tmp_path: Path) -> None:
    trained, path = open_trained(cnn_run), tmp_path / "cnn.safetensors"
    sub = cut(trained, 0.5)
    write(trained, sub, path, "safetensors")
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode  # others may read it
    state = load_file(path)
    assert all(torch.equal(state[name], t) for name, t in sub.module.state_dict().items())


@pytest.mark.parametrize("name", ["safetensors", "torch", "onnx"])
def test_tied_weights_are_written_in_every_format(tmp_path: Path, name: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    module[2].weight = module[0].weight
    module.eval()
    kind, x = FORMATS[name], torch.randn(2, 8)
    path = tmp_path / f"tied{kind.suffix}"
    kind.write(module, x, path, {})
    [found] = tree_leaves(kind.read(module, path)(x))
    assert torch.allclose(found, module(x), atol=1e-6)


class Pair(nn.Module):
    """Two inputs, and more than one output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(3, 6)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor | None]:
        hidden = self.left(left) - self.right(right)
        return {"hidden": hidden, "cache": None, "logits": hidden.relu()}


def by_position(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4), torch.randn(batch, 3)


def by_name(batch: int) -> dict[str, Tensor]:
    left, right = by_position(batch)
    return {"right": right, "left": left}  # in any order


@pytest.mark.parametrize("name", ["onnx", "torch", "safetensors"])
@pytest.mark.parametrize("example", [by_position, by_name])
def test_several_inputs_and_outputs_are_written_in_every_format(
    tmp_path: Path, name: str, example: Callable[[int], Any]
) -> None:
    module, kind = Pair().eval(), FORMATS[name]
    path = tmp_path / f"pair{kind.suffix}"
    kind.write(module, example(2), path, {})
    assert _difference(module, kind.read(module, path), example) <= 1e-6


def test_a_file_says_what_it_is_and_how_its_input_was_normalised(
    cnn_run: Path, tmp_path: Path
) -> None:
    trained, path = open_trained(cnn_run), tmp_path / "cnn.safetensors"
    write(trained, cut(trained, 0.25), path, "safetensors")
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["anycostfl"])
    dataset = load_data(trained.config)
    assert (about["model"], about["alpha"], about["rounds"]) == ("cnn", 0.25, 2)
    mean, std = (dataset.fitted[name] for name in ("mean", "std"))
    assert (about["mean"], about["std"]) == (mean.tolist(), std.tolist())
    restored = dataset.train.inputs[0] * std + mean
    assert 0 <= float(restored.min()) <= float(restored.max()) <= 1.001


def test_batch_norm_is_measured_on_training_images_at_the_width_itself(
    colour_run: Callable[[str], Path],
) -> None:
    trained = open_trained(colour_run("mobilenet"))
    sub = cut(trained, 0.5)
    norms = [m for m in sub.module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    seen: list[torch.Tensor] = []
    norms[-1].register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    with torch.no_grad():  # the layers before it normalise as they did when it was measured
        for norm in norms[:-1]:
            norm.train()
        sub.module(load_data(trained.config).train.inputs)
    measured = sub.module.state_dict()
    last = [name for name in measured if name.endswith("running_mean")][-1]
    assert torch.allclose(measured[last], seen[0].mean((0, 2, 3)), atol=1e-5)
    uncalibrated = trained.net.shrink(0.5).module.state_dict()
    changed = {n for n, t in measured.items() if not torch.equal(t, uncalibrated[n])}
    assert changed
    assert all("running" in name or "num_batches" in name for name in changed)


# --- raw input ------------------------------------------------------------------------------------


def test_a_file_takes_raw_input_and_refuses_any_other(cnn_run: Path, tmp_path: Path) -> None:
    trained, path = open_trained(cnn_run), tmp_path / "cnn.onnx"
    sub = cut(trained, 0.25)
    write(trained, sub, path, "onnx")
    session = onnxruntime.InferenceSession(path)
    [taken] = session.get_inputs()
    assert (taken.name, taken.type) == ("raw_input", "tensor(uint8)")
    prepared = trained.data().test.inputs[:3].numpy()
    for wrong in ({"raw_input": prepared}, {"raw_input": prepared / 255}, {"input": prepared}):
        with pytest.raises(
            (ValueError, onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument)
        ):
            session.run(None, wrong)
    write(trained, sub, path, "onnx", prepare=False)
    [taken] = onnxruntime.InferenceSession(path).get_inputs()
    assert (taken.name, taken.type) == ("input", "tensor(float)")


def test_int8_keeps_the_metadata_and_its_card_says_what_it_takes(
    call: Call, cnn_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "small.onnx"
    code, shown, _ = call("export", cnn_run, "--alpha", 0.5, "--format", "int8", "--out", file)
    assert code == 0
    assert "int8" in shown
    about = {p.key: p.value for p in onnx.load(file).metadata_props}["anycostfl"]
    assert (json.loads(about)["precision"], json.loads(about)["raw_input"]) == ("int8", True)
    card = (tmp_path / "small.onnx.md").read_text()
    assert "uint8 (1, 28, 28), as recorded" in card
    lines = re.findall(r"```python\n(.*?)```", card, re.S)[0].replace("small.onnx", str(file))
    names = {"input": open_trained(cnn_run).raw().test.inputs[:5].numpy()}
    exec(lines, names)  # noqa: S102 - what the card tells its reader to run
    assert np.asarray(names["outputs"])[0].shape == (5, 10)


def test_executorch_agrees_with_pytorch(cnn_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    trained = open_trained(cnn_run)
    assert write(trained, cut(trained, 0.5), tmp_path / "cnn.pte", "executorch") <= 1e-4


def test_weights_alone_hold_no_preparation(call: Call, cnn_run: Path) -> None:
    options = ("--format", "safetensors", "--no-preparation", "--alpha", 0.5)
    assert (
        "--no-preparation: --format safetensors holds weights"
        in call("export", cnn_run, *options)[2]
    )


# --- one file for all widths ----------------------------------------------------------------------


def test_two_lines_load_any_width(cnn_run: Path, tmp_path: Path) -> None:
    trained, path = open_trained(cnn_run), tmp_path / "cnn.safetensors"
    write_elastic(trained, path)
    for alpha in (0.1, 0.25, 1.0):
        sub = anycostfl.load_elastic(path).shrink(alpha)
        expected = trained.net.shrink(alpha)
        assert sub.plan.widths == expected.plan.widths
        states = sub.module.state_dict(), expected.module.state_dict()
        assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())


def test_channels_are_sorted_before_they_are_cut(cnn_run: Path) -> None:
    trained, checkpoint = open_trained(cnn_run), read_run(cnn_run).checkpoint
    assert checkpoint is not None
    plain = models.load("cnn").build()
    plain.load_state_dict(checkpoint["model"])
    x = trained.example(4)
    assert torch.allclose(plain(x), trained.net.module(x), atol=1e-5)
    assert trained.order == "importance"
    order = trained.net.sort_channels()
    assert all((np.diff(channels) == 1).all() for channels in order.values())


def test_sub_models_trained_in_a_fixed_order_are_not_sorted(cnn_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(cnn_run, tmp_path / "run"))
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('method = "anycostfl"', 'method = "fedavg"'))
    trained, checkpoint = open_trained(run), read_run(run).checkpoint
    assert checkpoint is not None
    assert trained.order == "as trained"
    for name, tensor in tensors_of(trained.net.module).items():
        assert torch.equal(tensor, checkpoint["model"][name])


def test_files_that_are_no_elastic_model_are_refused(cnn_run: Path, tmp_path: Path) -> None:
    trained, path = open_trained(cnn_run), tmp_path / "one.safetensors"
    write(trained, cut(trained, 0.5), path, "safetensors")
    with pytest.raises(ElasticFileError, match=r"only the width α = 0.5.*--format elastic"):
        anycostfl.load_elastic(path)
    with pytest.raises(ElasticFileError, match="contains no model"):
        anycostfl.load_elastic(next(cnn_run.glob("checkpoint-*")))
    (tmp_path / "junk").write_bytes(b"no safetensors at all")
    with pytest.raises(ElasticFileError, match="cannot read"):
        anycostfl.load_elastic(tmp_path / "junk")
    with pytest.raises(ElasticFileError, match="cannot read"):
        anycostfl.load_elastic(tmp_path / "missing")
    save_file({"w": torch.zeros(1)}, tmp_path / "deep", {METADATA: "[" * 200_000})
    with pytest.raises(ElasticFileError, match="cannot read"):
        anycostfl.load_elastic(tmp_path / "deep")


# --- what fits ------------------------------------------------------------------------------------


def test_fit_takes_the_widest_model_within_the_flops(cnn_run: Path) -> None:
    trained = open_trained(cnn_run)

    def flops(alpha: float) -> float:
        return trained.net.coupling.flops(trained.net.plan(alpha).widths, training=False)

    best = max(i / 100 for i in range(1, 101) if flops(i / 100) <= 10e6)
    assert widest(trained, parse_limit("10MFLOP"), "onnx").alpha == best
    assert widest(trained, parse_limit("1GFLOP"), "onnx").alpha == 1.0


def test_fit_takes_the_widest_file(cnn_run: Path, tmp_path: Path) -> None:
    trained = open_trained(cnn_run)
    alpha = widest(trained, parse_limit("1.5 mb"), "safetensors").alpha
    sizes = []
    for candidate in (alpha, alpha + 0.01):
        sub, path = cut(trained, candidate), tmp_path / "file"
        write(trained, sub, path, "safetensors")
        sizes.append(width_of_file(trained, sub, path).bytes)
    assert sizes[0] <= 1_500_000
    assert sizes[1] == sizes[0] or sizes[1] > 1_500_000  # the same widths, or too many
    assert trained.net.plan(alpha).flops_ratio < 0.5


@pytest.mark.slow
def test_fit_takes_a_width_that_is_fast_enough(call: Call, cnn_run: Path) -> None:
    trained = open_trained(cnn_run)
    (full,) = measure_widths(trained, [1.0], lambda _: None)
    assert full.latency_ms is not None
    code, text, _ = call("export", cnn_run, "--fit", f"{full.latency_ms / 2}ms", "--json")
    assert code == 0
    (row,) = json.loads(text)["exported"]
    assert row["latency_ms"] <= full.latency_ms / 2
    assert 0.05 < row["alpha"] < 1
    assert Path(row["file"]).stat().st_size == row["bytes"]


def test_what_does_not_fit_says_the_least_that_would(call: Call, cnn_run: Path) -> None:
    trained = open_trained(cnn_run)
    with pytest.raises(
        InfeasibleBudgetError, match=r"1 kB: the narrowest .* needs [\d.]+ kB"
    ) as told:
        widest(trained, parse_limit("1kB"), "safetensors")
    least = re.findall(r"needs ([\d.]+ kB)", str(told.value))[0]
    assert widest(trained, parse_limit(least), "safetensors").alpha < 0.01
    assert "nothing fits into 0.01 us" in call("export", cnn_run, "--fit", "0.01us")[2]


@pytest.mark.parametrize("text", ["", "3", "ms", "3 parsecs", "-1ms", "0MB", "nanms", "1e3"])
def test_limits_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number and a unit"):
        parse_limit(text)


def test_limits_have_units() -> None:
    assert parse_limit("3ms").cost(_width(latency_ms=6)) == 6
    assert parse_limit("2 MB").cost(_width(size=4_000_000)) == 4
    assert parse_limit("1.5gflop").amount == 1.5


def _width(latency_ms: float = 0, size: int = 0) -> Width:
    return Width(1.0, None, 0, 0.0, size, latency_ms)


# --- the table ------------------------------------------------------------------------------------


def test_table_of_widths(call: Call, cnn_run: Path) -> None:
    code, text, _ = call("export", cnn_run, "--table", "--alpha", 1, "--alpha", 0.25, "--json")
    assert code == 0
    rows = json.loads(text)["widths"]
    assert rows == json.loads((cnn_run / "widths.json").read_text())
    assert [(row["alpha"], row["precision"]) for row in rows] == [
        (1.0, "fp32"),
        (1.0, "int8"),
        (0.25, "fp32"),
        (0.25, "int8"),
    ]
    wide, small, narrow, smallest = rows
    for fp32, int8 in ((wide, small), (narrow, smallest)):
        assert int8["bytes"] <= 0.30 * fp32["bytes"]
        assert int8["metric"] >= fp32["metric"] - 0.01
        assert fp32["difference"] <= 1e-4 < int8["difference"]
    assert wide["parameters"] == 1_663_370
    assert wide["flops"] == 2 * (25 * 32 * 784 + 25 * 32 * 64 * 196 + 3136 * 512 + 512 * 10)
    assert narrow["bytes"] > 4 * narrow["parameters"]
    assert all(wide[key] > narrow[key] for key in ("parameters", "flops", "bytes"))
    assert all(row["latency_ms"] > 0 for row in rows)
    trained = open_trained(cnn_run)
    test, training = load_data(trained.config).test, trained.config.training
    [sums] = measure(cut(trained, 0.25).module, test, (ACCURACY,), training)
    right, count = sums[0].tolist()
    assert count == len(test)
    assert narrow["metric"] == pytest.approx(right / count, abs=1.5 / count)  # a tie may fall


def test_a_table_leaves_out_what_cannot_be_cut(
    call: Call, cnn_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(cnn_run, tmp_path / "run")
    monkeypatch.setattr("anycostfl.cli.export.least_alpha", lambda _: 0.9)
    code, shown, told = call("export", run, "--table")
    assert code == 0
    assert [row["alpha"] for row in json.loads((tmp_path / "run/widths.json").read_text())] == [
        1.0
    ] * 2
    assert all(
        title in shown for title in ("α", "accuracy", "MFLOP", "size", "latency", "widths.json")
    )
    assert "0.375, 0.25 is left out" in told


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "0"], "--alpha: given 0, must be in (0, 1]"),
        (["--alpha", "1.5"], "--alpha: given 1.5"),
        (["--alpha", "nan"], "--alpha: given nan"),
        (["--alpha", "0.5", "--format", "tflite"], "'tflite' is not one of"),
        (["--alpha", "0.5", "--fit", "3ms"], "give only one of them"),
        (["--fit", "3 parsecs"], "must be a number and a unit"),
        ([], "give a width"),
        (["--format", "elastic", "--alpha", "0.5"], "contains all widths"),
        (["--table", "--fit", "3ms"], "--table measures"),
        (["--alpha", "0.5", "--alpha", "0.6", "--out", "x"], "one file for 2 widths"),
        (["--alpha", "0.5", "--out", "x.safetensors"], "not a suffix of --format onnx"),
        (["--format", "elastic", "--out", "x.onnx"], "not a suffix of --format elastic"),
    ],
)
def test_nonsense_is_refused(
    call: Call, cnn_run: Path, arguments: Sequence[str], message: str
) -> None:
    code, _, told = call("export", cnn_run, *arguments)
    assert code == 2
    assert message in told


def test_a_width_no_group_supports(cnn_run: Path) -> None:
    trained = open_trained(cnn_run)
    least = least_alpha(trained.net)
    assert 0 < least < 0.01
    with pytest.raises(AlphaError, match=f"must be at least {least:.4g}"):
        cut(trained, least / 2)
    assert cut(trained, least).plan.flops_ratio <= 1.02 * least


def test_below_alpha_min_is_allowed_and_warned_of(
    call: Call, cnn_run: Path, tmp_path: Path
) -> None:
    file = ("--format", "safetensors", "--out", "new/tiny.safetensors")
    code, shown, told = call("export", cnn_run, "--alpha", 0.04, *file)
    assert (code, (tmp_path / "new/tiny.safetensors").exists()) == (0, True)
    found = re.search(r"differs from PyTorch by at most (\S+)", shown)
    assert found is not None
    assert float(found[1]) < 1e-6
    assert "below the run's α^min = 0.05" in told


def test_runs_that_cannot_be_exported(cnn_run: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no run"):
        open_trained(tmp_path)
    run = Path(shutil.copytree(cnn_run, tmp_path / "run"))
    for checkpoint in run.glob("checkpoint-*"):
        checkpoint.write_bytes(b"cut")
    with pytest.raises(StorageError, match=r"no checkpoint to export; checkpoint-\d+.* is damaged"):
        open_trained(run)
    for checkpoint in run.glob("checkpoint-*"):
        checkpoint.unlink()
    with pytest.raises(StorageError, match=r"no checkpoint to export.*--resume"):
        open_trained(run)


def test_missing_extras_say_what_to_install(
    cnn_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = open_trained(cnn_run)
    sub = cut(trained, 0.5)
    for package in ("onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=r"pip install 'anycostfl\[export\]'"):
            write(trained, sub, tmp_path / "cnn.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []
    write(trained, sub, tmp_path / "cnn.safetensors", "safetensors")  # needs no extra


def test_a_file_that_disagrees_is_not_kept(cnn_run: Path, tmp_path: Path) -> None:
    trained = open_trained(cnn_run)
    sub = cut(trained, 0.5)
    with torch.no_grad():
        next(sub.module.parameters()).fill_(math.nan)
    with pytest.raises(ExportError, match="differs from PyTorch by nan"):
        write(trained, sub, tmp_path / "cnn.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["torch", "onnx"])
def test_a_model_that_torch_cannot_export_is_refused_in_one_line(
    cnn_run: Path, tmp_path: Path, name: str
) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) if float(x.sum()) > 0 else -x.flatten(1)

    trained = open_trained(cnn_run)
    sub = SubModel(Branches().eval(), trained.net.plan(1.0))
    with pytest.raises(ExportError, match=r"torch cannot export this model: [^\n]+; --format"):
        write(trained, sub, tmp_path / "branches", name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(call: Call, cnn_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = ("--format", "safetensors", "--out", "file/cnn.safetensors")
    assert "cannot write" in call("export", cnn_run, "--alpha", 0.5, *file)[2]
