"""Registers devices and starts the run: with Flower's client, or with its `flwr` program.

The program is what Flower documents. It is the fallback, as each call takes a process of seconds.
"""

from __future__ import annotations

import json
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from flwr.app import UserConfig

from anycostfl.errors import AnycostError
from anycostfl.files import atomic_write
from anycostfl.flower._internal import ControlClient, KeyRefusedError, available
from anycostfl.processes import program, safe_environment

CONNECTION = "anycostfl"  # the name of the SuperLink in Flower's configuration
CALL_S = 120.0


class Control(Protocol):
    """The Control interface of a SuperLink."""

    def register(self, name: str, path: Path) -> int:
        """Let in the device with this public key; its node id."""
        ...

    def unregister(self, node_id: int) -> None:
        """Put a device out."""
        ...

    def start_run(self, config: UserConfig) -> int:
        """Start the server app; Flower's number of the run."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def open_control(address: str, trust: Path | None, home: Path) -> Control:
    """The Control interface at an address; `home` is Flower's folder."""
    if available("control", "the `flwr` program registers devices and starts the run, slowly"):
        return ControlClient(address, trust.read_bytes() if trust else None)
    return FlwrProgram(address, trust, home)


class FlwrProgram:
    """Flower's documented command line."""

    def __init__(self, address: str, trust: Path | None, home: Path) -> None:
        self._home = home
        how = (
            "insecure = true"
            if trust is None
            else f"root-certificates = {_quoted(trust.resolve())}"
        )
        text = f"[superlink.{CONNECTION}]\naddress = {_quoted(address)}\n{how}\n"
        atomic_write(home / "config.toml", text.encode())

    def register(self, name: str, path: Path) -> int:
        """Let in the device with this public key; its node id."""
        try:
            told = self._call("supernode", "register", str(path), CONNECTION, "--name", name)
        except AnycostError as error:
            raise KeyRefusedError(str(error)) from error
        return int(told["node-id"])

    def unregister(self, node_id: int) -> None:
        """Put a device out."""
        self._call("supernode", "unregister", str(node_id), CONNECTION)

    def start_run(self, config: UserConfig) -> int:
        """Start the server app; Flower's number of the run."""
        table = "".join(f"{key} = {_quoted(value)}\n" for key, value in config.items())
        atomic_write(self._home / "run.toml", table.encode())
        with resources.as_file(resources.files("anycostfl.flower").joinpath("app")) as app:
            told = self._call(
                "run", str(app), CONNECTION, "--run-config", str(self._home / "run.toml")
            )
        return int(told["run-id"])

    def close(self) -> None:
        """There is no connection."""

    def _call(self, *arguments: str) -> dict[str, Any]:
        what = f"`flwr {' '.join(arguments[:2])}`"
        try:
            done = subprocess.run(  # noqa: S603 - Flower's program
                [program("flwr"), *arguments, "--format", "json"],
                env=safe_environment(self._home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AnycostError(f"{what} did not end within {CALL_S:g} s") from error
        try:
            told = dict(json.loads(done.stdout))
        except ValueError:
            told = {}
        if done.returncode or not told.get("success"):
            why = told.get("error-message") or done.stderr.decode(errors="replace")[-500:]
            raise AnycostError(f"{what} failed: {why}")
        return told


def _quoted(value: object) -> str:
    """A value as TOML writes it, which for these types is as JSON does."""
    return json.dumps(str(value) if isinstance(value, Path) else value)
