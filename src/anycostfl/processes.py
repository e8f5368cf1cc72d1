"""Processes that this package starts: what they may load, where their output goes, when they end.

A child of ours imports nothing from the working directory, reports nothing to anybody, installs
nothing, and ends with the process that started it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO

from anycostfl.errors import MissingExtraError
from anycostfl.files import open_nofollow

POLL_S = 0.5  # between two looks at the parent
PARENT = "ANYCOSTFL_PARENT"  # environment variable: the process id of the parent
LOG_BYTES = 10_000_000  # of a log, and of the older part that is kept beside it
LINE_BYTES = 1000  # of a line: what a stranger sends may end up in one
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")  # Flower colours its log on any output

SAFE = {
    "PYTHONSAFEPATH": "1",  # Flower's own programs are started without `python -P`
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",  # ports that no filter stands in front of
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}


def safe_environment(home: Path) -> dict[str, str]:
    """For a child that runs Flower, whose apps are installed into (and loaded from) `home`.

    Flower finds its own programs whether or not the virtual environment is activated.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"FLWR_HOME": str(home.resolve()), "PATH": path, PARENT: str(os.getpid())}
    return {**os.environ, **SAFE, **own}


def program(name: str) -> str:
    """The path of one of Flower's documented programs."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise MissingExtraError(f"there is no program {name}: pip install 'anycostfl[flower]'")
    return found


def end_with_parent(end: Callable[[], None], parent: int) -> None:
    """Call `end` when the parent is gone, at once if it is already.

    An orphan has another parent, even while the dead one is a zombie that still has its number.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        end()

    threading.Thread(target=watch, daemon=True).start()


def follow_output(output: IO[bytes], path: Path) -> threading.Thread:
    """Copy the output of a process to a log, in a thread, so that strangers cannot fill the disk.

    Lines are truncated and stripped of control characters. At 10 MB, the log is moved to `.1`.
    The thread ends when every process that has the output open has ended.
    """
    file = open(path, "ab+", buffering=0, opener=open_nofollow)  # noqa: SIM115 - the thread closes it
    thread = threading.Thread(target=_copy_lines, args=(output, file, path), daemon=True)
    thread.start()
    return thread


def _copy_lines(output: IO[bytes], file: FileIO, path: Path) -> None:
    is_rest = False  # of a line that was truncated
    with output, file:
        while line := output.readline(LINE_BYTES):
            if not is_rest:
                with suppress(OSError):  # a full disk; the process must not block on its output
                    file.write(_clean(line))
                    _rotate(file, path)
            is_rest = not line.endswith(b"\n")


def _clean(line: bytes) -> bytes:
    text = COLOUR.sub(b"", line).decode(errors="replace").rstrip("\n")
    return "".join(c if c.isprintable() else "\ufffd" for c in text).encode() + b"\n"


def _rotate(file: FileIO, path: Path) -> None:
    if file.tell() > LOG_BYTES:
        file.seek(-LOG_BYTES, os.SEEK_END)
        with open(path.with_name(path.name + ".1"), "wb", opener=open_nofollow) as older:
            shutil.copyfileobj(file, older)
        file.truncate(0)  # not renamed: the server app appends to the same file
