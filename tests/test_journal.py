"""The journal: what is written reads back, and journals of schemas 1 and 2 still do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.config import load_preset, to_toml
from anycostfl.files import StorageError
from anycostfl.records.journal import SCHEMA, format_record, parse_record
from anycostfl.records.round import DeviceRecord, Measured, RoundRecord, Status, refusals
from anycostfl.records.run import COPY, JOURNAL, RunWriter, open_run, read_journal
from anycostfl.server.suspensions import Gate, suspensions_after

OLD_JOURNAL = Path(__file__).parent / "data" / "journal-schema-1.jsonl"
"""Written by version 1: four simulated rounds, then one with what only real devices do."""
SECOND_JOURNAL = OLD_JOURNAL.with_name("journal-schema-2.jsonl")
"""The same rounds, written by version 2 after it had read them."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
measured = st.builds(
    Measured,
    train_s=st.none() | numbers,
    memory_used=st.none() | numbers,
    throttled=st.none() | st.booleans(),
    earlier_round=st.none() | st.integers(0, 1 << 62),
)
devices = st.builds(
    DeviceRecord,
    device=st.integers(0, 1 << 62),
    status=st.sampled_from(Status),
    cause=texts,
    detail=texts,
    budget_j=numbers,
    bytes_up=st.integers(0, 1 << 62),
    binds=st.lists(texts, max_size=3).map(tuple),
    duplicates=st.integers(0, 10),
    agreement=st.none() | numbers,
    done=st.floats(0, 1, exclude_min=True),
    measured=st.none() | measured,
)
records = st.builds(
    RoundRecord,
    round=st.integers(0, 1 << 62),
    metric=st.none() | numbers,
    devices=st.lists(devices, max_size=3).map(tuple),
    step_bytes=st.integers(0, 1 << 62),
    others=st.dictionaries(texts, numbers, max_size=3),
)


