"""What a script or a notebook does: train a module on arrays, look at it, keep it, compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import Metric, Task, compare, load_preset, methods, run, tasks
from anycostfl.api import Run
from anycostfl.config import parse_config
from anycostfl.derive import RATES
from anycostfl.errors import AnycostError, ConfigError, TaskError
from anycostfl.fleets.pool import SharedMemoryError
from anycostfl.records.run import CONFIG, read_journal
from planned_runs import unpacked

OWNERS, EACH, CLASSES = 12, 30, 3
KEEP = {"learning_rate": 0.1}  # no trials


def clouds(owners: int = OWNERS, classes: int = CLASSES) -> tuple[Tensor, Tensor, Tensor]:
    """Points around the centre of their class, moved a little by their owner."""
    draw = torch.Generator().manual_seed(0)
    whose = torch.arange(owners * EACH) % owners
    labels = torch.randint(classes, (len(whose),), generator=draw)
    centres = 2 * torch.randn(classes, 6, generator=draw)
    moved = 0.3 * torch.randn(owners, 6, generator=draw)
    noise = torch.randn(len(whose), 6, generator=draw)
    return centres[labels] + moved[whose] + noise, labels, whose


def perceptron(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, outputs))


def cloud_task(**more: Any) -> Task:
    x, y, owners = clouds()
    given: dict[str, Any] = {"train": (x, y), "owners": owners, "loss": F.cross_entropy}
    return Task(**(given | more))


def cloud_run(rounds: int = 2, **more: Any) -> Run:
    given: dict[str, Any] = {"model": perceptron(), "task": cloud_task(), "training": KEEP}
    return run(**(given | {"rounds": rounds} | more))


# --- run ------------------------------------------------------------------------------------------


def test_the_lines_of_the_readme_train(tmp_path: Path) -> None:
    x, y, ids = clouds()
    train = torch.arange(len(y)) < 300
    task = Task(
        train=(x[train], y[train]),
        test=(x[~train], y[~train]),
        owners=ids[train],
        loss=F.cross_entropy,
        metric="accuracy",
    )
    module = perceptron()
    before = [p.clone() for p in module.parameters()]
    result = run(model=module, task=task, method="anycostfl+", rounds=8, seed=0)
    seen = [(r.round, r.metric, r.energy_j) for r in result]
    assert [number for number, _, _ in seen] == list(range(8))
    assert all(energy > 0 for _, _, energy in seen)
    assert seen[-1][1] is not None
    assert seen[-1][1] > 0.85
    right = (result.model(x[~train]).argmax(1) == y[~train]).float().mean()
    assert float(right) == pytest.approx(seen[-1][1])  # the model is the one that was measured
    assert all(map(torch.equal, module.parameters(), before))  # a copy was trained
    assert result.config.training.learning_rate in RATES
    assert result.config.fleet.devices == OWNERS
    assert len({d.alpha for r in result.records for d in r.devices}) > 3  # widths differ
    (shown,) = unpacked(result.report(tmp_path / "page.html").read_text())
    assert shown["rounds"]["metric"] == pytest.approx([metric for _, metric, _ in seen], rel=1e-5)


def test_rounds_are_run_once_and_when_they_are_asked_for() -> None:
    result = cloud_run(4)
    first = next(iter(result))
    assert [first, *list(result)[1:]] == list(result.records)
    assert len(result.records) == 4
    assert result.summary()["rounds"] == 4


def test_the_same_seed_is_the_same_run_and_several_processes_change_nothing() -> None:
    def weights(**more: Any) -> list[Tensor]:
        return list(cloud_run(**more).model.parameters())

    one = weights()
    assert all(map(torch.equal, one, weights()))
    assert all(map(torch.equal, one, weights(workers=2)))
    assert not all(map(torch.equal, one, weights(seed=1)))


def test_a_task_that_other_processes_cannot_get_is_named() -> None:
    task = cloud_task(loss=lambda outputs, targets: 2 * F.cross_entropy(outputs, targets))
    with pytest.raises(SharedMemoryError, match=r"pickle .* or use one worker"):
        list(cloud_run(task=task, workers=2))


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from anycostfl import Task, run\n"
        "x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))\n"
        "task = Task(train=(x, (x[:, 0] > 0).long()), owners=torch.arange(60) % 4)\n"
        "module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))\n"
        "for record in run(model=module, task=task, rounds=2):\n"
        "    print(record.round, record.metric)\n"
    )
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1"]


def test_a_saved_run_is_a_run_directory(tmp_path: Path) -> None:
    result = cloud_run(3, target=0.5)
    folder = result.save(tmp_path / "kept")
    records, _ = read_journal(folder)
    assert tuple(records) == tuple(result.records)
    assert parse_config((folder / CONFIG).read_text(), "config", foreign=True) == result.config
    assert (folder / "report.html").exists()
    with pytest.raises(AnycostError, match="given as a Python object"):
        tasks.load(result.config.data.name)


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "safetensors"])
def test_any_width_is_exported(suffix: str, tmp_path: Path) -> None:
    result = cloud_run()
    whole = result.export(tmp_path / f"whole.{suffix}")
    half = result.export(tmp_path / f"half.{suffix}", alpha=0.5)
    assert whole.stat().st_size > 0
    assert half.stat().st_size > 0
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        result.export(tmp_path / "model.bin")


def test_a_configuration_runs_as_it_is() -> None:
    config = load_preset("heart", ["run.rounds=2"])
    assert run(config).config.run.rounds == 2
    assert len(list(run(config))) == 2


# --- what is derived and what is given ------------------------------------------------------------


def test_what_is_given_is_taken() -> None:
    config = cloud_run(
        fleet={"cohort": 3, "radius_m": 100.0},
        budgets={"latency_s": 0.5, "energy_j": (0.1, 0.2)},
        training={"learning_rate": 0.3, "optimizer": "adamw", "batch": 7},
        target=0.9,
        method="fedavg",
    ).config
    assert (config.fleet.cohort, config.fleet.radius_m) == (3, 100.0)
    assert (config.fleet.latency_s, config.fleet.budgets_per_sample) == (0.5, False)
    assert (config.fleet.energy_min_j, config.fleet.energy_max_j) == (0.1, 0.2)
    assert (config.training.optimizer, config.training.batch) == ("adamw", 7)
    assert (config.run.method, config.run.target) == ("fedavg", 0.9)


def test_samples_without_owners_are_spread() -> None:
    x, y, _ = clouds()
    config = cloud_run(task=Task(train=(x, y))).config
    assert (config.fleet.devices, config.data.partition) == (20, "iid")


def test_many_classes_at_owners_who_hold_few_of_them() -> None:
    """Forty owners hold 3 of 20 classes each; guessing is right one time in 20."""
    x, y, _ = clouds(owners=60, classes=20)
    order = torch.argsort(y, stable=True)
    pieces = torch.tensor_split(order, 120)
    mixed = np.random.default_rng(0).permutation(120).reshape(40, 3)
    owners = torch.empty(len(y), dtype=torch.long)
    for owner, places in enumerate(mixed):
        for place in places:
            owners[pieces[place]] = owner
    task = Task(train=(x, y), owners=owners)
    *_, last = run(model=perceptron(20), task=task, rounds=20)
    assert last.metric is not None
    assert last.metric > 0.5


def test_numbers_of_any_scale_are_predicted() -> None:
    x, _, owners = clouds()
    y = 500 + 80 * x[:, :1] - 60 * x[:, 1:2]
    scales = 10.0 ** torch.arange(-2, 4)
    task = Task(train=(x * scales, y), owners=owners, loss=F.mse_loss, metric="mae")
    *_, last = run(model=perceptron(1), task=task, rounds=30)
    guess = float((y - y.mean()).abs().mean())
    assert last.metric is not None
    assert last.metric < guess / 2


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"task": None}, "must have model=nn.Module and task=Task"),
    ({"model": perceptron}, "must have model=nn.Module and task=Task"),
    ({"config": 3}, "must be one or other"),
    ({"fleet": {"speed": 3}}, "speed: unknown, must be one of devices"),
    ({"budgets": {"joules": 3}}, "joules unknown, must be latency_s or energy_j"),
    ({"method": "fedsgd"}, "fedsgd"),
    ({"workers": -1}, "workers: given -1"),
]


@pytest.mark.parametrize(("given", "told"), MISTAKES)
def test_mistakes_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(AnycostError, match=told):
        cloud_run(**given)


# --- compare --------------------------------------------------------------------------------------


def test_methods_are_compared_on_equal_terms(tmp_path: Path) -> None:
    found = compare(
        model=perceptron(), task=cloud_task(), methods=("anycostfl", "stc"), rounds=2, training=KEEP
    )
    assert [name for name, _ in found] == ["anycostfl", "stc"]
    rows = found.table()
    assert [row["method"] for row in rows] == ["anycostfl", "stc"]
    offered = [
        [(d.device, d.budget_j, d.budget_s) for d in one.records[0].devices] for _, one in found
    ]
    assert offered[0] == offered[1]
    shown = unpacked(found.report(tmp_path / "page.html").read_text())
    assert [one["name"] for one in shown] == ["anycostfl", "stc"]
    with pytest.raises(TaskError, match="method has no effect"):
        compare(method="stc")


# --- notebooks ------------------------------------------------------------------------------------


def test_a_notebook_shows_a_bar_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class ZMQInteractiveShell:
        """What a notebook's kernel calls its shell."""

    bar = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(display=lambda *_, **__: bar, HTML=str)
    shell = SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    result = cloud_run()
    assert "<td>anycostfl+</td>" in result._repr_html_()
    assert [text.split("</progress> ")[1].split(",")[0] for text in shown] == [
        "round 1 of 2",
        "round 2 of 2",
    ]


