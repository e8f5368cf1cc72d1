"""The update codecs beside the epoch that made the update, and beside other codecs.

python benchmarks/codec.py [--data FOLDER] [--updates FOLDER] [--nncodec PYTHON]

One thread. An update of the CNN: 500 steps on Fashion-MNIST, then one local epoch of 1000 samples
(lr 0.01, batch 32). `--data` names a folder with the four idx.gz files of the full data set (the
embedded subset otherwise), `--nncodec` the interpreter of an environment that has nncodec.
`--updates` names a folder that benchmarks/update_set.py has filled: then the table is made for each
update in it that is not for tuning. What nncodec says about them is kept there, for it is slow.
Times are processor time, since other programs may be running.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import _updates
from anycostfl import methods
from anycostfl.codec import CODECS, Upload, byte_budget, compress, decompress

INVERSE_BETAS = (15, 40, 100, 500)
BASELINES = ("stc", "qsgd", "uveqfed")
QPS = tuple(range(-30, -100, -3))  # coarse to fine
LIMITS, ROUNDS = {"kernel": 0.05, "lowrank": 0.15}, 5
Update = dict[str, Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Row:
    """One codec at one rate."""

    codec: str
    size: int
    error: float
    cosine: float
    encode_s: float
    decode_s: float


def likeness(update: Update, decoded: Update) -> tuple[float, float]:
    """‖u − ũ‖² / ‖u‖², and the cosine of the angle between u and ũ."""
    pairs = [(u.double(), decoded[n].double()) for n, u in update.items()]
    lost = sum(float((u - d).square().sum()) for u, d in pairs)
    own, other = (sum(float(pair[i].square().sum()) for pair in pairs) for i in (0, 1))
    common = sum(float((u * d).sum()) for u, d in pairs)
    return lost / own, common / (own * other) ** 0.5 if other else 0.0


def timed(call: Callable[[], Result], repeat: int = ROUNDS) -> tuple[Result, float]:
    """The result and the least processor seconds."""
    seconds = []
    for _ in range(repeat):
        started = time.process_time()
        result = call()
        seconds.append(time.process_time() - started)
    return result, min(seconds)


def own(codec: str, update: Update, beta: float, blocks: dict[str, int], repeat: int) -> Row:
    """One of our codecs."""
    payload, encode_s = timed(
        lambda: compress(update, beta, seed=0, codec=codec, blocks=blocks), repeat
    )
    decoded, decode_s = timed(lambda: decompress(payload, update), repeat)
    return Row(codec, len(payload), *likeness(update, decoded.values), encode_s, decode_s)


def baseline(name: str, update: Update, beta: float, repeat: int) -> Row:
    """The compressor of another method; what it remembers from round to round stays empty."""
    method = methods.load(name)
    shapes = {n: tuple(tensor.shape) for n, tensor in update.items()}
    upload = Upload(beta, seed=0, binding=b"benchmark")
    payload, encode_s = timed(lambda: method.encode(update, upload), repeat)
    decoded, decode_s = timed(lambda: method.decode(payload, shapes, upload), repeat)
    return Row(name, len(payload), *likeness(update, decoded.values), encode_s, decode_s)


def half_zstd(update: Update) -> Row:
    """Half precision and a general-purpose compressor: no choice of rate."""
    import zstandard  # noqa: PLC0415 - a development extra

    def encode() -> bytes:
        raw = b"".join(tensor.half().numpy().tobytes() for tensor in update.values())
        return zstandard.ZstdCompressor(level=3).compress(raw)

    def decode() -> Update:
        raw = bytearray(zstandard.ZstdDecompressor().decompress(packed))
        flat = torch.frombuffer(raw, dtype=torch.float16).float()
        pieces = flat.split([tensor.numel() for tensor in update.values()])  # type: ignore[no-untyped-call]
        return {n: p.reshape(u.shape) for (n, u), p in zip(update.items(), pieces, strict=True)}

    packed, encode_s = timed(encode)
    decoded, decode_s = timed(decode)
    return Row("fp16 + zstd", len(packed), *likeness(update, decoded), encode_s, decode_s)


def nncodec(python: str, update: Update) -> list[dict[str, float]]:
    """The neural-network coding standard, in its own environment, at a range of step sizes."""
    most = byte_budget(1 / min(INVERSE_BETAS), sum(tensor.numel() for tensor in update.values()))
    worker = Path(__file__).with_name("nncodec_worker.py").resolve()
    with tempfile.TemporaryDirectory() as folder:
        save_file(update, Path(folder) / "update.safetensors")
        command = [python, str(worker), "update.safetensors", str(most), *map(str, QPS)]
        done = subprocess.run(  # noqa: S603 - the interpreter the user named
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def at_equal_bytes(tried: list[dict[str, float]], budget: int) -> Row:
    """What nncodec would give at this size: between two of its step sizes, log against log."""
    tried = sorted(tried, key=lambda result: result["bytes"])
    above = next((i for i, r in enumerate(tried) if r["bytes"] >= budget), len(tried) - 1)
    low, high = tried[max(above - 1, 0)], tried[above]
    wide = log(high["bytes"] / low["bytes"])
    part = min(max(log(budget / low["bytes"]) / wide, 0.0), 1.0) if wide else 0.0

    def between(key: str) -> float:
        return exp((1 - part) * log(low[key]) + part * log(high[key]))

    cosine = (1 - part) * low.get("cosine", 0.0) + part * high.get("cosine", 0.0)
    times = between("encode_s"), between("decode_s")
    return Row("nncodec", round(between("bytes")), between("relative_error"), cosine, *times)


def first_call_s(update: Update) -> tuple[float, float]:
    """Seconds of the first round trip of a process: nothing compiled yet, then all on disk."""
    program = (
        "import sys, time; from safetensors.torch import load_file; import torch;"
        "from anycostfl.codec import compress, decompress; u = load_file(sys.argv[1]);"
        "t = time.perf_counter(); decompress(compress(u, 1 / 40, seed=0), u);"
        "print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "update.safetensors")
        save_file(update, path)
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        cold, warm = (
            float(
                subprocess.run(  # noqa: S603 - this very interpreter
                    [sys.executable, "-c", program, path],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(2)
        )
    return cold, warm


def show(rows: list[Row], elements: int) -> None:
    """Print one line per row."""
    print("| codec | ratio | bytes | error | cosine | encode ms | decode ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        times = f"{row.encode_s * 1e3:.0f} | {row.decode_s * 1e3:.0f}"
        shown = f"{row.error:.2e} | {row.cosine:.4f} | {times}"
        print(f"| {row.codec} | 1/{4 * elements / row.size:.1f} | {row.size:,} | {shown} |")


def table(
    update: Update, blocks: dict[str, int], tried: list[dict[str, float]], repeat: int
) -> list[Row]:
    """Every codec at every rate."""
    elements, rows = sum(tensor.numel() for tensor in update.values()), []
    for inverse in INVERSE_BETAS:
        rows += [own(codec, update, 1 / inverse, blocks, repeat) for codec in CODECS]
        rows += [baseline(name, update, 1 / inverse, repeat) for name in BASELINES]
        rows += [at_equal_bytes(tried, byte_budget(1 / inverse, elements))] if tried else []
    return rows


def judge(folder: Path, python: str | None) -> None:
    """One table per update of the folder, and low rank's error beside nncodec's."""
    verdict = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith("tune"):
            continue
        update, kept = load_file(path), folder / "nncodec" / f"{path.stem}.jsonl"
        if python and not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            lines = [json.dumps(result) + "\n" for result in nncodec(python, update)]
            kept.write_text("".join(lines))
        tried = [json.loads(line) for line in kept.open()] if kept.exists() else []
        blocks = next((b for m, b in _updates.BLOCKS.items() if path.stem.startswith(m)), {})
        rows = table(update, blocks, tried, repeat=2)
        print(f"\n### {path.stem}", flush=True)
        show(rows, sum(tensor.numel() for tensor in update.values()))
        ours, theirs = ([r.error for r in rows if r.codec == c] for c in ("lowrank", "nncodec"))
        shares = (f"{a / b:.3f}" for a, b in zip(ours, theirs, strict=False))
        verdict.append(f"| {path.stem} | " + " | ".join(shares) + " |")
    print("\n| lowrank's error / nncodec's | " + " | ".join(f"1/{i}" for i in INVERSE_BETAS) + " |")
    print("|---" * (1 + len(INVERSE_BETAS)) + "|", *verdict, sep="\n")


def shares(update: Update, blocks: dict[str, int], epoch: Callable[[], float]) -> bool:
    """Encode + decode as a share of the epoch, taken in turns; whether every limit is kept."""
    good = True
    for codec, limit in LIMITS.items():
        for inverse in INVERSE_BETAS:
            seconds = []
            for _ in range(ROUNDS):
                row = own(codec, update, 1 / inverse, blocks, repeat=1)
                seconds.append((row.encode_s + row.decode_s, epoch()))
            share = min(s for s, _ in seconds) / min(e for _, e in seconds)
            good &= share <= limit
            print(f"{codec} at 1/{inverse}: {share:.1%} of the epoch (≤ {limit:.0%})")
    return good


def main() -> None:
    """Measure, print, and fail if a codec costs more than its share of the epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=_updates.EMBEDDED)
    parser.add_argument("--updates", type=Path)
    parser.add_argument("--nncodec", metavar="PYTHON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.updates:
        judge(args.updates, args.nncodec)
        return
    images = _updates.fashion_mnist(args.data)
    epoch = _updates.local_epoch(images)
    update, blocks = epoch.update, _updates.BLOCKS["cnn"]
    cold, warm = first_call_s(update)
    print(f"first round trip of a process: {cold:.1f} s compiling, {warm:.2f} s once compiled")
    tried = nncodec(args.nncodec, update) if args.nncodec else []
    rows = [half_zstd(update), *table(update, blocks, tried, ROUNDS)]
    show(rows, sum(tensor.numel() for tensor in update.values()))
    if not shares(update, blocks, _updates.epoch_timer(images)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
