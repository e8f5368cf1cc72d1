"""What commands print through: rich tables for people, one JSON document for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def fail(error: Exception) -> None:
    """Show an error as one message on stderr."""
    err.print(f"[bold red]error:[/] {escape(str(error))}")


def emit_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, nothing else."""
    out.file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Build a table; a column whose title starts with '>' is aligned to the right."""
    view = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for column in columns:
        side: JustifyMethod = "right" if column.startswith(">") else "left"
        view.add_column(column.removeprefix(">"), justify=side, overflow="fold")
    for row in rows:
        view.add_row(*(escape(str(cell)) for cell in row))
    return view


def note(*remarks: str) -> None:
    """Say what is worth knowing but stops nothing, on stderr."""
    for remark in remarks:
        err.print(f"[yellow]note:[/] {escape(remark)}")
