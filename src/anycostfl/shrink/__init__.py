"""Elastic model shrinking (Sec. III-B): sort channels, plan widths, cut, scatter back."""

from anycostfl.shrink.cut import Order
from anycostfl.shrink.elastic import ElasticModel, SubModel, calibration_batches, recalibrate
from anycostfl.shrink.widths import WidthPlan

__all__ = ["ElasticModel", "Order", "SubModel", "WidthPlan", "calibration_batches", "recalibrate"]
