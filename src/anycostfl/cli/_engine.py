"""Which engine simulates the devices: ours, or Flower's."""

from __future__ import annotations

import importlib.util
import logging
from typing import Protocol

from anycostfl.cli._flower import need_flower
from anycostfl.config import Config
from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.loop import Rounds
from anycostfl.records.run import SavedRun
from anycostfl.simulate import simulate


class Engine(Protocol):
    """Simulates an experiment."""

    def __call__(
        self, config: Config, *, workers: int = 1, start: SavedRun | None = None
    ) -> Rounds:
        """Its rounds, from the beginning or from where a run stopped."""


def find_engine(name: str) -> Engine:
    """The simulator, or the same rounds on Flower's engine."""
    if name == "own":
        return simulate
    if name != "flower":
        raise ConfigError([f"--engine: given {name!r}, must be own or flower"])
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "--engine flower needs Flower and Ray: pip install 'anycostfl[cluster]'"
        )
    need_flower()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    from anycostfl.contrib import ray  # noqa: PLC0415 - optional

    return ray.simulate
