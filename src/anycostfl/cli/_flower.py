"""What the commands for real devices share."""

from __future__ import annotations

import importlib.util
import logging
import os

from anycostfl.errors import MissingExtraError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def need_flower() -> None:
    """Fail clearly where Flower is not installed; keep it from phoning home where it is."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtraError("real devices need Flower: pip install 'anycostfl[flower]'")
    os.environ.update(QUIET)


def hush_flower() -> None:
    """Keep Flower's chatter out of a command's own output; warnings stay."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
