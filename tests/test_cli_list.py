"""`anycostfl list` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from anycostfl import methods, models, tasks
from anycostfl.config import preset_names, profile_names
from command_line import PROGRAM, Call
from test_registry import write_examples


def test_everything_that_has_a_name_is_listed_with_what_it_is(call: Call) -> None:
    _, shown, _ = call("list", "--json")
    found = json.loads(shown)
    assert [*found] == ["presets", "methods", "models", "tasks", "profiles"]
    assert [*found["presets"]] == preset_names()
    assert [*found["profiles"]] == profile_names()
    named = [x for name in methods.names() for x in (name, *methods.variants(name))]
    assert found["methods"] == {name: methods.load(name).summary for name in named}
    assert found["models"] == {name: models.load(name).summary for name in models.names()}
    assert found["tasks"] == {name: tasks.load(name).summary for name in tasks.names()}
    assert all(words for entries in found.values() for words in entries.values())


def test_one_kind_alone_for_people(call: Call) -> None:
    code, shown, _ = call("list", "profiles")
    assert code == 0
    assert 'fleet.profiles=["NAME"]' in shown
    assert "raspberry-pi-5" in shown
    assert "fedavg" not in shown


def test_an_unknown_kind_is_named(call: Call) -> None:
    code, _, told = call("list", "methodz")
    assert code == 2
    assert "'methodz'" in told
    assert "'profiles'" in told


def test_ones_own_are_marked_and_a_broken_file_hides_no_other(tmp_path: Path) -> None:
    own = write_examples(tmp_path)
    (own / "methods" / "broken.py").write_text("import nothing_of_that_name")
    done = subprocess.run(
        [PROGRAM, "list", "--json"],
        env={**os.environ, "ANYCOSTFL_PATH": str(own)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["models"]["tiny"] == "two convolutions, 28×28 grey (your own)"
    assert found["methods"]["half"].endswith(" (your own)")
    assert "cannot be loaded: ModuleNotFoundError" in found["methods"]["broken"]
    assert "your own" not in found["methods"]["fedavg"]
