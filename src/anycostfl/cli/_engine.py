"""Who plays the rounds: our simulator, or Flower's."""

from __future__ import annotations

import importlib.util
import logging
from typing import Protocol

from anycostfl.cli._flower import need_flower
from anycostfl.config import Config
from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.runs import Snapshot, Turns
from anycostfl.simulate import play


class Engine(Protocol):
    """Plays the rounds of an experiment."""

    def __call__(self, config: Config, *, workers: int = 1, start: Snapshot | None = None) -> Turns:
        """Round after round, from the beginning or from where a run stopped."""


def find_engine(name: str) -> Engine:
    """The simulator, or the same rounds on Flower's engine."""
    if name == "own":
        return play
    if name != "flower":
        raise ConfigError([f"--engine: given {name!r}, allowed own, flower"])
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "--engine flower needs Flower and Ray: pip install 'anycostfl[cluster]'"
        )
    need_flower()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    from anycostfl.flower import engine  # noqa: PLC0415 - optional

    return engine.play
