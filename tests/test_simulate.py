"""The round: same result however it is run, real costs, and what goes wrong is recorded."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anycostfl import methods
from anycostfl.config import load_preset, to_toml
from anycostfl.device import Job, Reply, cores
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import prepare, settle
from anycostfl.files import InUseError
from anycostfl.fleets.pool import DeviceSide, Purpose, SharedMemoryError, draw_seed
from anycostfl.records.round import RoundRecord
from anycostfl.records.run import RunWriter, read_run
from anycostfl.runs import Turn, begin, check_engine, keep, take_up
from anycostfl.server import Server
from anycostfl.simulate import play, run
from small_runs import small_config, small_overrides


def final(turns: list[Turn]) -> dict[str, torch.Tensor]:
    return dict(turns[-1].after.state)


def same(one: list[Turn], other: list[Turn]) -> bool:
    a, b = final(one), final(other)
    records = [turn.record for turn in one] == [turn.record for turn in other]
    return records and all(torch.equal(a[name], b[name]) for name in a)


QUICK = ("anycostfl", "stc")  # the others differ from them in how they encode only
KINDS = [
    *((f"run.method={name}",) for name in QUICK),
    ("run.method=anycostfl+", "compression.downlink=0.05", "aggregation.momentum=0.5"),
    *(
        pytest.param((f"run.method={name}",), marks=pytest.mark.slow)
        for name in methods.names()
        if name not in QUICK
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_workers_changes_nothing(tmp_path: Path, kind: tuple[str, ...]) -> None:
    config = small_config(tmp_path, *kind, "run.rounds=3")
    assert same(list(play(config, workers=1)), list(play(config, workers=2)))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_devices_remember_holds_no_file_open(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.method=stc", "run.rounds=3")
    turns = play(config, workers=2)
    next(turns)
    after_one = open_files()
    remembered = len(next(turns).after.memories)
    assert remembered > 4  # in one round, four devices take part
    assert open_files() == after_one
    turns.close()


def test_of_two_who_take_up_a_run_one_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2")
    folder = RunWriter.create(tmp_path / "run", to_toml(config)).folder
    one, other = take_up(folder), take_up(folder)
    played = list(keep(play(config), config, one.writer))
    with pytest.raises(InUseError, match="went on with"):
        next(keep(play(config), config, other.writer))
    assert [turn.record for turn in played] == list(read_run(folder).records)


def test_runs_taken_in_turns_are_what_each_is_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = small_config(tmp_path, "run.rounds=2")
        alone = [turn.record for turn in play(config)]
        one, other = play(config), play(config)
        mixed = [next(one).record, next(other).record, next(one).record]
        assert torch.get_num_threads() == 2
        one.close()
        assert [*mixed, next(other).record] == [alone[0], alone[0], alone[1], alone[1]]
    finally:
        torch.set_num_threads(threads)


def test_no_workers_are_one_per_core(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    assert list(run(config, workers=0)) == list(run(config))
    with pytest.raises(ConfigError, match="workers: given -1"):
        next(run(config, workers=-1))


def test_where_a_system_cannot_say_which_cores_are_free_all_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()


def test_without_room_for_shared_data_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(SharedMemoryError, match=r"docker run --shm-size=1g\), or use --workers 1"):
        play(small_config(tmp_path), workers=2)
    play(small_config(tmp_path), workers=1)


def test_the_workload_is_that_of_the_images_at_hand(tmp_path: Path) -> None:
    images, labels = np.zeros((24, 64, 64, 3), np.uint8), np.arange(24) % 10
    np.savez(
        tmp_path / "large.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    change = [f"data.name={tmp_path}/large.npz", "model.name=mobilenet", "fleet.devices=2"]
    config = load_preset("cifar10-iid", [*change, "fleet.cohort=2"])
    with pytest.raises(ConfigError, match=r"images of \(3, 64, 64\) mobilenet takes") as caught:
        prepare(config)
    told = str(caught.value).split("--set ")[1]
    prepare(load_preset("cifar10-iid", [*change, "fleet.cohort=2", told]))


def test_images_that_the_model_does_not_take_are_named_beside_those_it_does(tmp_path: Path) -> None:
    told = r"has images of \(1, 28, 28\), but model vgg9 takes \(3, 32, 32\)"
    with pytest.raises(ConfigError, match=told):
        prepare(small_config(tmp_path, "model.name=vgg9"))


def test_another_own_method_is_noticed_and_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    writer = RunWriter.create(tmp_path / "run", to_toml(config))
    list(keep(play(config), config, writer))
    before = {p.name: p.read_bytes() for p in writer.folder.iterdir()}
    file = f"methods/{config.run.method}.py"
    monkeypatch.setattr("anycostfl.runs.own_files", lambda: {file: "changed"})
    with pytest.raises(AnycostError, match="begun with another methods/"):
        take_up(writer.folder)
    assert {p.name: p.read_bytes() for p in writer.folder.iterdir() if p.name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }


def test_other_data_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    assert config.data.name.endswith(".npz")
    writer = begin(tmp_path / "run", config)
    list(keep(play(config), config, writer))
    take_up(writer.folder)
    with Path(config.data.name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(AnycostError, match=r"begun with another .*\.npz"):
        take_up(writer.folder)


def test_a_run_that_goes_on_elsewhere_is_left_alone(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    writer = RunWriter.create(tmp_path / "run", to_toml(config))
    turns = keep(play(config), config, writer)
    next(turns)
    with pytest.raises(InUseError, match="working on"):
        take_up(writer.folder)
    turns.close()
    assert len(take_up(writer.folder).records) == 1


def test_a_mistake_in_a_worker_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "mine" / "methods" / "broken.py"
    broken.parent.mkdir(parents=True)
    broken.write_text(
        "from dataclasses import replace\n"
        "from anycostfl.methods import load\n"
        "def encode(update, upload):\n"
        "    return {}['nothing']\n"
        "METHOD = replace(load('fedavg'), encode=encode)\n"
    )
    monkeypatch.setenv("ANYCOSTFL_PATH", str(tmp_path / "mine"))
    where = [f"--set={change}" for change in small_overrides(tmp_path, "run.method=broken")]
    done = subprocess.run(
        [sys.executable, "-m", "anycostfl", "run", "--workers=2", "--out=a-run", *where],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "broken.py" in done.stderr
    assert "KeyError: 'nothing'" in done.stderr


OWN_MODEL = """
import torch
from torch import nn
from anycostfl.models import ModelSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = {layers}

    def forward(self, images):
        return self.out(self.norm(self.hidden(images.flatten(1).to(self.out.weight.dtype))))

