"""The tutorials are executed as they stand: Python in one namespace, files, commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = sorted((Path(__file__).parents[1] / "docs/tutorials").glob("*.md"))
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"^# (\S+\.(?:py|toml))\n")
WAIT_S = 240


def start(command: str, log: Path) -> subprocess.Popen[bytes]:
    """Run a command as a reader's shell would."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S602 - commands of our own documents
            command, shell=True, env={**os.environ, "PATH": path}, stdout=output, stderr=output
        )


def run_commands(block: str, log: Path) -> None:
    """Lines after `$` one after the other; servers and devices side by side."""
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    for who, command in re.findall(r"^(\w*)\$ (.+)$", block, re.M):
        process = start(f"exec {command}" if "=" not in command.split()[0] else command, log)
        if who:
            running.append((who, process))
        else:
            assert process.wait(WAIT_S) == 0, log.read_text()[-3000:]
    try:
        for who, process in running:
            if who == "server":
                assert process.wait(WAIT_S) == 0, log.read_text()[-3000:]
    finally:
        for _, process in running:
            process.terminate()
            process.wait(WAIT_S)


def blocks_of(document: Path) -> Iterator[tuple[str, str]]:
    return ((kind, text) for kind, text in BLOCK.findall(document.read_text()))


@pytest.mark.parametrize("document", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_works_as_it_stands(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    done = 0
    for kind, text in blocks_of(document):
        if named := FILE.match(text):
            path = tmp_path / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif kind == "python":
            exec(text, names)  # noqa: S102
        elif kind == "console":
            run_commands(text, tmp_path / "log.txt")
        done += 1
    assert done >= 5


def test_there_are_tutorials() -> None:
    needed = {"first-run", "own-data", "own-model", "own-device", "ship-a-model"}
    assert {path.stem for path in TUTORIALS} >= needed
    assert len(NOTEBOOKS) == 3


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_cell_by_cell(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # committed without output
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102
