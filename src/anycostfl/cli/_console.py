"""Output of commands: rich tables for people, one JSON document for programs.

Nothing printed is parsed as markup, and control characters are replaced: paths, names and what a
stranger's run directory says may contain any character.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text
from typer import Option

from anycostfl.errors import printable

out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Print a line on stdout without wrapping, so that commands and paths can be copied."""
    out.print(printable(text), soft_wrap=True)


SCALES = {
    "s": {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    "J": {"µJ": 1e-6, "mJ": 1e-3, "J": 1.0, "kJ": 1e3, "MJ": 1e6},
    "B": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
}


def amount(value: float, unit: str) -> str:
    """Seconds, joules or bytes with three digits in the unit that fits: 34.9 s, 278 mJ, 2.24 GB."""
    scales = SCALES[unit]
    # 0.9995 of a unit would be shown as 1,000 of the one below.
    fits = [name for name, scale in scales.items() if abs(value) >= 0.9995 * scale]
    name = fits[-1] if fits else next(iter(scales)) if value else unit
    scaled = value / scales[name]
    return f"{scaled:,.0f} {name}" if abs(scaled) >= 99.95 else f"{scaled:.3g} {name}"


def fail(error: Exception) -> None:
    """Print an error on stderr."""
    text = printable(f" {error}")
    err.print(Text.assemble(("error:", "bold red"), text), soft_wrap=True)


def note(*remarks: str) -> None:
    """Print notices on stderr."""
    for remark in remarks:
        text = printable(f" {remark}")
        err.print(Text.assemble(("note:", "yellow"), text), soft_wrap=True)


Json = Annotated[bool, Option("--json", help="One JSON document on stdout, nothing else")]


def emit_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, nothing else; numbers that JSON lacks become null."""
    out.file.write(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns whose title starts with '>' are right-aligned.

    Where space is short, numbers are folded before the names in the first column.
    """
    title, columns = printable(title), [printable(column) for column in columns]
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    view = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.min_width = min(len(title), out.width)  # else rich folds it
    view.show_header = any(column.removeprefix(">") for column in columns)
    short = all(len(row[0]) <= 20 for row in cells)  # longer names are folded too
    for number, column in enumerate(columns):
        side: JustifyMethod = "right" if column.startswith(">") else "left"
        whole = short and number == 0
        view.add_column(column.removeprefix(">"), justify=side, overflow="fold", no_wrap=whole)
    for row in cells:
        view.add_row(*row)
    out.print(view)
