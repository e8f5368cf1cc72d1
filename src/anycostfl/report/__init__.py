"""What a run was: figures, a summary, and a page that shows it all (`report.html`)."""

from anycostfl.report.figures import draw_bars, draw_curves, draw_lines, draw_partition
from anycostfl.report.gather import gather
from anycostfl.report.live import LiveServer
from anycostfl.report.page import render, write_page
from anycostfl.report.summary import summarise

__all__ = [
    "LiveServer",
    "draw_bars",
    "draw_curves",
    "draw_lines",
    "draw_partition",
    "gather",
    "render",
    "summarise",
    "write_page",
]
