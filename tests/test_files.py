"""Samples are read from files as they are; what is no such file says so, and is named."""

from __future__ import annotations

import sys
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anycostfl import tasks
from anycostfl.data import files
from anycostfl.data.files import read_arrays, read_csv, read_folder, read_own, read_wav
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.tasks.spoken_digits import log_mel


def save(path: Path, **arrays: Any) -> Path:
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez(path, **arrays)
    return path


def write_wav(path: Path, values: np.ndarray[Any, Any], width: int = 2, channels: int = 1) -> Path:
    """A recording at 8 kHz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(values.tobytes())
    return path


# --- arrays ---------------------------------------------------------------------------------------


def test_arrays_with_owners_who_have_names(tmp_path: Path) -> None:
    path = save(
        tmp_path / "mine.npz",
        train_inputs=np.zeros((3, 4)),
        train_targets=np.arange(3),
        train_owners=[5, 5, 8],
        test_inputs=np.zeros((1, 4)),
        test_targets=[0],
        test_owners=[8],
        owner_names=[f"number {n}" for n in range(9)],
    )
    dataset = read_arrays(path)
    assert dataset.owner_names == ["number 5", "number 8"]
    assert dataset.train.owners is not None
    assert dataset.train.owners.tolist() == [0, 0, 1]


def test_images_are_stored_with_channels_last(tmp_path: Path) -> None:
    grey = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    colours = np.arange(2 * 3 * 4 * 3).reshape(2, 3, 4, 3)
    for given, wanted in ((grey, grey[:, None]), (colours, colours.transpose(0, 3, 1, 2))):
        path = save(tmp_path / "mine.npz", train_images=given, train_labels=[0, 1])
        assert read_arrays(path).train.inputs.tolist() == wanted.tolist()


def test_numbers_of_another_machine_are_numbers(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).integers(0, 4000, (6, 5))
    found = [
        read_arrays(
            save(tmp_path / "mine.npz", inputs=inputs.astype(kind), targets=np.arange(6, dtype=to))
        ).train
        for kind, to in ((">f4", ">i4"), (np.longdouble, "<i8"), ("<f2", "u1"))
    ]
    assert all(torch.equal(found[0].inputs, other.inputs) for other in found[:2])
    assert all(torch.equal(found[0].targets, other.targets) for other in found)


def test_a_file_that_is_no_npz_says_so(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.npz", train_inputs=np.zeros(9))
    cut = path.read_bytes()[:50]
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (b"", b"words", cut, (tmp_path / "one.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"(?s)mine\.npz.*not an \.npz file"):
            read_arrays(path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    hostile = np.array([{"a": print}], object)
    np.savez(path, train_inputs=hostile, train_targets=np.zeros(1))
    with pytest.raises(ConfigError, match="must hold plain numbers"):
        read_arrays(path)


def test_a_small_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE", 1 << 20)
    path = tmp_path / "mine.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("train_inputs.npy", bytes(2 << 20))
    assert path.stat().st_size < 10_000
    with pytest.raises(ConfigError, match="unpacked, must be at most"):
        read_arrays(path)


def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.npz", train_inputs=np.zeros((3, 4)))
    with pytest.raises(ConfigError, match=r"(?s)mine\.npz.*train_inputs and train_targets"):
        read_arrays(path)
    save(path, train_inputs=np.full((3, 4), np.nan), train_targets=np.arange(2))
    with pytest.raises(ConfigError, match=r"(?s)mine\.npz.*sample 0 holds nan"):
        read_arrays(path)
    with pytest.raises(AnycostError, match="there is no file"):
        read_arrays(tmp_path / "none.npz")


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inputs", "targets", "kind"),
    [
        ("1,2,0\n3,4,1\n", [[1, 2], [3, 4]], [0, 1], np.int64),
        ("a,b,c\n1,2,0\n3,4,1\n", [[1, 2], [3, 4]], [0, 1], np.int64),
        ("\ufefftarget,b\n0.5,2\n1,4\n\n", [[2], [4]], [0.5, 1], np.float32),
        ("b,target,c\n1,-1,2\n", [[1, 2]], [-1], np.int64),
    ],
)
def test_a_table_has_a_row_for_each_sample(
    text: str, inputs: object, targets: object, kind: type, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    read, wanted = read_csv(path)
    assert read.tolist() == inputs
    assert wanted.tolist() == targets
    assert wanted.dtype == kind


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "given no rows"),
        ("a,b\n", "given no rows"),
        ("1\n2\n", "given one column, must be at least two"),
        ("1,2\n1,2,3\n", "row 2: given 3 values, must be 2"),
        ("a,b\n1,2\nx,2\n", "row 2: given 'x', must be a number"),
        ("1,cat\n2,dog\n", "target: given 'cat', must be a number; number the classes"),
    ],
)
def test_a_table_that_cannot_be_used_says_where(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_csv(path)


def test_a_table_of_other_bytes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"(?s)mine\.csv.*cannot be read"):
        read_csv(path)


# --- folders --------------------------------------------------------------------------------------


def tone(hertz: float, seconds: float = 0.6) -> np.ndarray[Any, Any]:
    at = np.arange(int(8000 * seconds)) / 8000
    return (20_000 * np.sin(2 * np.pi * hertz * at)).astype("<i2")


def test_recordings_become_what_the_task_makes_of_them(tmp_path: Path) -> None:
    for digit in ("3", "7"):
        write_wav(tmp_path / digit / "one.wav", tone(200 * int(digit)))
    (tmp_path / "7" / "notes.txt").write_text("not a recording")
    inputs, targets = read_folder(tmp_path, tuple("0123456789"), log_mel)
    assert targets.tolist() == [3, 7]
    assert inputs.shape == (2, 1, 32, 32)
    loudest = inputs[:, 0].mean(axis=2).argmax(axis=1)  # the band of each tone
    assert loudest[0] < loudest[1]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_recordings_of_any_width_are_numbers_from_minus_one_to_one(
    width: int, channels: int, tmp_path: Path
) -> None:
    kind, top = {1: ("<u1", 128.0), 2: ("<i2", 2.0**15), 4: ("<i4", 2.0**31)}[width]
    wanted = np.repeat(np.array([-1.0, -0.5, 0.0, 0.5]), channels)
    values = (wanted * top + (128 if width == 1 else 0)).astype(kind)
    read, rate = read_wav(write_wav(tmp_path / "a.wav", values, width, channels))
    assert rate == 8000
    assert read.tolist() == [-1.0, -0.5, 0.0, 0.5]


def test_folders_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given no CLASS"):
        read_folder(tmp_path, (), log_mel)
    write_wav(tmp_path / "cat" / "a.wav", tone(300))
    with pytest.raises(ConfigError, match="cat: must be a class of this task, 0, 1"):
        read_folder(tmp_path, ("0", "1"), log_mel)
    with pytest.raises(ConfigError, match="the task has no transform for recordings"):
        read_folder(tmp_path, (), None)
    (tmp_path / "cat" / "b.wav").write_bytes(b"RIFF but not quite")
    with pytest.raises(ConfigError, match=r"(?s)b\.wav.*not a \.wav file"):
        read_folder(tmp_path, (), log_mel)


def test_images_of_a_folder_are_of_one_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, size in (("a", (6, 5)), ("b", (6, 5))):
        (tmp_path / name).mkdir()
        image.fromarray(np.zeros((size[1], size[0], 3), np.uint8)).save(tmp_path / name / "x.png")
    inputs, targets = read_folder(tmp_path, (), None)
    assert inputs.shape == (2, 3, 5, 6)
    assert targets.tolist() == [0, 1]
    image.fromarray(np.zeros((7, 7), np.uint8)).save(tmp_path / "b" / "y.png")
    with pytest.raises(ConfigError, match="must be of one shape"):
        read_folder(tmp_path, (), None)
    (tmp_path / "b" / "y.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"(?s)y\.png.*cannot be read as an image"):
        read_folder(tmp_path, (), None)


# --- a device's own data --------------------------------------------------------------------------


def test_what_the_owner_of_a_device_may_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.csv").write_text("1,2,0\n3,4,1\n")
    (tmp_path / "own_module.py").write_text(
        "def samples():\n    return [[1.0, 2.0]], [1]\n"
        "def nothing():\n    return 3\n"
        "def broken():\n    raise RuntimeError('no sensor')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    array = save(tmp_path / "mine.npz", inputs=np.zeros((4, 2)), targets=np.zeros(4, int))
    sizes = {
        name: len(read_own(name).train)
        for name in (str(tmp_path / "table.csv"), str(array), "own_module:samples")
    }
    assert list(sizes.values()) == [2, 4, 1]
    assert len(read_own("own_module:samples").test) == 0
    for name, told in (
        ("own_module:nothing", r"returned int, must be \(inputs, targets\) or a Dataset"),
        ("own_module:broken", "failed: RuntimeError: no sensor"),
        ("own_module:other", "failed: AttributeError"),
        ("no_such_module:f", "failed: ModuleNotFoundError"),
        ("words", r"given words, must be an \.npz or \.csv file"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_own(name)


# --- folders of datasets --------------------------------------------------------------------------


def test_a_dataset_that_is_not_there_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANYCOSTFL_DATA", raising=False)
    monkeypatch.setattr("anycostfl.tasks.fashion_mnist.PLACES", (str(tmp_path / "usual"),))
    for name, told in (
        ("fashion-mnist", "on this machine.*dataset-fashion-mnist.*data.path=FOLDER"),
        ("cifar10", "on this machine.*parquet"),
        ("har", "on this machine.*UCI HAR"),
    ):
        with pytest.raises(files.DataMissingError, match=told):
            tasks.load(name).dataset()
    for name in ("cifar10", "har", "shakespeare", "spoken-digits", "air", "fashion-mnist"):
        with pytest.raises(files.DataMissingError, match=f"is not in {tmp_path}"):
            tasks.load(name).dataset(str(tmp_path))
    for name in ("embedded", "heart", "fashion-masks"):
        with pytest.raises(ConfigError, match=f"{name} needs none"):
            tasks.load(name).dataset(str(tmp_path))


def test_the_folder_of_all_data_is_looked_in_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "all" / "cifar10"
    inside.mkdir(parents=True)
    monkeypatch.setenv("ANYCOSTFL_DATA", str(tmp_path / "all"))
    find = files.find_folder
    assert find("", ("cifar10",), lambda folder: folder == inside) == inside
    assert find(str(tmp_path), ("cifar10",), lambda folder: folder == inside) is None
