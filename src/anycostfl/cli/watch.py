"""`anycostfl watch`: the page of a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from anycostfl.cli._console import say
from anycostfl.report.live import LiveServer


def watch(
    runs: Annotated[list[Path], Argument(help="Run directories")],
    port: Annotated[int, Option(help="Port on this machine; 0: any free one")] = 8008,
) -> None:
    """Serve the page of runs in progress, on this machine only, until Ctrl-C."""
    try:
        with LiveServer(runs, port) as server:
            say(f"Watch at {server.address}  (Ctrl-C stops)")
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        say("Stopped watching; the run itself is not affected.")
