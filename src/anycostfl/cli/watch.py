"""`anycostfl watch`: the page of a run while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anycostfl.cli._console import say
from anycostfl.report import LiveServer


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run directories")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0 is any free one")] = 8008,
) -> None:
    """Serve the page of runs that go on, on this machine only, until Ctrl-C."""
    try:
        with LiveServer(runs, port) as server:
            say(f"Watch at {server.address}  (Ctrl-C stops)")
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        say("No longer watching; the run itself is not touched.")
