"""The page says what the run directory says, whatever that directory holds."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import anycostfl.report
from anycostfl.cli.report import report
from anycostfl.cli.watch import watch
from anycostfl.config import to_toml
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.files import StorageError, atomic_write
from anycostfl.records.round import Status
from anycostfl.records.run import (
    CONFIG,
    ENVIRONMENT,
    JOURNAL,
    TIMING,
    WIDTHS,
    read_config,
    read_journal,
)
from anycostfl.report.gather import _rounded, gather
from anycostfl.report.live import LiveServer
from anycostfl.report.page import render, write_page
from command_line import PROGRAM, Call
from planned_runs import planned_run, unpacked

UPLOT = Path(anycostfl.report.__file__).parent / "assets" / "uplot"
TIGHT = ("fleet.energy_min_j=0.001", "fleet.energy_max_j=0.1")  # some devices sit out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    planned_run(tmp_path / "run", "run.rounds=2")
    return tmp_path / "run"


# --- what the page holds --------------------------------------------------------------------------


def test_the_page_holds_the_run_in_columns(tmp_path: Path) -> None:
    config = planned_run(tmp_path / "run", "run.rounds=5", *TIGHT)
    write_page([tmp_path / "run"])
    (run,) = unpacked((tmp_path / "run/report.html").read_text())
    records, _ = read_journal(tmp_path / "run")
    entries = [d for r in records for d in r.devices]
    columns = run["devices"]
    assert run["name"] == "run"
    assert run["config"] == to_toml(config)
    assert run["rounds"]["cohort"] == [10] * 5
    assert run["rounds"]["metric"] == pytest.approx([r.metric for r in records], rel=1e-5)
    assert run["rounds"]["bytes_up"] == [r.bytes_up for r in records]
    split = zip(run["rounds"]["compute_j"], run["rounds"]["upload_j"], strict=True)
    assert [a + b for a, b in split] == pytest.approx([r.energy_j for r in records], rel=1e-4)
    assert columns["device"] == [d.device for d in entries]
    assert columns["alpha"] == pytest.approx([d.alpha for d in entries], rel=6e-3)
    assert [run["statuses"][s] for s in columns["status"]] == [d.explained for d in entries]
    shares = [d.energy_j / d.budget_j for d in entries]
    assert columns["energy_share"] == pytest.approx(shares, rel=6e-4)
    words = [{w for b, w in enumerate(run["binds"]) if mask >> b & 1} for mask in columns["binds"]]
    assert words == [set(d.binds) for d in entries]
    assert any(d.status is Status.INFEASIBLE for d in entries)
    assert run["wall_s"] == pytest.approx(2.5)
    assert run["remarks"] == []


numbers = st.floats() | st.floats(0, 1e6) | st.none()


@given(st.lists(numbers, max_size=20), st.integers(3, 6))
def test_rounding_keeps_the_digits_it_promises(values: list[float | None], digits: int) -> None:
    short = _rounded(values, digits)
    for exact, shown in zip(values, short, strict=True):
        if exact is None or not math.isfinite(exact):
            assert shown is None
        elif 1e-200 < abs(exact) < 1e200:
            assert shown is not None
            assert shown == pytest.approx(exact, rel=0.51 * 10.0 ** (1 - digits))
            if 1e-12 < abs(exact) < 1e12:
                assert len(Decimal(repr(shown)).normalize().as_tuple().digits) <= digits
    json.dumps(short, allow_nan=False)


def test_sub_models_are_shown_if_they_were_measured(folder: Path) -> None:
    rows = [{"alpha": 1, "metric": 0.9, "format": "onnx"}, {"alpha": 0.25, "metric": 0.8}]
    (folder / WIDTHS).write_text(json.dumps(rows))
    assert gather(folder)["widths"] == [rows[1], rows[0]]
    old = [{"alpha": 0.5, "accuracy": 0.9}]  # as earlier versions called it
    (folder / WIDTHS).write_text(json.dumps(old))
    assert gather(folder)["widths"] == [{"alpha": 0.5, "metric": 0.9}]


# --- damage and malice ----------------------------------------------------------------------------


def test_a_damaged_journal_is_read_up_to_the_damage_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned_run(tmp_path / "run", "run.rounds=5")
    journal = tmp_path / "run" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], lines[3][:100], b"\n", lines[4]]))
    run = gather(tmp_path / "run")
    assert len(run["rounds"]["metric"]) == 3
    assert "damaged from line 4" in run["remarks"][0]
    report([tmp_path / "run"])
    assert "damaged from line 4" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "<script>alert(1)</script>"),
        ("alpha", [1]),
        ("alpha", "0.5"),
        ("bytes_up", 1.5),
        ("bytes_up", 10**400),
        ("status", None),
        ("binds", [["latency"]]),
        ("compute_s", {}),
    ],
)
def test_a_value_of_the_wrong_kind_is_damage(folder: Path, field: str, value: object) -> None:
    journal = folder / JOURNAL
    first, second = map(json.loads, journal.read_text().splitlines())
    second["devices"][0][field] = value
    journal.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    records, remarks = read_journal(folder)
    assert len(records) == 1
    assert "line 2" in remarks[0]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"round": 1' + "0" * 5000 + "}", "null", "\x00"])
def test_a_hostile_line_is_damage(tmp_path: Path, line: str) -> None:
    planned_run(tmp_path / "run", "run.rounds=1")
    with (tmp_path / "run" / JOURNAL).open("a") as file:
        file.write(line + "\n")
    records, remarks = read_journal(tmp_path / "run")
    assert len(records) == len(remarks) == 1


def test_numbers_that_are_none_do_not_reach_the_page(folder: Path) -> None:
    journal = folder / JOURNAL
    journal.write_text(
        re.sub(r'"(alpha|budget_j)": [\d.e-]+', r'"\1": Infinity', journal.read_text())
    )
    run = gather(folder)
    assert set(run["devices"]["alpha"]) == {None}
    assert unpacked(render([run])) == [run]


def test_a_round_on_its_way_is_no_damage_while_the_run_goes_on(tmp_path: Path) -> None:
    planned_run(tmp_path / "run", "run.rounds=3")
    journal = tmp_path / "run" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])
    records, remarks = read_journal(tmp_path / "run", growing=True)
    assert (len(records), remarks) == (2, ())
    records, remarks = read_journal(tmp_path / "run")
    assert len(records) == 2
    assert "line 3" in remarks[0]


@pytest.mark.parametrize(
    ("name", "content", "remark"),
    [
        (CONFIG, b"not toml \xff", "config.toml cannot be parsed"),
        (ENVIRONMENT, b"{", "environment.json is damaged"),
        (WIDTHS, b'[{"alpha": 0.5}]', "widths.json is damaged"),
        (WIDTHS, b"3", "widths.json is damaged"),
        (WIDTHS, b'[{"alpha": 1' + b"0" * 400 + b', "accuracy": 1}]', "widths.json is damaged"),
        (ENVIRONMENT, b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "environment.json is damaged"),
    ],
)
def test_other_damaged_files_are_passed_over(
    folder: Path, name: str, content: bytes, remark: str
) -> None:
    (folder / name).write_bytes(content)
    run = gather(folder)
    assert len(run["rounds"]["metric"]) == 2
    assert remark in run["remarks"][0]
    assert unpacked(render([run])) == [run]


def test_a_run_of_a_model_that_is_not_at_hand_tells_what_it_asked_for(tmp_path: Path) -> None:
    config = planned_run(tmp_path / "run", "run.rounds=2")
    strange = to_toml(replace(config, model=replace(config.model, name="somebodys")))
    (tmp_path / "run" / CONFIG).write_text(strange)
    run = gather(tmp_path / "run")
    assert run["remarks"] == []
    assert run["summary"]["method"] == config.run.method
    assert run["target"] == config.run.target


def test_links_that_somebody_left_in_a_run_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (folder / f"{WIDTHS}.part").symlink_to(secret)
    atomic_write(folder / WIDTHS, b"[]")
    assert secret.read_text() == "mine"
    assert not (folder / WIDTHS).is_symlink()
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(secret)
    page = render([gather(folder)])
    assert "mine" not in unpacked(page)[0]["config"]
    assert "config.toml is a link" in unpacked(page)[0]["remarks"][0]
    with pytest.raises(StorageError, match="is a link"):
        read_config(folder)


def test_of_a_file_that_is_far_too_large_only_the_beginning_is_read(folder: Path) -> None:
    for name in (ENVIRONMENT, TIMING, WIDTHS):
        (folder / name).touch()
        os.truncate(folder / name, 64 << 20)
    tracemalloc.start()
    run = gather(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run["wall_s"] is None
    assert peak < 32 << 20


def test_how_long_a_run_took_is_not_read_through_a_link(folder: Path, tmp_path: Path) -> None:
    timing = folder / TIMING
    timing.rename(tmp_path / "elsewhere")
    timing.symlink_to(tmp_path / "elsewhere")
    assert gather(folder)["wall_s"] is None


def test_only_named_scripts_may_run_and_nothing_may_be_asked(folder: Path) -> None:
    page = render([gather(folder)])
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(digests) == 2
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]


def test_the_chart_library_is_the_one_that_is_written_down() -> None:
    about = (UPLOT / "README.md").read_text()
    sums = dict(re.findall(r"^\| `(\S+)` \| `\S+` \| `(\w{64})` \|$", about, re.M))
    assert {"LICENSE", "uPlot.iife.min.js", "uPlot.min.css"} == set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == digest, name
    version = re.match(r"# uPlot (\S+)", about)
    assert version
    assert f"(v{version[1]})" in (UPLOT / "uPlot.iife.min.js").read_text()[:100]


# --- the commands ---------------------------------------------------------------------------------


def test_report_writes_into_the_run_or_compares_several(call: Call, tmp_path: Path) -> None:
    planned_run(tmp_path / "a", "run.rounds=3")
    planned_run(tmp_path / "b" / "a", "run.rounds=2", "run.method=fedavg")
    code, shown, _ = call("report", "a")
    assert (code, (tmp_path / "a/report.html").exists()) == (0, True)
    assert "Open a/report.html" in shown
    told = json.loads(call("report", "a", "b/a", "--json")[1])
    assert told["page"] == "comparison.html"
    assert [run["name"] for run in told["runs"]] == ["a", "b/a"]
    assert [run["method"] for run in told["runs"]] == ["anycostfl", "fedavg"]
    assert [run["rounds"] for run in told["runs"]] == [3, 2]
    names = [run["name"] for run in unpacked((tmp_path / "comparison.html").read_text())]
    assert names == ["a", "b/a"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda: report([Path("nowhere")]), "nowhere holds no run"),
        (lambda: report([Path("a"), Path("nowhere")]), "nowhere holds no run"),
        (lambda: report([Path("a")], Path("/dev/null/x.html")), "cannot write to /dev/null/x.html"),
        (lambda: watch([Path("nowhere")]), "nowhere holds no run"),
        (lambda: watch([Path("a")], 99_999), "--port: cannot listen"),
    ],
)
def test_mistakes_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[[], None], message: str
) -> None:
    planned_run(tmp_path / "a", "run.rounds=1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AnycostError, match=message):
        command()


def test_watch_says_where_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    planned_run(tmp_path / "a", "run.rounds=1")
    process = subprocess.Popen(
        [PROGRAM, "watch", "a", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout
    assert re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Stopped watching" in said
    assert complaint == ""


# --- the live server ------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    planned_run(tmp_path / "run", "run.rounds=2")
    with LiveServer([tmp_path / "run"], 0) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(
    server: LiveServer, path: str, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)  # type: ignore[arg-type]  # host, port
    try:
        connection.request(
            "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_a_browser_that_leaves_early_is_no_mistake(
    server: LiveServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        with socket.create_connection(cast("Any", server.server_address[:2])) as browser:
            browser.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            reset = struct.pack("ii", 1, 0)  # close at once, whatever is still on its way
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert ask(server, "/data")[0] == HTTPStatus.OK
    assert "Traceback" not in capfd.readouterr().err


def test_the_server_answers_anew_only_when_a_round_was_added(
    server: LiveServer, tmp_path: Path
) -> None:
    status, headers, content = ask(server, "/data")
    (run,) = json.loads(content)
    assert (status, len(run["rounds"]["metric"])) == (200, 2)
    status, _, content = ask(server, "/data", If_None_Match=headers["ETag"])
    assert (status, content) == (304, b"")
    journal = tmp_path / "run" / JOURNAL
    third = {**json.loads(journal.read_text().splitlines()[1]), "round": 2}
    with journal.open("a") as file:
        file.write(json.dumps(third) + "\n")
    status, _, content = ask(server, "/data", If_None_Match=headers["ETag"])
    assert (status, len(json.loads(content)[0]["rounds"]["metric"])) == (200, 3)


def test_the_server_serves_this_machine_and_no_files(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, headers, content = ask(server, "/")
    assert status == 200
    assert b'data-mode="live"' in content
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    for path in (
        "/config.toml",
        "/../run/config.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
    ):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "/data", Host="evil.example")[0] == 421
    assert ask(server, "/", Host=f"evil.example:{server.server_address[1]}")[0] == 421
    assert ask(server, "/", Host=f"localhost:{server.server_address[1]}")[0] == 200


def test_a_vanished_run_is_said_and_a_taken_port_too(server: LiveServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--port: cannot listen"):
        LiveServer([tmp_path / "run"], int(server.server_address[1]))
    with pytest.raises(StorageError, match="holds no run"):
        LiveServer([tmp_path / "nothing"], 0)
    (tmp_path / "run" / CONFIG).unlink()
    status, _, content = ask(server, "/data")
    assert status == 503
    assert b"holds no run" in content
