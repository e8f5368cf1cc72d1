"""Every command says what its arguments and options are for."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from typer.main import get_command

from anycostfl.cli import build_app

APP = get_command(build_app())
COMMANDS = sorted(APP.commands)  # type: ignore[attr-defined]  # a group has them


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_words_of_every_parameter(name: str) -> None:
    shown = CliRunner().invoke(APP, [name, "--help"], env={"COLUMNS": "200"}).output
    for parameter in APP.commands[name].params:  # type: ignore[attr-defined]  # as above
        words = getattr(parameter, "help", None)
        assert words, f"{name}: {parameter.name} has no help"
        assert words.split("\n")[0] in " ".join(shown.split()), f"{name}: {words!r} is not shown"