@given(records)
def test_a_record_is_one_line_that_reads_back(record: RoundRecord) -> None:
    line = format_record(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["schema"] == SCHEMA == 3
    assert parse_record(line) == parse_record(line.encode()) == record


def test_a_line_without_real_devices_does_not_mention_what_only_they_have() -> None:
    """Journals of simulated runs stay what they were, to the byte."""
    plain = DeviceRecord(0, Status.OK)
    simulated = json.loads(format_record(RoundRecord(0, None, (plain,))))["devices"][0]
    assert not {"done", "measured"} & simulated.keys()
    real = DeviceRecord(0, Status.OK, done=0.5, measured=Measured(train_s=1.0))
    both = json.loads(format_record(RoundRecord(0, None, (plain, real))))["devices"]
    assert "done" not in both[0]
    assert both[1]["done"] == 0.5
    assert both[1]["measured"]["train_s"] == 1.0
    assert both[1]["measured"]["joules"] is None  # not measured, and not a guess


def old_run(folder: Path, journal: bytes = OLD_JOURNAL.read_bytes()) -> Path:
    """A run directory with the journal of an older version."""
    RunWriter.create(folder, to_toml(load_preset("demo")))
    for name in (JOURNAL, COPY):
        (folder / name).write_bytes(journal)
    return folder


def test_every_status_of_schema_1_has_its_status_cause_and_detail(tmp_path: Path) -> None:
    found, remarks = read_journal(old_run(tmp_path))
    assert remarks == ()
    assert [record.round for record in found] == [0, 1, 2, 3, 4]
    simulated = {
        (d.device, d.status, d.cause, d.detail)
        for record in found[:4]
        for d in record.devices
        if d.status is not Status.OK
    }
    damaged = "the checksum does not match: the payload was damaged on its way"
    assert simulated == {
        (1, Status.REFUSED, "damaged", damaged),
        (1, Status.SUSPENDED, "", "until round 3"),
        (4, Status.FAILED, "", "update of conv1.weight is not finite: 3 values"),
        (5, Status.INFEASIBLE, "energy", ""),
    }
    assert [(d.status, d.cause, d.detail, d.duplicates) for d in found[4].devices] == [
        (Status.MISSING, "", "it did not answer in time", 0),
        (Status.REFUSED, "unreadable", "a message without a payload", 0),
        (Status.UNUSED, "", "1 usable replies, at least 2 needed", 2),
        (Status.INFEASIBLE, "radio", "", 0),
        (Status.INFEASIBLE, "latency and energy", "", 0),
        (Status.EXCLUDED, "", "agrees with the others -0.42 times as usual", 0),
    ]
    assert {d.status for record in found for d in record.devices} == set(Status)


@pytest.mark.parametrize("journal", [OLD_JOURNAL, SECOND_JOURNAL], ids=lambda path: path.stem)
def test_everything_else_of_older_schemas_is_read_as_it_was_written(journal: Path) -> None:
    renamed = {"status", "surplus"}
    for line in journal.read_text().splitlines():
        old, record = json.loads(line), parse_record(line)
        assert (record.round, record.metric) == (old["round"], old["accuracy"])
        assert record.step_bytes == old.get("step_bytes", 0)
        assert record.others == {}
        for was, device in zip(old["devices"], record.devices, strict=True):
            for key in was.keys() - renamed - {"binds"}:
                assert getattr(device, key) == was[key]
            assert device.binds == tuple(was["binds"])


def test_schema_2_tells_the_same_rounds_as_schema_1() -> None:
    lines = SECOND_JOURNAL.read_text().splitlines()
    assert [json.loads(line)["schema"] for line in lines] == 5 * [2]
    first = map(parse_record, OLD_JOURNAL.read_text().splitlines())
    assert list(map(parse_record, lines)) == list(first)


@pytest.mark.parametrize("journal", [OLD_JOURNAL, SECOND_JOURNAL], ids=lambda path: path.stem)
def test_suspensions_and_refusals_follow_from_older_schemas(tmp_path: Path, journal: Path) -> None:
    found, _ = read_journal(old_run(tmp_path, journal.read_bytes()))
    gate = Gate(strikes=2, suspend_rounds=1)  # as the run had it
    assert suspensions_after(found[:2], gate).until == {1: 3}
    assert suspensions_after(found[:4], gate).until == {1: 5}
    assert refusals(found) == {"damaged": 3, "duplicate": 2, "unreadable": 1}


@pytest.mark.parametrize("journal", [OLD_JOURNAL, SECOND_JOURNAL], ids=lambda path: path.stem)
def test_a_resumed_journal_of_an_older_schema_is_written_back_as_schema_3(
    tmp_path: Path, journal: Path
) -> None:
    folder = old_run(tmp_path, journal.read_bytes())
    before, _ = read_journal(folder)
    _, writer = open_run(folder)  # without a checkpoint: from the beginning
    assert read_journal(folder) == ((), ())
    for record in before:
        writer.append(record)
    for name in (JOURNAL, COPY):
        lines = (folder / name).read_text().splitlines()
        assert [json.loads(line)["schema"] for line in lines] == 5 * [SCHEMA]
    assert read_journal(folder) == (before, ())


def test_a_journal_of_a_newer_version_is_not_taken_for_damage(tmp_path: Path) -> None:
    """Resuming would cut away rounds that only a newer program can read."""
    lines = [format_record(parse_record(line)) for line in OLD_JOURNAL.read_text().splitlines()]
    lines[3] = json.dumps({**json.loads(lines[3]), "schema": SCHEMA + 1})
    journal = "".join(line + "\n" for line in lines).encode()
    folder = old_run(tmp_path, journal)
    with pytest.raises(StorageError, match=r"schema 4; this program reads 1 to 3: upgrade"):
        open_run(folder)
    assert (folder / JOURNAL).read_bytes() == (folder / COPY).read_bytes() == journal
    (folder / COPY).write_bytes(OLD_JOURNAL.read_bytes())  # one copy was only damaged
    assert len(read_journal(folder)[0]) == 5


@pytest.mark.parametrize("schema", [0, "2", None, [1]])
def test_an_unknown_schema_is_refused_with_a_remark(tmp_path: Path, schema: object) -> None:
    lines = [format_record(parse_record(line)) for line in OLD_JOURNAL.read_text().splitlines()]
    lines[3] = json.dumps({**json.loads(lines[3]), "schema": schema})
    folder = old_run(tmp_path, "".join(line + "\n" for line in lines).encode())
    found, remarks = read_journal(folder)
    assert [record.round for record in found] == [0, 1, 2]
    told = f"{JOURNAL} is damaged from line 4 on (schema {schema!r}; this program reads 1 to 3)"
    assert remarks == (told,)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "3",
        "null",
        "{}",
        '{"round": 0, "accuracy": null, "devices": [3]}',
        '{"round": 0, "accuracy": null, "devices": [{"device": 0}]}',
        '{"round": 0, "accuracy": null, "devices": [{"device": 0, "status": "asleep"}]}',
        '{"schema": 2, "round": 0, "accuracy": null, "devices": [{"device": 0, "status": 3}]}',
        '{"schema": 2, "round": "0", "accuracy": null, "devices": []}',
        '{"schema": 2, "round": 0, "accuracy": "good", "devices": []}',
        '{"schema": 2, "round": 100000000000000000000, "accuracy": null, "devices": []}',
        '{"schema": 2, "round": 0, "metric": null, "devices": []}',
        '{"schema": 3, "round": 0, "accuracy": null, "devices": []}',
        '{"schema": 3, "round": "0", "metric": null, "devices": []}',
        '{"schema": 3, "round": 0, "metric": "good", "devices": []}',
        '{"schema": 3, "round": 0, "metric": null, "devices": [], "others": [1]}',
        '{"schema": 3, "round": 0, "metric": null, "devices": [], "others": {"mae": "x"}}',
        '{"schema": 3, "round": 0, "metric": null, "devices": [], "others": {"mae": [1]}}',
        "[" * 100_000,
    ],
)
def test_a_line_that_holds_no_round_is_damage(tmp_path: Path, line: str) -> None:
    found, remarks = read_journal(old_run(tmp_path, f"{line}\n".encode()))
    assert found == ()
    assert f"{JOURNAL} is damaged from line 1 on" in remarks[0]
