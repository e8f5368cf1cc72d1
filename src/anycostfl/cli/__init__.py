"""The command line: one file per command, found by its name (docs/decisions/0002).

A file `cli/NAME.py` with a function `NAME` is the command `anycostfl NAME`, imported when it is
asked for: nearly all need torch, which takes seconds. Exit codes: 0 done, 1 a bug in this program,
2 something the user can mend (the message says how), 130 Ctrl-C.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from anycostfl import __version__
from anycostfl.cli._console import fail, say
from anycostfl.errors import AnycostError


def build_app() -> typer.Typer:
    """Collect every command of this package into one application."""
    app = _new_app(
        cls=_Commands,
        help="Train one model across devices that differ in speed, radio and battery.",
        no_args_is_help=True,
    )
    app.callback()(_root)
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        app.command(file.stem, help=_words_of(file))(_root)  # stands in until it is asked for
    return app


class _Commands(TyperGroup):
    """Knows its commands by name and summary; imports the one that is asked for."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the words name, with all of its options."""
        name, known, rest = super().resolve_command(ctx, args)
        if name and known:
            module = importlib.import_module(f"{__name__}.{name}")
            alone = _new_app()
            alone.command(name, help=known.help)(getattr(module, name))
            known = typer.main.get_command(alone)
        return name, known, rest


def _new_app(**options: Any) -> typer.Typer:
    """An application as all of ours are."""
    return typer.Typer(
        name="anycostfl",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        **options,
    )


def _words_of(file: Path) -> str:
    """What a command does, read from its file and not imported; a line is a paragraph."""
    body = ast.parse(file.read_bytes()).body
    command = next(x for x in body if isinstance(x, ast.FunctionDef) and x.name == file.stem)
    paragraphs = (ast.get_docstring(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _show_version(asked: bool) -> None:
    if asked:
        say(__version__)
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version"),
    ] = False,
) -> None:
    """Keep sub-commands even while there is only one."""


def main() -> None:
    """Run the command line; user errors end with one clear message instead of a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as cleanly as for Ctrl-C
    try:
        build_app()()
    except AnycostError as error:
        fail(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:
            raise  # a file of ours: each has its own message, or should have
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where no more can go
        fail(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
