"""Datasets are read as they are, partitions are partitions."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl import data
from anycostfl.errors import ConfigError, UnknownNameError


def test_the_embedded_part_is_balanced_and_normalised() -> None:
    dataset = data.load("embedded")
    assert dataset.train_images.shape == (8000, 1, 28, 28)
    assert torch.equal(torch.bincount(dataset.train_labels), torch.full((10,), 800))
    assert torch.equal(torch.bincount(dataset.test_labels), torch.full((10,), 200))
    assert abs(float(dataset.train_images.mean())) < 1e-3
    assert float(dataset.train_images.std()) == pytest.approx(1, abs=1e-3)


def test_the_embedded_part_is_the_beginning_of_the_whole() -> None:
    folder = Path(data.FASHION_MNIST_PLACES[0])
    if not folder.is_dir():
        pytest.skip("the whole of Fashion-MNIST is not on this machine")
    whole = data.read_idx((folder / "train-images-idx3-ubyte.gz").read_bytes())
    small = Path(data.__file__).parent / "embedded/fashion-mnist/train-images-idx3-ubyte.gz"
    assert (data.read_idx(small.read_bytes())[:5] == whole[:5]).all()


def idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return b"\x00\x00\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


def test_idx_files_are_read_gzipped_or_not() -> None:
    raw = idx((2, 3), bytes(range(6)))
    assert data.read_idx(raw).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert data.read_idx(gzip.compress(raw)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("damaged", [b"", b"PK", idx((2, 3), bytes(5)), idx((9, 9), b"")[:6]])
def test_damaged_idx_files_are_refused(damaged: bytes) -> None:
    with pytest.raises(ConfigError):
        data.read_idx(damaged)


def test_a_folder_that_lacks_a_file_or_has_half_of_one_says_so(tmp_path: Path) -> None:
    images, whole = tmp_path / "train-images-idx3-ubyte.gz", gzip.compress(idx((2, 3), bytes(6)))
    images.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match="train-images-idx3"):
        data.load("fashion-mnist", str(tmp_path))
    images.write_bytes(whole)
    with pytest.raises(ConfigError, match="train-labels-idx1"):
        data.load("fashion-mnist", str(tmp_path))


def test_original_cifar_batches_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        rows = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(4)
        rows.tofile(tmp_path / name)
    first = np.fromfile(tmp_path / "data_batch_1.bin", np.uint8)
    dataset = data.load("cifar10", str(tmp_path))
    assert dataset.train_images.shape == (20, 3, 32, 32)
    # Normalising keeps the order of pixels within one colour.
    red = torch.from_numpy(first[1:1025].astype(np.float32))
    read = dataset.train_images[0, 0].flatten()
    assert torch.equal(red.argsort(stable=True), read.argsort(stable=True))


def test_parquet_in_the_hubs_layout_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    import io

    import pyarrow.parquet as pq

    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "png")
    cells = [{"bytes": file.getvalue(), "path": None}, {"bytes": file.getvalue(), "path": None}]
    for split in ("train", "test"):
        table = pa.table({"img": cells, "label": [3, 1]})
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    dataset = data.load("cifar10", str(tmp_path))
    assert dataset.test_labels.tolist() == [3, 1]
    assert dataset.classes == 4


def test_your_own_arrays_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, train_images=np.zeros((4, 5, 5)), train_labels=np.arange(3))
    with pytest.raises(ConfigError, match=r"test_images: missing"):
        data.load(str(path))
    np.savez(
        path,
        train_images=np.zeros((4, 5)),
        train_labels=np.arange(3),
        test_images=np.zeros((2, 5, 5)),
        test_labels=np.arange(2),
    )
    problems = r"(?s)train_images: given shape \(4, 5\).*4 images but labels of shape \(3,\)"
    with pytest.raises(ConfigError, match=problems):
        data.load(str(path))


def test_numbers_of_another_machine_are_numbers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 4000, (6, 5, 5))
    found = []
    for kind in ("<u2", ">u2", ">f4", np.longdouble):
        path, labels = tmp_path / "mine.npz", np.arange(6).astype(">i4")
        given = images.astype(kind)
        np.savez(
            path, train_images=given, train_labels=labels, test_images=given, test_labels=labels
        )
        found.append(data.load(str(path)).train_images)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.array([0, -1, 2, 3]), "given -1, allowed whole numbers"),
        (np.array(["a", "b", "c", "d"]), "given <U1, allowed whole numbers"),
        (np.array([0.0, 0.5, 2, 3]), "given float64"),
        (np.array([0, 1, 2, 2**63 + 5], np.uint64), "given 9223372036854775813, allowed whole"),
        (np.zeros((4, 1), int), r"labels of shape \(4, 1\), allowed one label for each image"),
    ],
)
def test_labels_are_whole_numbers(tmp_path: Path, labels: object, told: str) -> None:
    images = np.zeros((4, 5, 5), np.uint8)
    path = tmp_path / "mine.npz"
    np.savez(
        path,
        train_images=images,
        train_labels=np.asarray(labels),
        test_images=images,
        test_labels=np.arange(4),
    )
    with pytest.raises(ConfigError, match=told):
        data.load(str(path))


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (np.full((4, 5, 5), np.nan), "not finite"),
        (np.full((4, 5, 5), 1e300), "beyond 1e"),
        (np.zeros((4, 5, 5), complex), "given complex128, allowed real numbers"),
        (np.full((4, 5, 5), "x"), "given <U1, allowed real numbers"),
        (np.float32(3), r"given shape \(\)"),
        (
            np.zeros((4, 5, 6)),
            r"train_images of \(5, 6\) and test_images of \(5, 5\), must have one",
        ),
    ],
)
def test_images_are_finite_numbers_of_one_size(tmp_path: Path, images: object, told: str) -> None:
    path = tmp_path / "mine.npz"
    np.savez(
        path,
        train_images=np.asarray(images),
        train_labels=np.arange(4),
        test_images=np.zeros((2, 5, 5)),
        test_labels=np.arange(2),
    )
    with pytest.raises(ConfigError, match=told):
        data.load(str(path))


def test_a_folder_that_is_named_is_the_only_one_looked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    for name in ("train", "t10k"):
        (full / f"{name}-images-idx3-ubyte.gz").write_bytes(idx((2, 3, 3), bytes(range(18))))
        (full / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx((2,), bytes(2)))
    monkeypatch.setenv("ANYCOSTFL_DATA", str(full))
    assert len(data.load("fashion-mnist").train_labels) == 2
    with pytest.raises(data.DataMissingError, match="is not in /no/such/folder"):
        data.load("fashion-mnist", "/no/such/folder")
    with pytest.raises(ConfigError, match="embedded needs none"):
        data.load("embedded", str(full))


@pytest.mark.parametrize("content", [b"", b"words", bytes(3072)])
def test_damaged_cifar_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073))
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data_batch_[23]\.bin cannot be read"):
        data.load("cifar10", str(tmp_path))
    pytest.importorskip("pyarrow")
    (tmp_path / "train-0.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"train-0\.parquet cannot be read"):
        data.load("cifar10", str(tmp_path))


def test_a_file_that_is_no_npz_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, train_images=np.zeros(9))
    cut = path.read_bytes()[:50]
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (b"", b"words", cut, (tmp_path / "one.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"not an \.npz file"):
            data.load(str(path))


def test_what_is_missing_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "FASHION_MNIST_PLACES", (str(tmp_path),))
    monkeypatch.delenv("ANYCOSTFL_DATA", raising=False)
    with pytest.raises(data.DataMissingError, match=r"dataset-fashion-mnist.*data.path"):
        data.load("fashion-mnist")
    with pytest.raises(data.DataMissingError, match="parquet"):
        data.load("cifar10")
    with pytest.raises(UnknownNameError, match="embedded, fashion-mnist, cifar10"):
        data.load("imagenet")


@given(st.integers(1, 40), st.integers(0, 5))
def test_equal_parts_are_a_partition(devices: int, seed: int) -> None:
    parts = data.split_iid(np.zeros(100), devices, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 12), st.floats(0.3, 100), st.integers(0, 5))
def test_dirichlet_parts_are_a_partition(devices: int, concentration: float, seed: int) -> None:
    labels = np.arange(2000) % 10
    parts = data.split_dirichlet(labels, devices, concentration, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(2000))
    assert min(map(len, parts)) >= 1


def test_a_small_concentration_is_more_uneven() -> None:
    def unevenness(concentration: float) -> float:
        labels = np.arange(6000) % 10
        parts = data.split_dirichlet(labels, 20, concentration, np.random.default_rng(0))
        shares = np.stack([np.bincount(labels[p], minlength=10) / len(p) for p in parts])
        return float(shares.std())

    assert unevenness(0.3) > 2 * unevenness(10)


def test_more_devices_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 5"):
        data.split_iid(np.zeros(5), 6, np.random.default_rng(0))


def test_the_number_of_threads_does_not_show_in_the_data() -> None:
    before = torch.get_num_threads()
    try:
        loaded = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            loaded.append(data.load("embedded").train_images)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*loaded)
    assert loaded[0].mean().abs() < 1e-5
    assert abs(float(loaded[0].std()) - 1) < 1e-5
