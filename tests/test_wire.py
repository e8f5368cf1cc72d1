"""Messages between server and device: they come back as they were sent, and versions are told."""

from __future__ import annotations

import json
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
from anycostfl.server.downlink import Step
from anycostfl.wire import protocol
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
    Task,
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
    task = Task(
        info=INFO,
        device=2,
        alpha=0.5,
        widths={"conv1": 16, "fc1": 256},
        upload=Upload(0.03, 7, b"plan", codec="lowrank"),
        seed=2**62,
        weights=b"weights",
        moved={"conv1": order},
        download=Download(steps=(Step(3, {"conv1": order}, b"step"),), base=b"digest"),
    )
    read = read_task(task.pack())
    for name in ("info", "device", "alpha", "widths", "upload", "seed", "weights"):
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
    assert read_evaluation(Evaluation(7, 9).pack()) == Evaluation(7, 9)
    weights = {"w": torch.arange(6.0).view(2, 3), "count": torch.tensor(4)}
    read = read_evaluate_task(EvaluateTask(INFO, weights).pack()).weights
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


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
        lambda e: Envelope({**e.tables, "experiment": {**e.tables["experiment"], "mean": [0.5]}}),
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


def test_a_device_tells_that_the_server_is_too_old() -> None:
    """The question of protocol 1, recorded: the server's whole configuration, and no version."""
    with pytest.raises(MessageError, match=r"server speaks protocol 1.*upgrade .* on the server"):
        read_info(recorded("protocol-1-ask.json"))


def test_a_server_tells_that_a_device_is_too_old() -> None:
    with pytest.raises(MessageError, match=r"device speaks protocol 1.*upgrade .* on the device"):
        read_capabilities(recorded("protocol-1-offer.json"))


def test_a_device_of_protocol_1_reads_in_every_question_what_to_upgrade() -> None:
    """It looks for the table `refusal` first, prints its `why`, and ends."""
    assert "upgrade anycostfl on this device" in INFO.pack().tables["refusal"]["why"]
    assert recorded("protocol-1-ask.json").tables.keys() == {"ask"}


def test_a_newer_server_that_needs_more_is_told_apart_from_one_that_does_not() -> None:
    newer = {"version": protocol.PROTOCOL + 3, "oldest": protocol.PROTOCOL}
    extra = {"experiment": {**INFO.pack().tables["experiment"], "colour": "blue"}}
    training = {"training": {**INFO.pack().tables["training"], "prefetch": 2}}
    tables = {**INFO.pack().tables, **extra, **training}
    assert read_info(Envelope({**tables, "protocol": newer})) == INFO
    too_new = {"version": protocol.PROTOCOL + 3, "oldest": protocol.PROTOCOL + 1}
    with pytest.raises(MessageError, match="upgrade anycostfl on this device"):
        read_info(Envelope({**tables, "protocol": too_new}))
