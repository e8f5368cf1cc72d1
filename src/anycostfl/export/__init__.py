"""Any width of a trained model as a file for a device: checked, measured, fitted to a limit."""

from anycostfl.export.trained import cut, least_alpha, metric_of, open_trained

__all__ = ["cut", "least_alpha", "metric_of", "open_trained"]
