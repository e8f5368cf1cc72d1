"""The page in a real browser: drawn, live, compared, readable, quick, and harmless.

Needs Playwright (extra `dev`) and a Chromium on the machine; without them these tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from anycostfl.records.run import CONFIG, ENVIRONMENT, JOURNAL, WIDTHS, read_journal
from anycostfl.report import write_page
from anycostfl.report.live import LiveServer
from command_line import PROGRAM, sets
from planned_runs import planned_run

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install 'anycostfl[dev]'"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
DESKTOP, PHONE = (1200, 900), (360, 740)
TIGHT = ("fleet.energy_min_j=0.001", "fleet.energy_max_j=0.1")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def opened(
    browser: Any, address: str, size: tuple[int, int] = DESKTOP, scheme: str = "light"
) -> Iterator[Any]:
    """The page once it is ready; every complaint and every request elsewhere is a failure."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda r: None if r.url.startswith((address, "data:")) else complaints.append(r.url),
    )
    page.goto(address)
    page.wait_for_function("document.documentElement.dataset.ready", timeout=60_000)
    yield page
    context.close()
    assert complaints == []


def written(folder: Path, *more: Path) -> str:
    """The address of the page of some runs."""
    path = folder / "page.html"
    write_page([folder, *more], path)
    return path.as_uri()


def shades(page: Any) -> list[int]:
    """How many different colours each canvas of the page shows."""
    counts: list[int] = page.evaluate(
        """[...document.querySelectorAll("section:not([hidden]) canvas")].map((canvas) => {
            const pen = canvas.getContext("2d");
            const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        })"""
    )
    return counts


