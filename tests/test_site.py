"""The documentation builds as a site: every link leads somewhere, every command has its page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from anycostfl.cli import build_app

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "reference/commands/index.html").read_text()
    for name in (command.name for command in build_app().registered_commands):
        assert f'id="{name}"' in reference
    api = (tmp_path / "reference/python/index.html").read_text()
    assert 'id="anycostfl.api.run"' in api
    assert "optimal_weights" in api
    pages = tmp_path.rglob("*.html")
    assert not [p for p in pages if re.search(r'(?:src|href)="https?://fonts', p.read_text())]
