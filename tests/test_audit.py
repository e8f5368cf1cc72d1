"""An audit that needs no network: exact versions of what is installed, and no dangerous calls.

Ruff's S rules (in `make lint`) refuse pickle, eval, exec, yaml.load and shells; this looks after
what they leave out: exceptions to them, torch.load, and versions.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from supply.lock import lock, read
from supply.sbom import document

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("src", "benchmarks", "drills", "fuzz", "supply")
    for path in (ROOT / folder).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


def test_everything_that_is_asked_for_has_one_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    wanted += [item for extra in project["optional-dependencies"].values() for item in extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    known = [name_of(line) for line in pins]
    assert len(known) == len(set(known))
    missing = {name_of(item) for item in wanted} - set(known) - {"anycostfl"}
    assert missing == set()


def test_what_is_locked_has_a_hash_and_the_version_that_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {name_of(name): version for name, version in pins.items()}
    locked = read((ROOT / "supply" / "requirements.lock").read_text())
    assert len(locked) > 90
    for name, (version, digest) in locked.items():
        assert re.fullmatch(r"[0-9a-f]{64}", digest), name
        assert version.partition("+")[0] == pinned[name_of(name)], name


def test_the_bill_of_materials_names_everything_that_is_installed() -> None:
    locked = read((ROOT / "supply" / "requirements.lock").read_text())
    found = document(locked)
    parts = {part["name"]: part for part in found["components"]}
    assert found["metadata"]["component"]["name"] == "anycostfl"
    assert {"torch", "numpy", "safetensors"} <= parts.keys()
    assert all(part["purl"].startswith("pkg:pypi/") for part in parts.values())
    hashed = parts["safetensors"]["hashes"][0]["content"]
    assert hashed == locked["safetensors"][1]
    assert json.dumps(found) == json.dumps(document(locked))


def test_a_package_without_a_hash_is_not_locked() -> None:
    item = {"metadata": {"name": "x", "version": "1"}, "download_info": {}}
    with pytest.raises(SystemExit, match="names no SHA-256"):
        lock([item])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"noqa:[^\n]*S(30[1-9]|31[3-9]|506|60[2459])", text)  # no exceptions
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not MODULES & {name.split(".")[0] for name in names}
        if isinstance(node, ast.Call):
            check_call(node)


def check_call(node: ast.Call) -> None:
    called = ast.unparse(node.func)
    assert called not in CALLS
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    assert given.get("shell", "False") == "False"
    assert given.get("allow_pickle", "False") == "False"
    if called == "torch.load":
        assert given.get("weights_only") == "True"