def open_tables(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_function(
        "[...document.querySelectorAll('section:not([hidden]) details')]"
        ".every((d) => d.querySelector('table'))"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_can_be_read_as_a_table(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    config = planned_run(tmp_path / "run", "run.rounds=30", *TIGHT)
    rows = [{"alpha": a, "accuracy": 0.5 + a / 3, "parameters": 1000 * a} for a in (0.25, 0.5, 1.0)]
    (tmp_path / "run" / WIDTHS).write_text(json.dumps(rows))
    with opened(browser, written(tmp_path / "run"), scheme=scheme) as page:
        drawn = shades(page)
        assert len(drawn) == 10  # accuracy, map, α, β, f, two budgets, two energies, widths
        assert min(drawn) > 5
        assert page.inner_text("h1") == config.summary
        assert "30 of 30 rounds" in page.inner_text("#state")
        open_tables(page)
        assert page.locator("details[open] table").count() == 10
        assert page.locator("#metric details tbody tr").count() == 30
        assert page.locator("#widths tbody tr").count() == 3
        assert "infeasible: " in page.inner_text("#absent")
        assert "[fleet]" in page.inner_text("#config pre")


def test_the_numbers_shown_are_those_of_the_journal(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=12", *TIGHT)
    records, _ = read_journal(tmp_path / "run")
    with opened(browser, written(tmp_path / "run")) as page:
        tiles = page.inner_text(".tiles")
        assert f"{100 * (records[-1].metric or 0):.1f} %" in tiles
        assert f"{sum(r.bytes_up for r in records) / 1e6:.3g} MB" in tiles
        page.click("#metric summary")
        cells = page.locator("#metric details tbody tr").nth(4).locator("th, td").all_inner_texts()
        assert cells[:2] == ["5", f"{100 * (records[4].metric or 0):.2f} %"]
        assert cells[3] == f"{sum(r.energy_j for r in records[:5]):.4g} J"
        reached = next(i for i, r in enumerate(records) if (r.metric or 0) >= 0.5)
        page.fill("input[type=number]", "50")
        row = page.locator("#metric .card").nth(1).locator("tbody tr").all_inner_texts()[0]
        assert row.split("\t")[1] == str(reached + 1)


def test_keys_reach_everything(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=12", *TIGHT)
    records, _ = read_journal(tmp_path / "run")
    with opened(browser, written(tmp_path / "run")) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
        page.focus("#metric input[value=round]")
        page.keyboard.press("ArrowRight")
        assert page.is_checked("#metric input[value=seconds]")
        page.focus("#metric .chart")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert f"{100 * (records[1].metric or 0):.2f} %" in page.inner_text("#metric .readout")
        page.focus("#who .heat")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        assert page.inner_text("#who .card .readout").startswith("Round 1, device 1: ")
        names = page.evaluate(
            """[...document.querySelectorAll("main [tabindex='0'], input, select, button")]
                .map((e) => e.ariaLabel ?? (e.closest("label") ?? e).textContent)"""
        )
        assert all(name.strip() for name in names)
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))


def test_the_map_names_what_it_points_at(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=12", *TIGHT)
    records, _ = read_journal(tmp_path / "run")
    rows = sorted({d.device for r in records for d in r.devices})
    seen = {d.device: d for d in records[3].devices}
    with opened(browser, written(tmp_path / "run")) as page:
        page.click("#who label:has-text('What bound')")
        page.focus("#who .heat")
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        for row, device in enumerate(rows):
            text = page.inner_text("#who .card .readout")
            assert text.startswith(f"Round 4, device {device}: "), row
            found = seen.get(device)
            if found is None:
                assert text.endswith("not in the cohort")
            elif found.status == "ok":
                assert all(word in text for word in found.binds)
                assert f"α {found.alpha:.3g}".rstrip("0") in text
            else:
                assert text.endswith(found.status)
            page.keyboard.press("ArrowDown")


def test_the_theme_can_be_switched(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=3")
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, written(tmp_path / "run"), scheme="light") as page:
        light = page.evaluate(background)
        page.click("#theme")
        assert page.evaluate(background) != light
        assert page.inner_text("#theme") == "Light"
        page.click("#theme")
        assert page.evaluate(background) == light


def test_two_runs_are_compared(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "narrow", "run.rounds=10", *TIGHT)
    planned_run(tmp_path / "wide", "run.rounds=20", "fleet.latency_s=2.0")
    with opened(browser, written(tmp_path / "narrow", tmp_path / "wide")) as page:
        assert page.inner_text("h1") == "2 runs compared"
        names = page.locator("main > div tbody th").all_inner_texts()
        assert [name.strip() for name in names] == ["narrow", "wide"]
        assert page.locator("#metric .legend li").count() == 2
        assert min(shades(page)) > 5
        keys = page.locator("#config > .card").first.locator("tbody th").all_inner_texts()
        assert set(keys) == {
            "fleet.latency_s", "fleet.energy_min_j", "fleet.energy_max_j", "run.rounds",
        }  # fmt: skip
        assert "infeasible: " in page.inner_text("#absent")
        page.select_option("select", label="wide")
        assert "Nobody sat out" in page.inner_text("#absent")
        assert "latency_s = 2.0" in page.inner_text("#config pre")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    planned_run(tmp_path / "a-run-with-quite-a-long-name", "run.rounds=40", *TIGHT)
    planned_run(tmp_path / "b", "run.rounds=5")
    address = written(tmp_path / "a-run-with-quite-a-long-name", tmp_path / "b")
    with opened(browser, address, PHONE, scheme) as page:
        open_tables(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        assert min(shades(page)) > 5
        small = page.evaluate(
            """[...document.querySelectorAll("main *")].filter((e) => e.childElementCount === 0
                && e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).length"""
        )
        assert small == 0


def test_a_thousand_rounds_of_sixty_devices_open_in_a_moment(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=1000", "fleet.devices=60", "fleet.cohort=15", *TIGHT)
    address = written(tmp_path / "run")
    size = (tmp_path / "run/page.html").stat().st_size
    assert size < 600_000
    assert size < (tmp_path / "run" / JOURNAL).stat().st_size / 10
    with opened(browser, address) as page:
        ready_ms = float(page.evaluate("document.documentElement.dataset.ready"))
        assert min(shades(page)) > 5
    assert ready_ms < 6000  # docs/LOG.md has what was measured; here others may be at work


# --- damage and malice ----------------------------------------------------------------------------

EVIL = (
    "</script><img src=x onerror=window.hacked=1><script>window.hacked=1</script>${window.hacked=1}"
)


def test_a_hostile_run_directory_is_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=window.hacked=1>"
    planned_run(folder, "run.rounds=3", f"summary={json.dumps(EVIL)}", *TIGHT)
    records, _ = read_journal(folder)
    tables = [asdict(record) for record in records]
    for table in tables:  # as the first version wrote them
        table["accuracy"] = table.pop("metric")
        table["devices"][0]["status"] = "refused: " + EVIL
        table["devices"][1]["binds"] = [EVIL]
        table["devices"][2]["device"] = 2**60
    lines = [json.dumps(table) + "\n" for table in tables]
    (folder / JOURNAL).write_text("".join(lines) + EVIL)
    (folder / ENVIRONMENT).write_text(json.dumps({EVIL: EVIL, "__proto__": {"polluted": EVIL}}))
    (folder / WIDTHS).write_text(json.dumps([{"alpha": 1.0, "accuracy": 0.5, EVIL: EVIL}]))
    with (folder / CONFIG).open("a") as file:
        file.write(f"# {EVIL}\n")
    planned_run(tmp_path / "other", "run.rounds=2")
    for others in ([], [tmp_path / "other"]):
        with opened(browser, written(folder, *others)) as page:
            open_tables(page)
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("({}).polluted") is None
            assert page.locator("img").count() == 0
            assert page.locator("script").count() == 3
            assert EVIL in page.inner_text("#absent")
            assert EVIL in page.inner_text("#config")
            if not others:
                assert page.inner_text("h1") == EVIL


def test_the_policy_stops_what_escaping_would_miss(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=1")
    write_page([tmp_path / "run"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    (tmp_path / "page.html").write_text(
        text.replace("<main", "<script>window.hacked = 1</script><main")
    )
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    assert page.evaluate("window.hacked") is None
    page.close()


@pytest.mark.parametrize("rounds", [0, 1])
def test_hardly_any_round_is_shown_too(browser: Any, tmp_path: Path, rounds: int) -> None:
    planned_run(tmp_path / "run", "run.rounds=2")
    journal = tmp_path / "run" / JOURNAL
    whole = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(whole[:rounds]))
    with opened(browser, written(tmp_path / "run")) as page:
        assert f"{rounds} of 2 rounds" in page.inner_text("#state")


def test_damage_is_said_on_the_page(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=4")
    journal = tmp_path / "run" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-50])
    with opened(browser, written(tmp_path / "run")) as page:
        assert "rounds.jsonl is damaged from line 4 on" in page.inner_text("[role=note]")
        assert "3 of 4 rounds" in page.inner_text("#state")


# --- live -----------------------------------------------------------------------------------------


@contextmanager
def going(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real run, long enough to be still going on whenever the test ends it."""
    long = sets(folder, "run.rounds=2000")
    run = subprocess.Popen(
        [PROGRAM, "run", *long, "--out", "run", "--workers", "1", "--json"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "run" / CONFIG).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run
    finally:
        run.kill()
        run.wait()


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


ROUNDS = "+document.querySelector('#state').textContent.match(/([\\d,]+) of/)[1].replace(',', '')"


def test_a_run_is_watched_while_it_goes_on(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        going(tmp_path) as run,
        serving(folder) as server,
        opened(browser, server.address) as page,
    ):
        page.click("#metric summary")
        page.check("#metric input[value=joules]", force=True)
        first = page.evaluate(ROUNDS)
        page.wait_for_function(f"(n) => {ROUNDS} > n + 1", arg=first, timeout=120_000)
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        written_down = (folder / JOURNAL).read_text().count("\n")
        page.wait_for_function(f"(n) => {ROUNDS} === n", arg=written_down, timeout=60_000)
        assert page.locator("#metric details tbody tr").count() == written_down
        assert page.evaluate("document.activeElement.value") == "joules"
        assert page.locator("text=Live; the last round came").count() == 1
        assert min(shades(page)) > 5
    assert (folder / "report.html").exists()


def test_the_page_says_that_a_run_has_finished(browser: Any, tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=3")
    with serving(tmp_path / "run") as server, opened(browser, server.address) as page:
        page.wait_for_selector("text=Finished.", timeout=20_000)
