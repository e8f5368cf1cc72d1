"""Tasks of the package: real samples with their owners, as their files have them."""

from __future__ import annotations

import gzip
import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anycostfl import Metric, Task, tasks
from anycostfl.data import idx
from anycostfl.data.prepare import prepare_dataset
from anycostfl.data.samples import Dataset, Samples
from anycostfl.errors import AnycostError, ConfigError, TaskError, UnknownNameError
from anycostfl.tasks import cifar10, fashion_mnist, spoken_digits

OWNED = {  # owners to train on, owners to test on, training samples, shape of an input
    "spoken-digits": (48, 60, 3360, (1, 32, 32)),
    "shakespeare": (141, 156, None, (80,)),
    "air": (12, 12, None, (13, 24)),
    "heart": (4, 4, None, (13,)),
    "fashion-masks": (32, 40, 4000, (1, 48, 48)),
}


def owners_of(samples: Samples) -> set[int]:
    assert samples.owners is not None
    return set(samples.owners.tolist())


# --- the tasks of the package ---------------------------------------------------------------------


@pytest.mark.parametrize("name", OWNED)
def test_every_embedded_task_has_samples_by_owner(name: str) -> None:
    training, testing, count, shape = OWNED[name]
    dataset = tasks.load(name).dataset()
    assert dataset.train.inputs.shape[1:] == shape
    assert len(owners_of(dataset.train)) == training
    assert count in (None, len(dataset.train))
    assert len(owners_of(dataset.test)) >= testing


def same(one: Tensor, other: Tensor) -> bool:
    """Whether any row of one is a row of the other."""
    rows = {row.numpy().tobytes() for row in one.flatten(1)}
    return any(row.numpy().tobytes() in rows for row in other.flatten(1))


def test_no_test_sample_is_trained_on() -> None:
    dataset = tasks.load("spoken-digits").dataset()
    assert not same(dataset.train.inputs, dataset.test.inputs)


def test_the_embedded_images_are_balanced_and_the_first_of_the_whole() -> None:
    dataset = tasks.load("embedded").dataset()
    assert dataset.train.inputs.shape == (8000, 1, 28, 28)
    assert torch.equal(torch.bincount(dataset.train.targets), torch.full((10,), 800))
    assert torch.equal(torch.bincount(dataset.test.targets), torch.full((10,), 200))
    file = Path(fashion_mnist.PLACES[0], "train-images-idx3-ubyte.gz")
    if not file.is_file():
        pytest.skip("the whole of Fashion-MNIST is not on this machine")
    whole = idx.read_idx(file.read_bytes())[:5]
    assert dataset.train.inputs[:5, 0].tolist() == whole.tolist()


def test_the_number_of_threads_does_not_show_in_the_data() -> None:
    task = tasks.load("embedded")
    assert task.preparation is not None
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(prepare_dataset(task.preparation, task.dataset()).train.inputs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert found[0].mean().abs() < 1e-5
    assert float(found[0].std()) == pytest.approx(1, abs=1e-5)


# --- Fashion-MNIST's files ------------------------------------------------------------------------


def packed(shape: tuple[int, ...], values: bytes) -> bytes:
    return b"\x00\x00\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


def test_idx_files_are_read_gzipped_or_not() -> None:
    raw = packed((2, 3), bytes(range(6)))
    assert idx.read_idx(raw).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert idx.read_idx(gzip.compress(raw)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("damaged", [b"", b"PK", packed((2, 3), bytes(5)), packed((9,), b"")[:6]])
def test_damaged_idx_files_are_refused(damaged: bytes) -> None:
    with pytest.raises(ConfigError, match="idx file"):
        idx.read_idx(damaged)


def test_a_folder_that_lacks_a_file_or_has_half_of_one_says_so(tmp_path: Path) -> None:
    images = tmp_path / "train-images-idx3-ubyte.gz"
    whole = gzip.compress(packed((2, 3, 3), bytes(18)))
    images.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match="train-images-idx3"):
        tasks.load("fashion-mnist").dataset(str(tmp_path))
    images.write_bytes(whole)
    with pytest.raises(ConfigError, match="train-labels-idx1"):
        tasks.load("fashion-mnist").dataset(str(tmp_path))


# --- CIFAR-10's files -----------------------------------------------------------------------------


def test_original_cifar_batches_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in [*cifar10.BATCHES, "test_batch.bin"]:
        rows = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(4)
        rows.tofile(tmp_path / name)
    first = np.fromfile(tmp_path / cifar10.BATCHES[0], np.uint8)
    dataset = tasks.load("cifar10").dataset(str(tmp_path))
    assert dataset.train.inputs.shape == (20, 3, 32, 32)
    assert dataset.train.targets[:4].tolist() == [0, 1, 2, 3]
    assert dataset.train.inputs[0].flatten().tolist() == first[1:3073].tolist()


def test_parquet_in_the_hubs_layout_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    parquet = pytest.importorskip("pyarrow.parquet")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "png")
    cells = [{"bytes": file.getvalue(), "path": None}] * 2
    for part in ("train", "test"):
        table = pa.table({"img": cells, "label": [3, 1]})
        parquet.write_table(table, tmp_path / f"{part}-00000-of-00001.parquet")
    dataset = tasks.load("cifar10").dataset(str(tmp_path))
    assert dataset.test.targets.tolist() == [3, 1]
    assert dataset.test.inputs[0].tolist() == pixels.transpose(2, 0, 1).tolist()


