"""Output of commands: rich tables for people, one JSON document for programs.

Nothing printed is parsed as markup: paths and names may contain any character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text
from typer import Option

out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Print a line on stdout without wrapping, so that commands and paths can be copied."""
    out.print(text, soft_wrap=True)


def fail(error: Exception) -> None:
    """Print an error on stderr."""
    err.print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)


def note(*remarks: str) -> None:
    """Print notices on stderr."""
    for remark in remarks:
        err.print(Text.assemble(("note:", "yellow"), f" {remark}"), soft_wrap=True)


Json = Annotated[bool, Option("--json", help="One JSON document on stdout, nothing else")]


def emit_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, nothing else."""
    out.file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns whose title starts with '>' are right-aligned.

    Where space is short, numbers are folded before the names in the first column.
    """
    view = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.min_width = min(len(title), out.width)  # else rich folds it
    view.show_header = any(column.removeprefix(">") for column in columns)
    short = all(len(str(row[0])) <= 20 for row in rows)  # longer names are folded too
    for number, column in enumerate(columns):
        side: JustifyMethod = "right" if column.startswith(">") else "left"
        whole = short and number == 0
        view.add_column(column.removeprefix(">"), justify=side, overflow="fold", no_wrap=whole)
    for row in rows:
        view.add_row(*map(str, row))
    out.print(view)
