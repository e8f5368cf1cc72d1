"""The command line: one file per command, found by its name (docs/decisions/0002).

A file `cli/NAME.py` with a function `NAME` is the command `anycostfl NAME`. Exit codes: 0 done,
1 a bug in this program, 2 something the user can mend (the message says how), 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import sys
from typing import Annotated

import typer

from anycostfl import __version__
from anycostfl.cli._console import fail, say
from anycostfl.errors import AnycostError


def build_app() -> typer.Typer:
    """Collect every command of this package into one application."""
    app = typer.Typer(
        name="anycostfl",
        help="Train one model across devices that differ in speed, radio and battery.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            app.command(name=info.name)(getattr(module, info.name))
    return app


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
