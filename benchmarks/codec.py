"""The update codec beside the epoch that made the update, and beside other codecs.

python benchmarks/codec.py [--data FOLDER] [--nncodec PYTHON]

One thread. An update of the CNN: 500 steps on Fashion-MNIST, then one local epoch of 1000 samples
(lr 0.01, batch 32). `--data` names a folder with the four idx.gz files of the full data set (the
embedded subset otherwise), `--nncodec` the interpreter of an environment that has nncodec.
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
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

import _updates
from anycostfl.codec import byte_budget, compress, decompress

INVERSE_BETAS = (15, 40, 100, 500)
LIMIT, ROUNDS = 0.05, 5
Update = dict[str, Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Row:
    """One codec at one rate."""

    codec: str
    size: int
    error: float
    encode_s: float
    decode_s: float


def relative_error(update: Update, decoded: Update) -> float:
    """‖u − ũ‖² / ‖u‖²."""
    lost = sum(float((u - decoded[n]).double().square().sum()) for n, u in update.items())
    return lost / sum(float(u.double().square().sum()) for u in update.values())


def timed(call: Callable[[], Result], repeat: int = ROUNDS) -> tuple[Result, float]:
    """The result and the least seconds."""
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return result, min(seconds)


def own(name: str, update: Update, beta: float, blocks: dict[str, int]) -> Row:
    """This codec with the given kernels."""
    payload, encode_s = timed(lambda: compress(update, beta, seed=0, blocks=blocks))
    decoded, decode_s = timed(lambda: decompress(payload, update))
    return Row(name, len(payload), relative_error(update, decoded.values), encode_s, decode_s)


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
    return Row("fp16 + zstd", len(packed), relative_error(update, decoded), encode_s, decode_s)


def nncodec(python: str, update: Update) -> list[Row]:
    """The neural-network coding standard, in its own environment, near each of our rates."""
    worker = Path(__file__).with_name("nncodec_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        save_file(update, Path(folder) / "update.safetensors")
        command = [python, str(worker), "update.safetensors", *map(str, range(-66, -40))]
        done = subprocess.run(  # noqa: S603 - the interpreter the user named
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    tried = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    elements = sum(tensor.numel() for tensor in update.values())
    rows = []
    for inverse in INVERSE_BETAS:
        budget = byte_budget(1 / inverse, elements)
        near = min(tried, key=lambda result: abs(result["bytes"] / budget - 1))
        times = near["encode_s"], near["decode_s"]
        rows.append(Row(f"nncodec, QP {near['qp']}", near["bytes"], near["relative_error"], *times))
    return rows


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
    print(f"{'codec':22}{'ratio':>9}{'bytes':>11}{'error':>10}{'encode ms':>11}{'decode ms':>11}")
    for row in rows:
        ratio = f"1/{4 * elements / row.size:.1f}"
        times = f"{row.encode_s * 1e3:11.1f}{row.decode_s * 1e3:11.1f}"
        print(f"{row.codec:22}{ratio:>9}{row.size:11,}{row.error:10.4f}{times}")


def main() -> None:
    """Measure, print, and fail if the codec costs more than its share of the epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=_updates.EMBEDDED)
    parser.add_argument("--nncodec", metavar="PYTHON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    epoch = _updates.local_epoch(_updates.fashion_mnist(args.data), repeat=3)
    update, blocks = epoch.update, _updates.BLOCKS["cnn"]
    elements = sum(tensor.numel() for tensor in update.values())
    cold, warm = first_call_s(update)
    print(f"first round trip of a process: {cold:.1f} s compiling, {warm:.2f} s once compiled")
    rows = [half_zstd(update)]
    for inverse in INVERSE_BETAS:
        rows.append(own("anycostfl", update, 1 / inverse, blocks))
        single = dict.fromkeys(update, 1)
        rows.append(own("QSGD (top-k elements)", update, 1 / inverse, single))
    rows += nncodec(args.nncodec, update) if args.nncodec else []
    show(rows, elements)
    again = own("anycostfl", update, 1 / 40, blocks)
    share = (again.encode_s + again.decode_s) / epoch.seconds
    print(f"epoch {epoch.seconds:.3f} s; encode + decode at 1/40: {share:.1%} (≤ {LIMIT:.0%})")
    if share > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
