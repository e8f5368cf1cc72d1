"""What mkdocs cannot do alone: the page of all commands, links to files outside docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files
from typer.main import get_command

from anycostfl.cli import build_app

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show a path instead of a link that leaves docs/; a missing file is still an error."""

    def shown(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        path = Path(os.path.normpath(ROOT / "docs" / Path(page.file.src_uri).parent / target))
        if "://" in target or not target or path.is_relative_to(ROOT / "docs"):
            inside = path.is_dir() and not (path / "README.md").is_file() and target
            return f"{text} (`{path.relative_to(ROOT)}`)" if inside else match[0]
        if not path.exists():
            return match[0]
        return f"{text} (`{path.relative_to(ROOT)}`)"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", shown, markdown)


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    app = get_command(build_app())
    assert isinstance(app, click.Group)
    parts = ["# Commands\n`anycostfl COMMAND --help` says the same.\n"]
    for name in sorted(app.commands):
        _, command, _ = app.resolve_command(click.Context(app), [name])
        assert command is not None
        usage = " ".join(
            p.make_metavar(click.Context(command))
            for p in command.params
            if isinstance(p, click.Argument)
        )
        parts.append(
            f"\n## {name}\n```console\n$ anycostfl {name} {usage} …\n```\n{command.help}\n"
        )
        parts.append("\n| | |\n|---|---|")
        parts += [row(p) for p in command.params if not getattr(p, "hidden", False)]
    return "\n".join(parts) + "\n"


def row(parameter: click.Parameter) -> str:
    """One line of a table."""
    is_option = isinstance(parameter, click.Option)
    name = ", ".join(parameter.opts) if is_option else str(parameter.human_readable_name)
    default = parameter.default
    shown = f" Default: `{default}`." if is_option and default not in (None, False, "", []) else ""
    help_ = str(getattr(parameter, "help", "") or "").replace("|", "\\|").rstrip(".")
    return f"| `{name}` | {help_}.{shown} |"
