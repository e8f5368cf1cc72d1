"""How long does the page of a long run take to open?

Writes run directories of 1,000 rounds with 15 and with 60 of 60 devices a round (planned, not
trained: the page cannot tell), and opens each page many times in a fresh tab of headless Chromium,
from navigation to everything drawn. Medians and ranges.

    python benchmarks/report_page.py [--openings 15]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from anycostfl.report import write_page

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planned_runs import planned_run

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def opening_ms(page_file: Path, openings: int) -> list[float]:
    """Milliseconds of each opening; the first one, which starts the browser, is left out."""
    seen = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for _ in range(openings + 1):
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.goto(page_file.as_uri())
            page.wait_for_function("document.documentElement.dataset.ready", timeout=60_000)
            seen.append(float(page.evaluate("document.documentElement.dataset.ready")))
            page.close()
        browser.close()
    return seen[1:]


def main() -> None:
    """Print a line for each size of cohort."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--openings", type=int, default=15)
    openings = parser.parse_args().openings
    with tempfile.TemporaryDirectory() as name:
        for cohort in (15, 60):
            folder = Path(name, str(cohort))
            size = ("run.rounds=1000", "fleet.devices=60", f"fleet.cohort={cohort}")
            planned_run(folder, *size, "fleet.energy_min_j=0.01")
            path = folder / "page.html"
            write_page([folder], path)
            seen = opening_ms(path, openings)
            print(
                f"{cohort} of 60 devices, {path.stat().st_size / 1e3:.0f} kB: median "
                f"{statistics.median(seen) / 1e3:.2f} s, {min(seen) / 1e3:.2f} to "
                f"{max(seen) / 1e3:.2f} s over {len(seen)} openings",
                flush=True,
            )


if __name__ == "__main__":
    main()
