"""Messages between server and device: they come back as they were sent, and versions are told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anycostfl.codec import Upload
from anycostfl.config import load_preset
from anycostfl.experiment import build_experiment
from anycostfl.planning.cost import make_devices
from anycostfl.planning.strategy import Offer
from anycostfl.records.round import Measured
from anycostfl.server.downlink import Step
from anycostfl.wire import messages
from anycostfl.wire.envelope import Blob, Envelope, MessageError, blobs_of
from anycostfl.wire.messages import (
    Capabilities,
    DeviceRejectedError,
    Download,
    EvaluateTask,
    Evaluation,
    ExperimentInfo,
    Result,
    RoundInfo,
    TrainTask,
    pack_fitted,
    pack_rejection,
    read_capabilities,
    read_evaluate_task,
    read_evaluation,
    read_info,
    read_result,
    read_task,
)

DATA = Path(__file__).parent / "data"
INFO = RoundInfo(ExperimentInfo.of(build_experiment(load_preset("demo"))), 3)
DEVICE = make_devices(
    samples=80.0, flops_per_cycle=4.0, energy_coefficient=1e-27, frequency_min_hz=1e8,
    frequency_max_hz=2e9, rate_bps=1e7, power_w=0.1, latency_s=0.15, energy_j=0.03,
)  # fmt: skip
KNOWN = Capabilities(2, 3, 10.0, DEVICE, b"digest")


def recorded(name: str) -> Envelope:
    """A message of an earlier protocol, as it was recorded."""
    kept = json.loads((DATA / name).read_text())

    def value(given: Any) -> Any:
        return bytes.fromhex(given["hex"]) if isinstance(given, dict) else given

    tables = {
        table: {key: value(given) for key, given in row.items()}
        for table, row in kept["tables"].items()
    }
    return Envelope(tables)


def test_a_task_comes_back_as_it_was_sent() -> None:
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    task = TrainTask(
        info=INFO,
        device=2,
        alpha=0.5,
        widths={"conv1": 16, "fc1": 256},
        upload=Upload(0.03, 7, b"plan", codec="lowrank"),
        seed=2**62,
        learning_rate=0.0125,
        weights=b"weights",
        moved={"conv1": order},
        download=Download(steps=(Step(3, {"conv1": order}, b"step"),), base=b"digest"),
    )
    read = read_task(task.pack())
    same = ("info", "device", "alpha", "widths", "upload", "seed", "learning_rate", "weights")
    for name in same:
        assert getattr(read, name) == getattr(task, name), name
    assert torch.equal(read.moved["conv1"], order)
    (step,) = read.download.steps
    assert (step.round, step.payload, read.download.base) == (3, b"step", b"digest")
    assert torch.equal(step.order["conv1"], order)


def test_results_capabilities_and_evaluations_come_back_as_they_were_sent() -> None:
    result = read_result(Result(b"payload", "", 1.5, KNOWN).pack())
    assert (result.payload, result.error, result.busy_s) == (b"payload", "", 1.5)
    assert (result.next.device, result.next.model_digest) == (2, b"digest")
    assert result.next.resources == DEVICE
    assert result.next.sums == {}
    sums = {"sum": torch.tensor([0.1, -2e9]).double(), "count": torch.tensor([7.0, 7.0]).double()}
    read_sums = read_capabilities(replace(KNOWN, sums=sums).pack()).sums
    assert read_sums.keys() == sums.keys()
    assert all(torch.equal(read_sums[name], tensor) for name, tensor in sums.items())
    evaluation = Evaluation(9, (torch.tensor([7.0, 9.0]).double(), torch.zeros(20).double()))
    found = read_evaluation(evaluation.pack())
    assert found.samples == 9
    assert all(torch.equal(a, b) for a, b in zip(found.sums, evaluation.sums, strict=True))
    weights = {"w": torch.arange(6.0).view(2, 3), "count": torch.tensor(4)}
    read = read_evaluate_task(EvaluateTask(INFO, weights).pack()).weights
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_offers_and_what_was_measured_come_back_as_they_were_sent() -> None:
    offer = Offer(0.5, 0.02, 1.2e9, 5, 0)
    measured = Measured(train_s=1.5, throttled=False, earlier_round=2, memory_bytes=4e8)
    known = replace(KNOWN, offer=offer)
    result = read_result(Result(b"", "", 1.5, known, done=0.25, measured=measured).pack())
    assert result.next.offer == offer
    assert result.done == 0.25
    assert result.measured == measured
    assert result.measured.joules is None


@pytest.mark.parametrize(
    ("table", "changed"),
    [
        ("result", {"done": 0.0}),
        ("result", {"done": 1.5}),
        ("result", {"done": math.nan}),
        ("measured", {"train_s": math.inf}),
        ("measured", {"joules": "many"}),
        ("measured", {"throttled": 1.0}),
        ("measured", {"earlier_round": 1.0}),
        ("offer", {"alpha": 2.0}),
        ("offer", {"reason": 77}),
        ("offer", {"binds": 1.0}),
    ],
)
def test_impossible_results_are_refused(table: str, changed: dict[str, Any]) -> None:
    known = replace(KNOWN, offer=Offer(0.5, 0.02, 1.2e9, 5, 0))
    sent = Result(b"", "", 1.5, known, measured=Measured(train_s=1.0)).pack()
    with pytest.raises(MessageError):
        read_result(sent | Envelope({table: {**sent.tables[table], **changed}}))


def test_what_samples_are_prepared_by_comes_back_as_it_was_fitted() -> None:
    fitted = {"mean": torch.tensor([0.1, -3.0]), "codes": torch.tensor([10, 32])}
    told = replace(INFO, experiment=replace(INFO.experiment, fitted=pack_fitted(fitted)))
    read = read_info(told.pack()).experiment.prepared_by()
    assert read.keys() == fitted.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in fitted.items())
    assert INFO.experiment.prepared_by() == {}


@pytest.mark.parametrize(
    "fitted",
    [
        b"mean",
        pack_fitted({"mean": torch.tensor([math.nan]), "std": torch.ones(1)}),
        pack_fitted({"mean": torch.zeros(1, dtype=torch.float8_e4m3fn)}),
    ],
)
def test_what_prepares_nothing_is_refused(fitted: bytes) -> None:
    told = replace(INFO, experiment=replace(INFO.experiment, fitted=fitted))
    with pytest.raises(MessageError, match="what samples are prepared by"):
        read_info(told.pack()).experiment.prepared_by()


@pytest.mark.parametrize(
    "sums",
    [
        {"sum": torch.tensor([math.inf]).double()},
        {"sum": torch.tensor([1.0])},
        {"sum": torch.zeros(messages.MOST_SUMS + 1).double()},
    ],
)
def test_sums_that_no_samples_have_are_refused(sums: dict[str, torch.Tensor]) -> None:
    with pytest.raises(MessageError, match="sums that are not finite numbers, or too many"):
        read_capabilities(replace(KNOWN, sums=sums).pack())


@pytest.mark.parametrize(
    "sums", [(), (torch.zeros(1, 2).double(),), (torch.tensor([math.nan]).double(),)]
)
def test_an_evaluation_without_a_vector_for_every_metric_is_refused(
    sums: tuple[torch.Tensor, ...],
) -> None:
    with pytest.raises(MessageError):
        read_evaluation(Evaluation(9, sums).pack())
    good = Evaluation(9, (torch.ones(2).double(),)).pack()
    more = Envelope({**good.tables, "evaluation": {"samples": 9, "metrics": 2}}, good.arrays)
    with pytest.raises(MessageError, match="without one vector of sums for every metric"):
        read_evaluation(more)


def test_a_rejection_says_why() -> None:
    with pytest.raises(DeviceRejectedError, match="rejects this device: device 3 is taken"):
        read_info(pack_rejection("device 3 is taken"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e: replace(e, tables={k: v for k, v in e.tables.items() if k != "experiment"}),
        lambda e: Envelope({**e.tables, "experiment": {**e.tables["experiment"], "seed": -1}}),
        lambda e: Envelope({**e.tables, "training": {**e.tables["training"], "batch": 0}}),
        lambda e: Envelope({**e.tables, "training": {**e.tables["training"], "batch": "many"}}),
        lambda e: Envelope({**e.tables, "fleet": {}}),
        lambda e: Envelope({**e.tables, "experiment": {**e.tables["experiment"], "epochs": 0}}),
        lambda e: Envelope({**e.tables, "experiment": {**e.tables["experiment"], "fitted": [0.5]}}),
        lambda e: Envelope({**e.tables, "round": {"number": 1.0}}),
    ],
)
def test_what_is_no_message_is_told(spoil: Callable[[Envelope], Envelope]) -> None:
    assert read_info(INFO.pack()) == INFO
    with pytest.raises(MessageError):
        read_info(spoil(INFO.pack()))


@pytest.mark.parametrize(
    "blob",
    [
        Blob("anycostfl/tensor", b"\0" * 8, "float32", (3,)),
        Blob("anycostfl/tensor", b"\0" * 8, "float32", (-2, -1)),
        Blob("anycostfl/tensor", b"\0" * 8, "nn", (2,)),
        Blob("pickle", b"\0" * 8, "float32", (2,)),
    ],
)
def test_an_array_is_what_it_says_or_an_error(blob: Blob) -> None:
    with pytest.raises(MessageError):
        Envelope({}, {"state": {"w": blob}}).state("state")
    good = {"w": torch.ones(2, 3)}
    assert torch.equal(Envelope({}, {"state": blobs_of(good)}).state("state")["w"], good["w"])


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "version"), [("protocol-1-ask", 1), ("protocol-2-info", 2)])
def test_a_device_tells_that_the_server_is_too_old(name: str, version: int) -> None:
    """Questions as they were recorded; that of protocol 1 carries no version."""
    with pytest.raises(MessageError) as told:
        read_info(recorded(f"{name}.json"))
    assert str(told.value) == (
        f"the server speaks protocol {version}, this device needs 3 or newer: upgrade anycostfl on "
        "the server"
    )


@pytest.mark.parametrize(
    ("name", "version", "read"),
    [
        ("protocol-1-offer", 1, read_capabilities),
        ("protocol-2-capabilities", 2, read_capabilities),
        ("protocol-2-capabilities", 2, read_result),
        ("protocol-2-evaluation", 2, read_evaluation),
    ],
)
def test_a_server_tells_that_a_device_is_too_old(
    name: str, version: int, read: Callable[[Envelope], object]
) -> None:
    with pytest.raises(MessageError) as told:
        read(recorded(f"{name}.json"))
    assert str(told.value) == (
        f"the device speaks protocol {version}, this server needs 3 or newer: upgrade anycostfl on "
        "the device"
    )


def test_a_device_of_protocol_2_tells_that_it_is_too_old_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the versions of every question before anything else, as today's devices do."""
    question = INFO.pack()
    for name in ("PROTOCOL", "OLDEST"):
        monkeypatch.setattr(messages, name, 2)
    assert read_info(recorded("protocol-2-info.json") | fitted_as_today()).round == 3
    with pytest.raises(MessageError) as told:
        read_info(question)
    assert str(told.value) == (
        "the server needs protocol 3 or newer, this device speaks 2: upgrade anycostfl on this "
        "device"
    )


