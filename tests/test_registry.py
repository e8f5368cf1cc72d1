"""Custom methods, models and tasks, beside the package's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anycostfl import methods, models, tasks
from anycostfl.errors import UnknownNameError
from anycostfl.registry import own_folders
from small_runs import small_overrides

DOCUMENT = Path(__file__).parent.parent / "docs" / "tutorials" / "own-model.md"


def write_examples(folder: Path) -> Path:
    """The files of docs/tutorials/own-model.md, where it says that they lie."""
    blocks = re.findall(r"```python\n# (mine/\S+)\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert len(blocks) == 2
    for name, text in blocks:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return folder / "mine"


def test_the_documented_model_and_method_take_part_in_a_comparison(tmp_path: Path) -> None:
    own = write_examples(tmp_path)
    changes = [*small_overrides(tmp_path), "model.name=tiny", "run.rounds=2"]
    command = ["compare", "demo", "--methods", "fedavg,half", "--workers", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "anycostfl", *command, *(f"--set={c}" for c in changes)],
        cwd=tmp_path,
        env={**os.environ, "ANYCOSTFL_PATH": str(own)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["label"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {"fedavg", "half"}


def test_several_folders_are_named_as_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYCOSTFL_PATH", os.pathsep.join(["", "a", str(tmp_path)]))
    assert own_folders("models") == [str(Path("a/models").resolve()), str(tmp_path / "models")]
    monkeypatch.delenv("ANYCOSTFL_PATH")
    assert own_folders("models") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError.*nothing_of_that_name"),
        ("def METHOD(:", "SyntaxError"),
        ("METHODS = 1", r"own_method\.py has no constant METHOD"),
        ("METHOD = 5", r"own_method\.py: METHOD and VARIANTS must be Methods"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (tmp_path / "own_method.py").write_text(text)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "anycostfl.methods.own_method", raising=False)
    with pytest.raises(UnknownNameError, match=words):
        methods.load("own_method")


def test_a_model_is_a_model_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text("MODEL = 3")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    with pytest.raises(UnknownNameError, match=r"own_model\.py: MODEL must be a ModelSpec"):
        models.load("own_model")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TASK = 3", r"own_task\.py: TASK must be a Task"),
        ("TASKS = 3", r"own_task\.py has no constant TASK"),
        ("import nothing_of_that_name", "ModuleNotFoundError.*nothing_of_that_name"),
        ("from anycostfl import Task\nTASK = Task()", "TaskError.*must have either train="),
    ],
)
def test_a_task_is_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (tmp_path / "own_task.py").write_text(text)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "anycostfl.tasks.own_task", raising=False)
    assert "own-task" in tasks.names()
    with pytest.raises(UnknownNameError, match=words):
        tasks.load("own-task")


def test_a_custom_file_cannot_take_the_name_of_a_package_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cnn.py").write_text("raise RuntimeError")
    monkeypatch.setenv("ANYCOSTFL_PATH", str(tmp_path))
    mine = tmp_path / "models" / "cnn.py"
    assert f"{mine} has the name of one of the package's models; rename it" in told_of("cnn")
    assert "'cnn', 'cnn_half'" in told_of("vgg9")


def told_of(model: str, env: dict[str, str] | None = None) -> str:
    """What a fresh process says of all models and of this one."""
    program = f"from anycostfl import models; print(models.names(), models.load({model!r}).summary)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_an_unknown_name_lists_the_folders_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCOSTFL_PATH", "elsewhere")
    with pytest.raises(
        UnknownNameError, match=r"no method 'half'; there are anycostfl, .*elsewhere"
    ):
        methods.load("half")


def install_plugin(folder: Path, points: str, files: dict[str, str]) -> dict[str, str]:
    """A distribution as pip would leave it; the environment in which Python finds it."""
    for name, text in {"plug-1.0.dist-info/entry_points.txt": points, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "plug-1.0.dist-info/METADATA").write_text("Name: plug\nVersion: 1.0\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_an_installed_distribution_adds_methods_models_tasks_and_profiles(tmp_path: Path) -> None:
    points = "".join(
        f"[anycostfl.{kind}]\n{name} = {where}\n"
        for kind, name, where in [
            ("methods", "half", "plug.half"),
            ("models", "tiny", "plug.tiny"),
            ("tasks", "two-rows", "plug.rows"),
            ("profiles", "board", "plug"),
        ]
    )
    blocks = re.findall(r"```python\n# (mine/\S+)\n(.*?)```", DOCUMENT.read_text(), re.S)
    documented = {Path(name).name: text for name, text in blocks}
    task = (
        "import torch\nfrom anycostfl import Task\nx, y = torch.rand(20, 2), torch.arange(20) % 2"
    )
    board = (Path(models.__file__).parents[1] / "profiles/jetson-nano.toml").read_text()
    env = install_plugin(
        tmp_path,
        points,
        {
            "plug/__init__.py": "",
            "plug/half.py": documented["half.py"],
            "plug/tiny.py": documented["tiny.py"],
            "plug/rows.py": f"{task}\nTASK = Task(train=(x, y))",
            "plug/board.toml": board,
        },
    )
    found = json.loads(anycostfl_list(env))
    assert "(your own)" in found["methods"]["half"]
    assert "(your own)" in found["models"]["tiny"]
    assert "two-rows" in found["tasks"]
    assert found["profiles"]["board"] == found["profiles"]["jetson-nano"]


def test_a_plugin_cannot_take_the_name_of_a_package_file(tmp_path: Path) -> None:
    points = "[anycostfl.models]\ncnn = plug\n"
    env = install_plugin(tmp_path, points, {"plug/__init__.py": "MODEL = 1"})
    told = told_of("cnn", env)
    assert "the entry point anycostfl.models: cnn = plug has the name of another" in told


def anycostfl_list(env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "anycostfl", "list", "--json"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
