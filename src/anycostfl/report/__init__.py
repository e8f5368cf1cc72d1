"""Results of runs: figures, a summary, and a page with everything (`report.html`)."""

from anycostfl.records.round import summarise
from anycostfl.report.figures import draw_bars, draw_curves, draw_lines
from anycostfl.report.page import write_page

__all__ = ["draw_bars", "draw_curves", "draw_lines", "summarise", "write_page"]
