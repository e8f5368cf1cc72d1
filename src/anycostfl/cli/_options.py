"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anycostfl.config import preset_names, profile_names
from anycostfl.errors import ConfigError

PRESETS = f"A preset ({', '.join(preset_names())}), or a .toml file"
PROFILES = f"a profile ({', '.join(profile_names())}), or a .toml file"

Preset = Annotated[str, typer.Argument(help=PRESETS)]
MaybePreset = Annotated[str | None, typer.Argument(help=f"{PRESETS}; demo if not given")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated"),
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also draw a figure into this file")]


def parse_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT as an option gives it; an IPv6 host may be in brackets."""
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError([f"{option}: given {text!r}, must be HOST:PORT"])
    return host.strip("[]"), int(port)
