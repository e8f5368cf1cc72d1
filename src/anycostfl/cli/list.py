"""`anycostfl list`: everything that has a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer

from anycostfl import methods, models
from anycostfl.cli._console import Json, emit_json, out, table
from anycostfl.config import load_preset, load_profile, preset_names, profile_names
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.registry import own_files

Kind = Annotated[str, typer.Argument(help="presets, methods, models or profiles; all if not given")]


def list(kind: Kind = "", json: Json = False) -> None:  # noqa: A001 (what users type)
    """Show what can be named: presets, methods, models and device profiles, your own included."""
    if kind not in ("", *KINDS):
        raise ConfigError([f"list: given {kind!r}, allowed {', '.join(KINDS)}"])
    asked = [kind] if kind else [*KINDS]
    found = {name: dict(KINDS[name][1]()) for name in asked}
    if json:
        emit_json(found)
        return
    for name, entries in found.items():
        out.print(table(f"{name}: {KINDS[name][0]}", ("", ""), [*entries.items()]))


def _presets() -> Iterable[tuple[str, str]]:
    return ((name, load_preset(name).summary) for name in preset_names())


def _methods() -> Iterable[tuple[str, str]]:
    names = (x for name in methods.names() for x in (name, *_variants(name)))
    return _of_files(names, lambda name: methods.load(name).summary, methods.file_of)


def _variants(name: str) -> Sequence[str]:
    try:
        return methods.variants(name)
    except AnycostError:
        return ()  # what is wrong with its file is said in its own line


def _models() -> Iterable[tuple[str, str]]:
    return _of_files(models.names(), lambda name: models.load(name).summary, models.file_of)


def _profiles() -> Iterable[tuple[str, str]]:
    return ((name, load_profile(name).name) for name in profile_names())


def _of_files(
    names: Iterable[str], summary: Callable[[str], str], file_of: Callable[[str], str]
) -> Iterable[tuple[str, str]]:
    """Each with its summary; a file that cannot be loaded hides no other."""
    own = own_files()
    for name in names:
        try:
            yield name, summary(name) + (" (your own)" if file_of(name) in own else "")
        except AnycostError as error:
            yield name, str(error)


KINDS: dict[str, tuple[str, Callable[[], Iterable[tuple[str, str]]]]] = {
    "presets": ("anycostfl run NAME", _presets),
    "methods": ("--set run.method=NAME", _methods),
    "models": ("--set model.name=NAME", _models),
    "profiles": ("""--set 'fleet.profiles=["NAME"]'""", _profiles),
}