def fitted_as_today() -> Envelope:
    """What protocol 2 did not say of an experiment."""
    table = recorded("protocol-2-info.json").tables["experiment"]
    added = {name: INFO.pack().tables[name] for name in ("workload", "limits")}
    return Envelope({"experiment": {**table, "fitted": b""}, **added})


def test_a_device_of_protocol_1_reads_in_every_question_what_to_upgrade() -> None:
    """It looks for the table `refusal` first, prints its `why`, and ends."""
    assert "upgrade anycostfl on this device" in INFO.pack().tables["refusal"]["why"]
    assert recorded("protocol-1-ask.json").tables.keys() == {"ask"}


def test_a_newer_server_that_needs_more_is_told_apart_from_one_that_does_not() -> None:
    newer = {"version": messages.PROTOCOL + 3, "oldest": messages.PROTOCOL}
    extra = {"experiment": {**INFO.pack().tables["experiment"], "colour": "blue"}}
    training = {"training": {**INFO.pack().tables["training"], "prefetch": 2}}
    tables = {**INFO.pack().tables, **extra, **training}
    assert read_info(Envelope({**tables, "protocol": newer})) == INFO
    too_new = {"version": messages.PROTOCOL + 3, "oldest": messages.PROTOCOL + 1}
    with pytest.raises(MessageError, match="upgrade anycostfl on this device"):
        read_info(Envelope({**tables, "protocol": too_new}))
