"""docs/architecture.md against the code: the tree, what a round crosses, who may import whom."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from types import FrameType

import grimp
import networkx as nx

import anycostfl
from anycostfl.simulate import simulate
from small_runs import small_config

ROOT = Path(__file__).parent.parent
PACKAGE = Path(anycostfl.__file__).parent
BLOCKS = re.findall(r"```\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)
TREE, ROUND, LAYERS = BLOCKS
MOST_FILES = 20
DATA = {"embedded", "presets", "profiles"}


def test_the_tree_lists_every_module_once() -> None:
    lines = [line.strip() for line in TREE.splitlines()[1:] if line.strip()]
    ground = [line for line in lines if line.endswith("the ground")]
    named = [line.split()[0].rstrip("/") for line in lines if line not in ground]
    named += [name for line in ground for name in line.partition("   ")[0].split()]
    there = {p.stem for p in PACKAGE.glob("*.py")} | {
        p.name for p in PACKAGE.iterdir() if p.is_dir()
    }
    assert sorted(named) == sorted(there - DATA - {"__init__", "__pycache__"})


def test_a_simulated_round_crosses_the_files_of_the_page(tmp_path: Path) -> None:
    """The third round, so that what is cached for good is cached."""
    rounds = simulate(small_config(tmp_path, "run.method=anycostfl"))
    next(rounds), next(rounds)
    crossed: dict[str, int] = {}

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = str(path.relative_to(PACKAGE).with_suffix(""))
            crossed[name] = crossed.get(name, 0) + 1

    sys.setprofile(watch)
    try:
        next(rounds)
    finally:
        sys.setprofile(None)
        rounds.close()
    sys.stdout.write(" → ".join(crossed) + "\n")
    listed = {name for name in ROUND.split() if (PACKAGE / f"{name}.py").is_file()}
    assert set(crossed) == listed
    assert len(crossed) <= MOST_FILES


def test_the_layers_are_those_that_import_linter_enforces() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers" and c.get("exhaustive"))
    assert [line.strip() for line in LAYERS.splitlines()] == layers


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("anycostfl", exclude_type_checking_imports=True)
    edges = [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]
    circles = [c for c in nx.strongly_connected_components(nx.DiGraph(edges)) if len(c) > 1]
    assert not circles


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= 60
    ]
    assert not long
