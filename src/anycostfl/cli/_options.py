"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from anycostfl.config import preset_names, profile_names

PRESETS = f"A preset ({', '.join(preset_names())}), or a .toml file"
PROFILES = f"a profile ({', '.join(profile_names())}), or a .toml file"

Preset = Annotated[str, typer.Argument(help=PRESETS)]
MaybePreset = Annotated[str | None, typer.Argument(help=f"{PRESETS}; demo if none is given")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the preset; once for each key"),
]
