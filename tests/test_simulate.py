"""A simulated experiment: the same result however it is run, real costs, failures on record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anycostfl import methods, models, run
from anycostfl.data.samples import Samples
from anycostfl.device import Job, Reply, learn_honestly
from anycostfl.errors import ConfigError
from anycostfl.experiment import build_experiment, load_data
from anycostfl.fleets.simulated import InProcess, SimulatedFleet
from anycostfl.loop import RoundResult
from anycostfl.records.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.records.run import SavedRun
from anycostfl.rounds import Purpose, draw_seed
from anycostfl.simulate import simulate
from small_runs import OWN_MODEL, small_config, small_holdings


def records_of(results: Sequence[RoundResult]) -> list[RoundRecord]:
    return [result.record for result in results]


def devices_of(results: Sequence[RoundResult]) -> list[DeviceRecord]:
    return [device for result in results for device in result.record.devices]


def final(results: Sequence[RoundResult]) -> dict[str, torch.Tensor]:
    """Every tensor of the state at the end, by kind and name."""
    states = results[-1].state.checkpoint().states
    return {f"{kind}/{name}": t for kind, state in states.items() for name, t in state.items()}


def same(one: Sequence[RoundResult], other: Sequence[RoundResult]) -> bool:
    a, b = final(one), final(other)
    alike = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return alike and records_of(one) == records_of(other)


QUICK = ("anycostfl", "stc")  # the others differ only in how they encode
KINDS = [
    *((f"run.method={name}",) for name in QUICK),
    ("run.method=anycostfl+", "compression.downlink=0.05", "server_optimizer.momentum=0.5"),
    *(
        pytest.param((f"run.method={name}",), marks=pytest.mark.slow)
        for name in methods.names()
        if name not in QUICK
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_interruptions_change_nothing(tmp_path: Path, kind: tuple[str, ...]) -> None:
    config = small_config(tmp_path, *kind, "run.rounds=4")
    whole = list(simulate(config))
    assert same(list(simulate(config, workers=2)), whole)
    for result in whole[:-1]:
        write_checkpoint(tmp_path, result.state.checkpoint())
        point = read_checkpoint(checkpoints(tmp_path)[0])
        done = whole[: point.rounds]
        saved = SavedRun("", tuple(records_of(done)), point, ())
        assert same([*done, *simulate(config, start=saved)], whole)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2")
    other = small_config(tmp_path, "run.rounds=2", "run.seed=1")
    first = list(simulate(config))
    torch.manual_seed(123)
    np.random.default_rng().random()
    assert same(first, list(simulate(config)))
    assert not same(first, list(simulate(other)))


def test_seeds_differ_in_every_argument() -> None:
    seeds = {
        draw_seed(seed, number, device, purpose)
        for seed in range(3)
        for number in range(3)
        for device in range(3)
        for purpose in Purpose
    }
    assert len(seeds) == 3 * 3 * 3 * len(Purpose)


def test_zero_workers_mean_one_per_core(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    assert list(run(config, workers=0)) == list(run(config))
    with pytest.raises(ConfigError, match="workers: given -1"):
        run(config, workers=-1)


def test_training_learns(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=12", "fleet.energy_min_j=0.04")
    accuracies = [result.record.metric or 0 for result in simulate(config)]
    assert accuracies[-1] > accuracies[0] + 0.3


def test_owners_without_names_are_not_told_apart(tmp_path: Path) -> None:
    """A dataset that was made by hand may number owners as it likes."""
    config = small_config(tmp_path)
    dataset = load_data(config)
    train, test = (replace(part, owners=torch.full((len(part),), 900 + i)) for i, part in
                   enumerate((dataset.train, dataset.test)))  # fmt: skip
    held = replace(dataset, train=train, test=test)
    experiment = build_experiment(config, held)
    fleet = SimulatedFleet(experiment, small_holdings(config, held))
    found = fleet.evaluate(experiment.initial_weights)
    assert found == experiment.evaluate(experiment.initial_weights)
    assert found is not None
    assert not found.others


def test_devices_pay_for_the_bytes_they_sent_and_the_flops_they_computed(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2")
    devices = devices_of(list(simulate(config)))
    assert len(devices) == 8
    for d in devices:
        assert d.status is Status.OK
        cycles = d.samples * config.workload.flops_per_sample * d.flops_ratio / 33.36
        assert d.compute_s == pytest.approx(cycles / d.frequency_hz)
        assert d.upload_s == pytest.approx(8 * d.bytes_up / d.rate_bps)
        assert d.upload_j == pytest.approx(0.1 * d.upload_s)
        promised = d.alpha * d.beta * config.workload.size_bits / 8
        assert 0.9 * promised < d.bytes_up <= promised


def test_every_device_stays_within_its_budgets(tmp_path: Path) -> None:
    """Up to how far the FLOPs of a cut exceed α, which the width rule bounds."""
    config = small_config(tmp_path, "model.widths=fast")
    devices = devices_of(list(simulate(config)))
    assert len(devices) == 24
    for d in devices:
        assert d.latency_s <= config.fleet.latency_s * 1.01
        assert d.energy_j <= d.budget_j * 1.01


def test_a_round_that_no_device_can_afford_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    poor = ("fleet.energy_min_j=1e-9", "fleet.energy_max_j=2e-9")
    config = small_config(tmp_path, "run.rounds=2", *poor)
    first, second = simulate(config)
    assert {(d.status, d.cause) for d in first.record.devices} == {(Status.INFEASIBLE, "radio")}
    assert first.record.energy_j == 0
    assert first.record.metric == second.record.metric
    untrained = build_experiment(config).initial_weights
    for name, tensor in second.state.weights.items():
        assert float(tensor.norm()) == pytest.approx(float(untrained[name].norm()), rel=1e-4)


# --- what goes wrong on devices -------------------------------------------------------------------


def test_an_update_that_is_not_finite_fails_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, victims = InProcess.perform_one, list[int]()

    def perform_one(self: InProcess, job: Job) -> Reply:
        if victims:
            return honest(self, job)
        victims.append(job.device)
        held = self.holdings.samples_of(job.device)
        samples = Samples(held.inputs * math.nan, held.targets)
        sub = self.runtime.net.shrink(job.alpha)
        return self.runtime.perform(sub, samples, job, learn_honestly)

    monkeypatch.setattr(InProcess, "perform_one", perform_one)
    (result,) = simulate(small_config(tmp_path, "run.rounds=1"))
    devices = {d.device: d for d in result.record.devices}
    victim = devices.pop(victims[0])
    assert (victim.status, victim.cause) == (Status.FAILED, "")
    assert "not finite" in victim.detail
    assert {d.status for d in devices.values()} == {Status.OK}
    assert all(torch.isfinite(t).all() for t in result.state.weights.values())


def test_a_device_that_cannot_train_fails_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = "nn.Linear(784, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)"
    (tmp_path / "single_sample.py").write_text(OWN_MODEL.format(layers=layers))
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    alone = ("model.name=single_sample", "fleet.devices=240", "fleet.samples=1")
    devices = devices_of(list(simulate(small_config(tmp_path, *alone, "run.rounds=2"))))
    assert len(devices) == 8
    assert {d.status for d in devices} == {Status.FAILED}
    assert all(d.detail.startswith("one sample is too few for this model") for d in devices)


@pytest.mark.parametrize("method", methods.names())
def test_a_damaged_payload_is_refused_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    config = small_config(tmp_path, "run.rounds=1", f"run.method={method}")
    honest = InProcess.perform_one

    def perform_one(self: InProcess, job: Job) -> Reply:
        reply = honest(self, job)
        damaged = bytes([*reply.payload[:40], reply.payload[40] ^ 1, *reply.payload[41:]])
        return Reply(reply.device, damaged, memory=reply.memory)

    monkeypatch.setattr(InProcess, "perform_one", perform_one)
    devices = devices_of(list(simulate(config)))
    assert {d.status for d in devices} == {Status.REFUSED}
    assert {d.cause for d in devices} <= {"damaged", "malformed"}
    assert all(d.detail for d in devices)


def test_a_payload_of_another_round_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "run.rounds=2", "fleet.cohort=12")
    honest, sent = InProcess.perform_one, dict[int, Reply]()

    def perform_one(self: InProcess, job: Job) -> Reply:
        return sent.setdefault(job.device, honest(self, job))  # in round 2, that of round 1 again

    monkeypatch.setattr(InProcess, "perform_one", perform_one)
    first, second = simulate(config)
    assert {d.status for d in first.record.devices} == {Status.OK}
    assert {d.status for d in second.record.devices} == {Status.REFUSED}
    causes = {d.cause for d in second.record.devices}
    assert "foreign" in causes
    assert causes <= {"foreign", "malformed"}  # too long for the new plan is noticed first


def test_batchnorm_models_train_and_are_recalibrated(tmp_path: Path) -> None:
    path = tmp_path / "colour.npz"
    random = np.random.default_rng(0)
    np.savez(
        path,
        train_images=random.integers(0, 255, (48, 8, 8, 3), dtype=np.uint8),
        train_labels=np.arange(48) % 10,
        test_images=random.integers(0, 255, (20, 8, 8, 3), dtype=np.uint8),
        test_labels=np.arange(20) % 10,
    )
    config = small_config(
        tmp_path, f'data.name="{path}"', "model.name=mobilenet", "run.rounds=1",
        "fleet.devices=4", "fleet.cohort=2", "workload.flops_per_sample=2e7",
    )  # fmt: skip
    (result,) = simulate(config)
    weights: Mapping[str, torch.Tensor] = result.state.weights
    assert weights["norm.running_mean"].abs().max() > 0
    assert all(torch.isfinite(t).all() for t in weights.values() if t.is_floating_point())
