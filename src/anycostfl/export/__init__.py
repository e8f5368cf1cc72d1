"""Any width of a trained model as a file for a device: checked, measured, fitted to a limit."""

from anycostfl.export.trained import accuracy_of, cut, least_alpha, open_trained

__all__ = ["accuracy_of", "cut", "least_alpha", "open_trained"]
