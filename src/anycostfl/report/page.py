"""One self-contained HTML file: template, style, scripts, chart library and data.

No text of a run directory reaches the HTML. The data is deflated and base64-encoded, scripts
insert it as text nodes only, and a Content-Security-Policy allows only the scripts whose hashes
it names (docs/decisions/0030).
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

from anycostfl.files import atomic_write, writing_to
from anycostfl.records.run import PAGE
from anycostfl.report.gather import Document, gather

LIBRARY = "uplot/uPlot.iife.min.js"
SCRIPTS = ("dom.js", "runs.js", "charts.js", "heatmap.js", "sections.js", "start.js")


def write_page(folders: Sequence[Path], path: Path | None = None) -> list[Document]:
    """Write the page of some runs; by default into the directory of the first."""
    runs = gather_all(folders)
    target = path or folders[0] / PAGE
    with writing_to(target, "Free some space or choose another --out", intact="the run is intact"):
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, render(runs).encode())
    return runs


def gather_all(folders: Sequence[Path], *, growing: bool = False) -> list[Document]:
    """All runs; runs with the same name are shown by their paths."""
    runs = [gather(folder, growing=growing) for folder in folders]
    names = Counter(run["name"] for run in runs)
    for run, folder in zip(runs, folders, strict=True):
        if names[run["name"]] > 1:
            run["name"] = str(folder)
    return runs


def render(runs: Sequence[Document], *, live: bool = False) -> str:
    """The page; a live one polls its own server, the other makes no requests."""
    return Template(_asset("page.html")).substitute(
        policy=policy(live=live),
        live="live" if live else "still",
        styles=_asset("uplot/uPlot.min.css") + "\n" + _asset("page.css"),
        library=_asset(LIBRARY),
        script=_scripts(),
        data=pack(runs),
    )


def policy(*, live: bool) -> str:
    """The Content-Security-Policy: only these two scripts, and requests only from a live page."""
    digests = (hashlib.sha256(text.encode()).digest() for text in (_asset(LIBRARY), _scripts()))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def pack(runs: Sequence[Document]) -> str:
    """The data as base64 of deflated JSON, which has no character special to HTML."""
    content = json.dumps(list(runs), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return base64.b64encode(zlib.compress(content.encode("utf-8", "replace"))).decode()


@functools.cache
def _asset(name: str) -> str:
    return resources.files("anycostfl.report").joinpath("assets", name).read_text("utf-8")


@functools.cache
def _scripts() -> str:
    """Our scripts as one, in their own scope."""
    parts = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();\n'
