"""One self-contained HTML file: template, style, scripts, chart library and data in one.

Nothing of a run directory reaches the HTML as text. Its data is deflated and written in base64,
the scripts put it on the page as text nodes only, and a Content-Security-Policy lets no script run
but the ones whose hashes it names (docs/decisions/0030).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from anycostfl.files import StorageError, atomic_write
from anycostfl.records.run import PAGE
from anycostfl.report.gather import Document, gather

SCRIPTS = ("dom.js", "runs.js", "charts.js", "heatmap.js", "sections.js", "start.js")


def write_page(folders: Sequence[Path], path: Path | None = None) -> list[Document]:
    """Write the page of some runs, into the directory of the only one unless told where."""
    runs = gather_all(folders)
    target = path or folders[0] / PAGE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, render(runs).encode())
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error}; the run itself is intact. Free some space or choose "
            "another place"
        ) from error
    return runs


def gather_all(folders: Sequence[Path], *, growing: bool = False) -> list[Document]:
    """All runs; those of the same name are told apart by their paths."""
    runs = [gather(folder, growing=growing) for folder in folders]
    names = Counter(run["name"] for run in runs)
    for run, folder in zip(runs, folders, strict=True):
        if names[run["name"]] > 1:
            run["name"] = str(folder)
    return runs


def render(runs: Sequence[Document], *, live: bool = False) -> str:
    """The page; a live one asks its own server for news, the other asks nobody for anything."""
    library, script = _asset("uplot/uPlot.iife.min.js"), _scripts()
    return Template(_asset("page.html")).substitute(
        policy=policy(live=live),
        live="live" if live else "still",
        styles=_asset("uplot/uPlot.min.css") + "\n" + _asset("page.css"),
        library=library,
        script=script,
        data=pack(runs),
    )


def policy(*, live: bool) -> str:
    """The Content-Security-Policy: these two scripts, and no request but a live page's own."""
    hashes = " ".join(_hash(text) for text in (_asset("uplot/uPlot.iife.min.js"), _scripts()))
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def pack(runs: Sequence[Document]) -> str:
    """The data as base64 of deflated JSON: no character of it means anything to HTML."""
    content = json.dumps(list(runs), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return base64.b64encode(zlib.compress(content.encode("utf-8", "replace"))).decode()


@functools.cache
def _asset(name: str) -> str:
    return resources.files("anycostfl.report").joinpath("assets", name).read_text("utf-8")


@functools.cache
def _scripts() -> str:
    """Our scripts as one, in a scope of its own."""
    parts = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();\n'


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
