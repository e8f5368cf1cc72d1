"""`anycostfl list`: everything that has a name."""

from __future__ import annotations

from typing import Annotated, Any

import click
from typer import Argument

from anycostfl import methods, models, tasks
from anycostfl.cli._console import Json, emit_json, print_table
from anycostfl.config import load_preset, load_profile, preset_names, profile_names
from anycostfl.errors import AnycostError
from anycostfl.registry import own_files

USAGE = {
    "presets": "anycostfl run NAME",
    "methods": "--set run.method=NAME",
    "models": "--set model.name=NAME",
    "tasks": "--set data.name=NAME",
    "profiles": """--set 'fleet.profiles=["NAME"]'""",
}
KINDS = click.Choice([*USAGE])


def list(  # noqa: A001 (what users type)
    kind: Annotated[str | None, Argument(click_type=KINDS, help="Default: all")] = None,
    json: Json = False,
) -> None:
    """List presets, methods, models, tasks and device profiles, including your own."""
    found = {name: _summaries(name) for name in ([kind] if kind else USAGE)}
    if json:
        emit_json(found)
        return
    for name, entries in found.items():
        print_table(f"{name}: {USAGE[name]}", ("", ""), [*entries.items()])


def _summaries(kind: str) -> dict[str, str]:
    """What each name is; a file that cannot be loaded hides no other."""
    if kind == "presets":
        return {name: load_preset(name).summary for name in preset_names()}
    if kind == "profiles":
        return {name: load_profile(name).name for name in profile_names()}
    registry: Any = {"methods": methods, "models": models, "tasks": tasks}[kind]
    own = own_files()
    found: dict[str, str] = {}
    for name in registry.names():
        mark = " (your own)" if registry.file_of(name) in own else ""
        try:
            variants = methods.variants(name) if registry is methods else []
            found |= {x: registry.load(x).summary + mark for x in (name, *variants)}
        except AnycostError as error:
            found[name] = str(error)
    return found