# --- every method on every task -------------------------------------------------------------------


class Sequence(nn.Module):
    """The next token of a short text, by a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.head(self.rnn(self.embedding(tokens))[0]), None


class Both(nn.Module):
    """A number from an image and a table, given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 8, 3)
        self.table = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, image: Tensor, table: Tensor) -> dict[str, Tensor]:
        seen = self.image(image).relu().mean((2, 3))
        return {"logits": self.head(seen + self.table(table).relu())}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def next_token(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets.flatten())


def named_error(outputs: Any, targets: Tensor) -> Tensor:
    return F.l1_loss(outputs["logits"], targets)


WHOSE = [f"owner {i % 4}" for i in range(32)]
TOKENS = torch.arange(32 * 9).remainder(7).view(32, 9)
MASKS = (draw(32, 8, 8) > 0).long()
TINY: dict[str, tuple[Task, nn.Module]] = {
    "classes of sensor windows": (
        Task(train=(draw(32, 2, 16), torch.arange(32) % 3), owners=WHOSE),
        nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(112, 3)),
    ),
    "next tokens": (
        Task(
            train=(TOKENS[:, :-1], TOKENS[:, 1:]),
            owners=WHOSE,
            loss=next_token,
            metric=("perplexity", "accuracy"),
        ),
        Sequence(),
    ),
    "numbers from images and tables": (
        Task(
            train=({"image": draw(32, 1, 8, 8), "table": draw(32, 4)}, draw(32, 1)),
            owners=WHOSE,
            loss=named_error,
            metric="mae",
        ),
        Both(),
    ),
    "masks": (
        Task(train=(draw(32, 1, 8, 8), MASKS), owners=WHOSE, metric="iou"),
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)),
    ),
    "own metric": (
        Task(
            train=(draw(32, 5), draw(32)),
            owners=WHOSE,
            loss=lambda o, t: F.huber_loss(o[:, 0], t),
            metric=Metric.mean("gap", lambda o, t: (o[:, 0] - t).abs(), higher_is_better=False),
        ),
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
    ),
}


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("method", methods.names())
def test_every_method_runs_every_task(method: str, kind: str) -> None:
    task, module = TINY[kind]
    result = run(model=module, task=task, method=method, rounds=2, training={**KEEP, "batch": 4})
    for record in result:
        assert record.metric is not None
        assert np.isfinite(record.metric)
        assert {d.status for d in record.devices} == {"ok"}
        assert all(0 < d.bytes_up <= d.bytes_down + 100 for d in record.devices)
