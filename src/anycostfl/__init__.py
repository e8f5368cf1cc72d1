"""Train one model across devices of very different speed, radio and battery (AnycostFL)."""

from anycostfl.types import AnycostError

__all__ = ["AnycostError"]