MODEL = ModelSpec(build=Net, example=lambda batch: torch.randn(batch, 1, 28, 28), summary="own")
"""


def run_own_model(folder: Path, layers: str, workers: int, *changes: str) -> list[RoundRecord]:
    file, out = folder / "mine" / "models" / "own.py", folder / f"by-{workers}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OWN_MODEL.format(layers=layers))
    changes = (*small_overrides(folder, "model.name=own", "run.rounds=2"), *changes)
    done = subprocess.run(
        [sys.executable, "-m", "anycostfl", "run", f"--workers={workers}", f"--out={out}"]
        + [f"--set={change}" for change in changes],
        env={**os.environ, "ANYCOSTFL_PATH": str(folder / "mine")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(read_run(out).records)


def test_a_device_that_cannot_train_fails_and_the_run_goes_on(tmp_path: Path) -> None:
    layers = "nn.Linear(784, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)"
    records = run_own_model(tmp_path, layers, 1, "fleet.devices=240", "fleet.samples=1")
    statuses = [d.status for record in records for d in record.devices]
    assert len(statuses) == 8
    assert all(s.startswith("failed: one sample is too few for this model") for s in statuses)


def test_any_type_of_tensor_goes_to_workers_and_back(tmp_path: Path) -> None:
    layers = "(m.bfloat16() for m in (nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)))"
    alone, together = (
        run_own_model(tmp_path, layers, workers, "compression.feedback=true") for workers in (1, 2)
    )
    assert alone == together
    assert {d.status for record in alone for d in record.devices} == {"ok"}


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2")
    other = small_config(tmp_path, "run.rounds=2", "run.seed=1")
    first = list(play(config))
    torch.manual_seed(123)
    np.random.default_rng().random()
    assert same(first, list(play(config)))
    assert not same(first, list(play(other)))


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_any_round_ends_the_same(tmp_path: Path, kind: tuple[str, ...]) -> None:
    config = small_config(tmp_path, *kind, "run.rounds=4")
    whole = list(play(config))
    for turn in whole[:-1]:
        rest = list(play(config, start=turn.after))
        assert same([*whole[: turn.after.rounds], *rest], whole)


def test_training_learns(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=12", "fleet.energy_min_j=0.04")
    accuracies = [turn.record.accuracy or 0 for turn in play(config)]
    assert accuracies[-1] > accuracies[0] + 0.3


def test_devices_pay_for_the_bytes_they_sent_and_the_flops_they_cut(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=2")
    for turn in play(config):
        for d in turn.record.devices:
            assert d.status == "ok"
            cycles = d.samples * config.workload.flops_per_sample * d.flops_ratio / 33.36
            assert d.compute_s == pytest.approx(cycles / d.frequency_hz)
            assert d.upload_s == pytest.approx(8 * d.bytes_up / d.rate_bps)
            assert d.upload_j == pytest.approx(0.1 * d.upload_s)
            promised = d.alpha * d.beta * config.workload.size_bits / 8
            assert 0.9 * promised < d.bytes_up <= promised


def test_every_device_stays_within_its_budgets(tmp_path: Path) -> None:
    """Up to how far the FLOPs of a cut exceed α, which the width rule bounds."""
    config = small_config(tmp_path, "model.widths=fast")
    for turn in play(config):
        for d in turn.record.devices:
            assert d.latency_s <= config.fleet.latency_s * 1.01
            assert d.energy_j <= d.budget_j * 1.01


def test_a_round_nobody_can_afford_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, "run.rounds=2", "fleet.energy_min_j=1e-9", "fleet.energy_max_j=2e-9"
    )
    first, second = play(config)
    assert {d.status for d in first.record.devices} == {"sat out: radio"}
    assert first.record.energy_j == 0
    assert first.record.accuracy == second.record.accuracy
    untrained = prepare(config).shared.weights
    for name, tensor in final([second]).items():
        assert float(tensor.norm()) == pytest.approx(float(untrained[name].norm()), rel=1e-4)


def test_a_nan_loss_is_refused_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    honest = DeviceSide.perform
    victims: list[int] = []

    def perform(self: DeviceSide, job: Job) -> Reply:
        if not victims:
            victims.append(job.device)
            self.shared.train_images[self.samples_of(job.device)] = math.nan
        return honest(self, job)

    monkeypatch.setattr(DeviceSide, "perform", perform)
    (turn,) = play(config)
    statuses = {d.device: d.status for d in turn.record.devices}
    assert statuses.pop(victims[0]).startswith("failed: ")
    assert set(statuses.values()) == {"ok"}
    assert all(torch.isfinite(t).all() for t in final([turn]).values())


@pytest.mark.parametrize("method", methods.names())
def test_a_damaged_payload_is_refused_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    config = small_config(tmp_path, "run.rounds=1", f"run.method={method}")
    honest = DeviceSide.perform

    def perform(self: DeviceSide, job: Job) -> Reply:
        reply = honest(self, job)
        damaged = bytes([*reply.payload[:40], reply.payload[40] ^ 1, *reply.payload[41:]])
        return Reply(reply.device, damaged, memory=reply.memory)

    monkeypatch.setattr(DeviceSide, "perform", perform)
    (turn,) = play(config)
    assert {d.status.split(": ")[1] for d in turn.record.devices} <= {"damaged", "malformed"}
    assert all(d.status.startswith("refused: ") for d in turn.record.devices)


def test_a_payload_of_another_round_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "run.rounds=2", "fleet.cohort=12")
    honest = DeviceSide.perform
    kept: dict[int, Reply] = {}

    def perform(self: DeviceSide, job: Job) -> Reply:
        reply = honest(self, job)
        return kept.setdefault(job.device, reply)  # in the second round, the first one's again

    monkeypatch.setattr(DeviceSide, "perform", perform)
    first, second = play(config)
    assert {d.status for d in first.record.devices} == {"ok"}
    causes = {d.status.split(": ")[1] for d in second.record.devices}
    assert all(d.status.startswith("refused: ") for d in second.record.devices)
    assert "foreign" in causes
    assert causes <= {"foreign", "malformed"}  # too long for the new plan is found out first


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
    (turn,) = play(config)
    state = final([turn])
    assert state["norm.running_mean"].abs().max() > 0
    assert all(torch.isfinite(t).all() for t in state.values() if t.is_floating_point())


def test_a_cohort_larger_than_the_fleet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most devices"):
        small_config(tmp_path, "fleet.cohort=13")


def test_seeds_differ_in_every_argument() -> None:
    seeds = {
        draw_seed(seed, number, device, purpose)
        for seed in range(3)
        for number in range(3)
        for device in range(3)
        for purpose in Purpose
    }
    assert len(seeds) == 3 * 3 * 3 * len(Purpose)


def test_momentum_is_the_methods_unless_asked_for(tmp_path: Path) -> None:
    def momentum(*changes: str) -> float | None:
        return Server(small_config(tmp_path, *changes)).rules.momentum

    assert momentum() == 0.0
    assert momentum("run.method=anycostfl+") == 0.5
    assert momentum("run.method=anycostfl+", "aggregation.momentum=0") == 0.0
    assert momentum("aggregation.momentum=0.3") == 0.3


@pytest.mark.parametrize("first", ["simulated", "over flower"])
def test_with_feedback_a_run_goes_on_where_it_began(tmp_path: Path, first: str) -> None:
    config = settle(small_config(tmp_path, "run.method=stc", "run.rounds=3"))
    writer = RunWriter.create(tmp_path / "run", to_toml(config))
    turns = keep(play(config), config, writer)
    turn = next(turns)
    turns.close()
    if first == "over flower":  # where devices keep their memories
        writer.checkpoint(replace(turn.after, memories={}))
    before = take_up(tmp_path / "run")
    simulated = first == "simulated"
    check_engine(before, simulated=simulated)
    with pytest.raises(AnycostError, match="run --resume" if simulated else "--engine flower"):
        check_engine(before, simulated=not simulated)
