"""What the commands for real devices share."""

from __future__ import annotations

import importlib.util
import logging
import os

from anycostfl.errors import MissingExtraError


def need_flower() -> None:
    """Fail clearly where Flower is not installed; keep it from phoning home where it is."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtraError("real devices need Flower: pip install 'anycostfl[flower]'")
    os.environ.update({"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"})


def hush_flower(level: int = logging.WARNING) -> None:
    """Keep Flower's chatter out of a command's own output; warnings stay."""
    for name in ("flwr", "httpx"):
        logging.getLogger(name).setLevel(level)
