"""Every command says what its arguments and options are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import click
import pytest
from click.testing import CliRunner
from typer.main import get_command

from anycostfl import __version__
from anycostfl.cli import build_app
from anycostfl.cli._console import amount, out, print_table

APP = cast(click.Group, get_command(build_app()))
COMMANDS = sorted(APP.commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_words_of_every_parameter(name: str) -> None:
    shown = CliRunner().invoke(APP, [name, "--help"], env={"COLUMNS": "300"}).output
    _, command, _ = APP.resolve_command(click.Context(APP), [name])
    assert command is not None
    assert command.help == APP.commands[name].help  # what the list of commands says
    for parameter in (p for p in command.params if not getattr(p, "hidden", False)):
        words = getattr(parameter, "help", None)
        assert words, f"{name}: {parameter.name} has no help"
        assert words.split("\n")[0] in " ".join(shown.split()), f"{name}: {words!r} is not shown"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "simulated fleet"),
        (["--help"], "simulated fleet"),
        (["--version"], __version__),
        (["rnu"], "Did you mean 'run'?"),
        (["keys"], "ca.crt"),
    ],
)
def test_what_needs_no_torch_does_not_wait_for_it(
    words: list[str], told: str, tmp_path: Path
) -> None:
    program = (
        "import sys; from anycostfl.cli import main\n"
        "try: main()\n"
        "finally: sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0, "J", "0 J"),
        (2.5e-9, "J", "0.0025 µJ"),
        (0.0347, "J", "34.7 mJ"),
        (0.99949, "s", "999 ms"),
        (0.9996, "s", "1 s"),
        (59.0, "s", "59 s"),
        (5400.0, "s", "1.5 h"),
        (7e5, "s", "194 h"),
        (999.6, "B", "1 kB"),
        (2_239_400_000.0, "B", "2.24 GB"),
        (-1500.0, "J", "-1.5 kJ"),
        (3.6e10, "J", "36,000 MJ"),
    ],
)
def test_an_amount_has_the_unit_that_fits(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown


def test_a_title_is_one_line_and_columns_without_names_have_no_head() -> None:
    title = "who holds how much of what: least, mean, most"
    with out.capture() as shown:
        print_table(title, ("what", ">how much"), [("a", 1)])
        print_table("", ("", ">"), [("a", 1)])
    lines = shown.get().splitlines()
    assert lines[0].rstrip() == title
    assert sum("─" in line for line in lines) == 1
