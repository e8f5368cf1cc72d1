"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from anycostfl.config import Config, load_preset, preset_names, profile_names

PRESETS = f"A preset ({', '.join(preset_names())}), or a .toml file"
PROFILES = f"a profile ({', '.join(profile_names())}), or a .toml file"

Preset = Annotated[str, Argument(help=PRESETS)]
MaybePreset = Annotated[str | None, Argument(help=f"{PRESETS}; demo if not given")]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated"),
]
Plot = Annotated[Path | None, Option("--plot", help="Also draw a figure into this file")]
RunFolder = Annotated[Path | None, Option("--out", help="Run directory")]
Resume = Annotated[Path | None, Option(help="Resume this run directory")]
Workers = Annotated[int, Option(help="Processes; 0: one per core")]
Track = Annotated[
    list[str] | None,
    Option(metavar="TRACKER", help="Also log to tensorboard, mlflow or wandb; may be repeated"),
]
TotalRounds = Annotated[
    int | None, Option(min=1, help="Total rounds; default: as in the preset or run")
]


def load_config(
    preset: str,
    overrides: Sequence[str] | None,
    rounds: int | None = None,
    target: float | None = None,
) -> Config:
    """A preset with what --set, --rounds and --target say instead."""
    options = {"run.rounds": rounds, "run.target": target}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return load_preset(preset, [*(overrides or []), *given])