@pytest.mark.parametrize("content", [b"", b"words", bytes(3072)])
def test_damaged_cifar_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073))
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data_batch_[23]\.bin cannot be read"):
        tasks.load("cifar10").dataset(str(tmp_path))
    pytest.importorskip("pyarrow")
    (tmp_path / "train-0.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"train-0\.parquet cannot be read"):
        tasks.load("cifar10").dataset(str(tmp_path))


def test_augmented_images_are_shifted_and_mirrored_ones() -> None:
    image = torch.arange(1.0, 2 * 32 * 32 + 1).view(1, 2, 32, 32)
    images, labels = image.repeat(300, 1, 1, 1), torch.arange(300)
    random = torch.Generator().manual_seed(0)
    changed, kept = cifar10.augment(images, labels, random)
    assert kept is labels
    padded = F.pad(image[0], (4, 4, 4, 4))
    views = {
        shown.numpy().tobytes(): (top, left, mirrored)
        for top in range(9)
        for left in range(9)
        for mirrored in (False, True)
        for shown in [padded[:, top : top + 32, left : left + 32]]
        for shown in [(shown.flip(2) if mirrored else shown).contiguous()]
    }
    seen = [views[one.contiguous().numpy().tobytes()] for one in changed]  # a view, every time
    assert len(set(seen)) > 100
    assert 100 < sum(mirrored for _, _, mirrored in seen) < 200


# --- recordings and windows -----------------------------------------------------------------------


def test_audiomnists_own_recordings_are_read(tmp_path: Path) -> None:
    """Four speakers, of whom the fifth of five is held out, say two digits twice."""
    at = np.arange(int(0.5 * 48_000)) / 48_000
    for speaker in (1, 2, 3, 5):
        for digit in (0, 9):
            for take in (0, 1):
                hertz = 300 * (digit + 1) + 10 * speaker + take
                path = tmp_path / f"{speaker:02}" / f"{digit}_{speaker:02}_{take}.wav"
                path.parent.mkdir(exist_ok=True)
                with wave.open(str(path), "wb") as file:
                    file.setnchannels(1)
                    file.setsampwidth(2)
                    file.setframerate(48_000)
                    file.writeframes(
                        (9000 * np.sin(2 * np.pi * hertz * at)).astype("<i2").tobytes()
                    )
    dataset = tasks.load("spoken-digits").dataset(str(tmp_path))
    assert dataset.owner_names == ("1", "2", "3", "5")
    assert owners_of(dataset.train) == {0, 1, 2}
    assert dataset.train.targets.tolist() == [0, 9] * 3  # all but the last take
    assert len(dataset.test) == 3 * 2 + 4  # last takes, and all of the held-out speaker
    assert dataset.train.inputs.dtype is torch.uint8


def test_a_spectrogram_has_its_energy_where_the_tone_is() -> None:
    at = np.arange(8000) / 8000
    bands = [
        int(spoken_digits.log_mel(np.sin(2 * np.pi * hertz * at), 8000)[0, :, 16].argmax())
        for hertz in (200, 600, 1500, 3000)
    ]
    assert bands == sorted(set(bands))
    quiet, loud = (
        spoken_digits.log_mel(level * np.sin(2 * np.pi * 600 * at), 8000) for level in (0.01, 1)
    )
    assert np.abs(quiet.astype(int) - loud).max() <= 4  # volume does not matter


def test_the_folder_of_uci_har_is_read(tmp_path: Path) -> None:
    """Two persons do two activities, one of them twice: its second bout is held out."""
    random = np.random.default_rng(0)
    for part, persons in (("train", [1] * 6 + [3] * 4), ("test", [2] * 2)):
        folder = tmp_path / "UCI HAR Dataset" / part
        (folder / "Inertial Signals").mkdir(parents=True)
        activities = ([1, 1, 4, 4, 1, 1, 1, 1, 4, 4] if part == "train" else [1, 4])[: len(persons)]
        np.savetxt(folder / f"y_{part}.txt", activities, "%d")
        np.savetxt(folder / f"subject_{part}.txt", persons, "%d")
        for axis in "xyz":
            for signal in ("total_acc", "body_gyro"):
                np.savetxt(
                    folder / "Inertial Signals" / f"{signal}_{axis}_{part}.txt",
                    random.normal(size=(len(persons), 128)),
                )
    dataset = tasks.load("har").dataset(str(tmp_path))
    assert dataset.train.inputs.shape == (2, 6, 128)  # the first bout of person 1
    assert dataset.train.targets.tolist() == [0, 0]
    assert owners_of(dataset.test) == {0, 1, 2}
    (tmp_path / "UCI HAR Dataset" / "train" / "y_train.txt").write_text("walking")
    with pytest.raises(ConfigError, match=r"y_train\.txt cannot be read"):
        tasks.load("har").dataset(str(tmp_path))


# --- tasks that a person makes --------------------------------------------------------------------

X, Y = torch.randn(40, 3), torch.arange(40) % 2


def test_without_a_test_set_every_owner_keeps_a_tenth() -> None:
    task = Task(train=(X, Y), owners=[i // 10 for i in range(40)])
    dataset = task.dataset()
    assert len(dataset.test) == 4
    assert owners_of(dataset.test) == {0, 1, 2, 3}
    again = Task(train=(X, Y), owners=[i // 10 for i in range(40)]).dataset()
    assert torch.equal(again.test.inputs, dataset.test.inputs)
    assert not same(dataset.train.inputs, dataset.test.inputs)


def test_an_only_sample_is_trained_on() -> None:
    dataset = Task(train=(X, Y), owners=[0] * 39 + [1]).dataset()
    assert owners_of(dataset.train) == {0, 1}
    assert owners_of(dataset.test) == {0}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, r"either train=\(inputs, targets\) or load=function"),
        ({"train": (X, Y), "load": lambda _: None}, "either train"),
        ({"train": X}, r"train: given Tensor, must be \(inputs, targets\)"),
        ({"train": (X, Y), "test": (X,)}, r"test: given tuple, must be"),
        ({"train": (X, Y), "loss": "mse"}, "loss: given 'mse', must be a function"),
        ({"train": (X, Y), "metric": "f1"}, "f1"),
        ({"train": (X, Y), "metric": 3}, "metric: given 3, must be a Metric or one of"),
        ({"train": (X, Y), "metric": []}, r"metric: given \[\], must be a Metric or one of"),
        ({"train": (X, Y), "prepare": "scale"}, "prepare: given 'scale', must be \"auto\""),
        ({"train": (X, Y), "owners": [0] * 3}, "40 inputs, 40 targets, 3 owners"),
        ({"train": (X, Y), "owners": []}, r"owners: given .* of shape \(0,\), must be one"),
        ({"train": (X[:0], Y[:0])}, "0 training samples"),
        ({"train": (X[:3], Y[:3])}, "3 training samples are too few to hold some out"),
    ],
)
def test_a_task_that_makes_no_sense_says_why(given: dict[str, object], told: str) -> None:
    with pytest.raises(AnycostError, match=told):
        Task(**given)  # type: ignore[arg-type]


def test_a_metric_may_be_a_function_of_ones_own() -> None:
    gap = Metric.mean("gap", lambda o, t: (o - t).abs(), higher_is_better=False)
    task = Task(train=(X, X), loss=F.mse_loss, metric=(gap, "rmse"))
    assert [metric.name for metric in task.metrics] == ["gap", "rmse"]


def test_a_task_can_be_given_again_without_its_samples() -> None:
    task = Task(train=(X, Y)).without_data()
    with pytest.raises(TaskError, match="no samples of its own"):
        task.dataset()


def test_the_task_of_a_file_follows_from_its_targets(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    for targets, metric in ((np.arange(4), "accuracy"), (np.arange(4) / 2, "mae")):
        np.savez(path, train_inputs=np.zeros((4, 2)), train_targets=targets)
        task = tasks.load(str(path))
        assert task.metrics[0].name == metric
        assert isinstance(task.dataset(), Dataset)
        with pytest.raises(ConfigError, match=r"data\.path: given 'folder'"):
            task.dataset("folder")


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="embedded, fashion-masks, fashion-mnist"):
        tasks.load("imagenet")
