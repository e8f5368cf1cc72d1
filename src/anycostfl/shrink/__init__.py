"""Elastic model shrinking (Sec. III-B): sort channels, plan widths, cut, scatter back."""

from anycostfl.shrink.elastic import ElasticModel, SubModel, size_bits
from anycostfl.shrink.order import Order
from anycostfl.shrink.statistics import calibration_batches, recalibrate
from anycostfl.shrink.widths import WidthPlan

__all__ = [
    "ElasticModel",
    "Order",
    "SubModel",
    "WidthPlan",
    "calibration_batches",
    "recalibrate",
    "size_bits",
]
