"""The command line: one file per command, found by its name (docs/decisions/0002).

A file `cli/NAME.py` with a function `NAME` is the command `anycostfl NAME`. It is imported when it
runs, because nearly all need torch, which takes seconds. Exit codes: 0 success, 1 a bug in this
program, 2 an error the user can fix (the message says how), 130 Ctrl-C.
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
    """The application with all commands of this package."""
    app = _new_app(
        cls=_LazyCommands,
        help="Train one model across devices that differ in speed, radio and battery.",
        no_args_is_help=True,
    )
    app.callback()(_root)
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        app.command(file.stem, help=_help_of(file))(_root)  # a placeholder, see _LazyCommands
    return app


class _LazyCommands(TyperGroup):
    """Knows names and help texts of all commands; imports only the one that runs."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command with all of its options."""
        name, known, rest = super().resolve_command(ctx, args)
        if name and known:
            module = importlib.import_module(f"{__name__}.{name}")
            alone = _new_app()
            alone.command(name, help=known.help)(getattr(module, name))
            known = typer.main.get_command(alone)
        return name, known, rest


def _new_app(**options: Any) -> typer.Typer:
    return typer.Typer(
        name="anycostfl",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        **options,
    )


def _help_of(file: Path) -> str:
    """The docstring of a command, read without importing it; one line per paragraph."""
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
    """Options of the program itself."""


def main() -> None:
    """Run the command line; user errors end with a message instead of a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as clean as Ctrl-C
    try:
        build_app()()
    except AnycostError as error:
        fail(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:
            raise  # a file of this package: errors about files have their own messages
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # stdout cannot be written
        fail(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
