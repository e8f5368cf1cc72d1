"""`anycostfl report`: one page about a run, or about several side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from anycostfl.cli._console import Json, emit_json, note, print_table, say
from anycostfl.cli._rounds import MISHAPS, counted
from anycostfl.metrics import MetricInfo
from anycostfl.records.run import PAGE
from anycostfl.report import write_page

SHOWN = {
    "method": ("method", ""),
    "rounds": ("rounds", ""),
    "final": ("metric", ""),
    "epsilon": ("privacy ε", ".4g"),
    "simulated_minutes": ("simulated minutes", ".4g"),
    "energy_kj": ("energy, kJ", ".4g"),
    "uploaded_mb": ("uploaded, MB", ".4g"),
    "mean_alpha": ("mean α", ".3f"),
    **{key: (title, "") for key, title in MISHAPS.items()},
}


def report(
    runs: Annotated[list[Path], Argument(help="Run directories")],
    out_file: Annotated[
        Path | None, Option("--out", help="Default: RUN/report.html, or comparison.html")
    ] = None,
    json: Json = False,
) -> None:
    """Write a page about one run, or one that compares several; it opens without a network."""
    path = out_file or (runs[0] / PAGE if len(runs) == 1 else Path("comparison.html"))
    found = write_page(runs, path)
    if json:
        shown = [{"name": r["name"], **r["summary"], "remarks": r["remarks"]} for r in found]
        emit_json({"page": str(path), "runs": shown})
        return
    note(*(f"{run['name']}: {remark}" for run in found for remark in run["remarks"]))
    rows = [
        [title, *(_cell(run, key, digits) for run in found)]
        for key, (title, digits) in SHOWN.items()
        if key not in MISHAPS or any(run["summary"][key] for run in found)
    ]
    print_table("", ("", *(f">{run['name']}" for run in found)), rows)
    say(f"Open {path}")


def _cell(run: Mapping[str, Any], key: str, digits: str) -> str:
    value = run["summary"][key]
    if key == "final":
        return f"{run['metric']['name']} {MetricInfo(**run['metric']).show(value)}"
    if value is None or value == {}:
        return "–"
    return format(value, digits) if isinstance(value, float) else counted(value)
