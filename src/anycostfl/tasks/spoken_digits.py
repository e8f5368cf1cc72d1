"""Spoken digits by 60 speakers (AudioMNIST, Becker et al., 2018): log-mel spectrograms of 32 × 32.

Eight of fifty takes come with the package. Twelve speakers are held out; of the others, the last
take of every digit. A folder may hold AudioMNIST's own recordings
(`SPEAKER/DIGIT_SPEAKER_TAKE.wav`) or an array file `spoken_digits_60.npz`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anycostfl.data.files import missing, read_arrays, read_embedded, read_wav
from anycostfl.data.prepare import STANDARDIZE
from anycostfl.data.samples import Dataset, hold_out, make_dataset
from anycostfl.tasks import Task

Array = Any  # of numpy

ARRAYS = "spoken_digits_60.npz"
DIGITS = tuple("0123456789")
HELD_OUT = 5  # every fifth speaker
RATE, FRAMES, WINDOW, SECONDS = 8000, 32, 200, 0.8  # Hz, columns, values of a column, length
BANDS, LOWEST_HZ, HIGHEST_HZ = 32, 60.0, 3800.0
STEPS_PER_DB, LOUDEST = 252 / 80, 252  # of 80 dB; a byte below the loudest cell


def load(path: str) -> Dataset:
    """Spectrograms with their speakers."""
    folder = Path(path)
    if not path:
        dataset = read_embedded("spoken-digits")
    elif (folder / ARRAYS).is_file():
        dataset = read_arrays(folder / ARRAYS)
    elif any(folder.glob("*/[0-9]_*_*.wav")):
        dataset = _read_recordings(folder)
    else:
        raise missing("AudioMNIST", path, "Get its folder `data`")
    return hold_out(dataset, torch.from_numpy(_last_takes(dataset)))


def _read_recordings(folder: Path) -> Dataset:
    """AudioMNIST's own files; every fifth speaker is held out."""
    files = sorted(folder.glob("*/[0-9]_*_*.wav"))
    spectrograms = np.stack([log_mel(*read_wav(file)) for file in files])
    digits = np.array([int(file.name[0]) for file in files])
    speakers = np.array([int(file.name.split("_")[1]) for file in files])
    held = speakers % HELD_OUT == 0
    train, test = ((spectrograms[chosen], digits[chosen]) for chosen in (~held, held))
    return make_dataset(train, test, (speakers[~held], speakers[held]))


def _last_takes(dataset: Dataset) -> npt.NDArray[np.bool_]:
    """The last take of every digit by every speaker."""
    train = dataset.train
    assert train.owners is not None  # noqa: S101
    kinds = (len(DIGITS) * train.owners + train.targets).tolist()
    last = {kind: i for i, kind in enumerate(kinds)}
    held = np.zeros(len(kinds), np.bool_)
    held[list(last.values())] = True
    return held


def log_mel(sound: Array, rate: int) -> Array:
    """A recording as bytes of shape (1, band, frame): 252 is its loudest cell, 0 is 80 dB below."""
    sound = _resampled(sound.astype(np.float64), rate)
    length = round(SECONDS * RATE)
    middle = (len(sound) - length) // 2
    centred = sound[max(middle, 0) : max(middle, 0) + length]
    before = (length - len(centred)) // 2
    centred = np.pad(centred, (before, length - len(centred) - before))
    hop = (length - WINDOW) / (FRAMES - 1)
    starts = np.rint(hop * np.arange(FRAMES)).astype(int)
    frames = centred[starts[:, None] + np.arange(WINDOW)] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames, 256)) ** 2  # (frame, frequency)
    decibels = 10 * np.log10(power @ _bands().T + 1e-12).T
    levels = LOUDEST + STEPS_PER_DB * (decibels - decibels.max())
    return (4 * np.rint(levels / 4)).clip(0, LOUDEST).astype(np.uint8)[None]


def _resampled(sound: Array, rate: int) -> Array:
    """The sound at 8 kHz: averaged over what becomes one value, then interpolated."""
    ratio = rate / RATE
    width = max(math.floor(ratio), 1)
    if width > 1:
        sound = np.convolve(
            sound, np.hanning(2 * width + 1) / np.hanning(2 * width + 1).sum(), "same"
        )
    places = np.arange(int(len(sound) / ratio)) * ratio
    return np.interp(places, np.arange(len(sound)), sound)


def _bands() -> Array:
    """Triangles on the mel scale, of shape (band, frequency)."""
    low, high = _to_mel(np.array([LOWEST_HZ, HIGHEST_HZ]))
    edges = _to_hz(np.linspace(low, high, BANDS + 2))
    frequencies = np.arange(129) * RATE / 256
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return np.minimum(rising, falling).clip(min=0)


def _to_mel(hertz: Array) -> Array:
    return 2595 * np.log10(1 + hertz / 700)


def _to_hz(mel: Array) -> Array:
    return 700 * (10 ** (mel / 2595) - 1)


TASK = Task(
    load=load,
    prepare=STANDARDIZE,
    transform=log_mel,
    classes=DIGITS,
    summary="spoken digits, log-mel 32×32",
)
