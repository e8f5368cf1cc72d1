"""What the codec promises on a real update: the CNN after 500 steps, then one local epoch."""

import fcntl
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import _updates
from anycostfl.codec import byte_budget, compress, decompress, entropy, kernels, sections
from anycostfl.codec.flat import flatten
from anycostfl.codec.frame import bond
from anycostfl.state import Update
from shannon import entropy_bytes

BLOCKS = _updates.BLOCKS["cnn"]


@pytest.fixture(scope="module")
def update(pytestconfig: pytest.Config) -> dict[str, Tensor]:
    """Trained once on the embedded images, then kept in pytest's cache folder."""
    assert pytestconfig.cache is not None
    folder = Path(pytestconfig.cache.mkdir("codec"))
    stored = folder / "cnn-update-1.safetensors"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parallel workers train it once
        if not stored.exists():
            save_file(_updates.local_epoch(_updates.fashion_mnist()).update, stored)
        return load_file(stored)


def relative_error(update: dict[str, Tensor], decoded: Update) -> float:
    lost = sum(float((u - decoded.values[n]).double().square().sum()) for n, u in update.items())
    return lost / sum(float(u.double().square().sum()) for u in update.values())


@pytest.mark.parametrize(("inverse", "allowed"), [(15, 0.035), (40, 0.20), (100, 0.38)])
def test_relative_error(update: dict[str, Tensor], inverse: int, allowed: float) -> None:
    payload = compress(update, 1 / inverse, seed=0, blocks=BLOCKS)
    assert relative_error(update, decompress(payload, update)) <= allowed


@pytest.mark.parametrize("inverse", [4, 15, 40, 100, 300, 1000])
def test_budget_is_kept_and_used(update: dict[str, Tensor], inverse: int) -> None:
    budget = byte_budget(1 / inverse, 1_663_370)
    assert 0.97 * budget <= len(compress(update, 1 / inverse, seed=0, blocks=BLOCKS)) <= budget


def tokens_of(payload: bytes, update: dict[str, Tensor]) -> tuple[entropy.Tokens, bytes]:
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    frame = sections.read(payload, bond(b"", shapes), len(shapes))
    assert frame is not None
    count = sum(int(mask.sum()) for mask in decompress(payload, update).masks.values())
    table = entropy.decode_table(frame.table, entropy.token_count(frame.grid.symbols))
    return entropy.decode_levels(frame.levels, *table, count), frame.levels


@pytest.mark.parametrize("inverse", [4, 15, 40, 100, 1000])
def test_levels_are_within_one_per_cent_of_entropy(update: dict[str, Tensor], inverse: int) -> None:
    tokens, levels = tokens_of(compress(update, 1 / inverse, seed=0, blocks=BLOCKS), update)
    assert len(levels) <= 1.01 * entropy_bytes(np.bincount(tokens)) + 64


def test_levels_are_within_one_per_cent_of_an_independent_coder(update: dict[str, Tensor]) -> None:
    constriction = pytest.importorskip("constriction", reason="no wheel for this machine")
    tokens, levels = tokens_of(compress(update, 1 / 40, seed=0, blocks=BLOCKS), update)
    counts = np.bincount(tokens)
    model = constriction.stream.model.Categorical(
        (counts / counts.sum()).astype(np.float32), perfect=False
    )
    oracle = constriction.stream.stack.AnsCoder()
    oracle.encode_reverse(tokens.astype(np.int32), model)
    assert len(levels) <= 1.01 * 4 * oracle.num_words() + 64


def test_kernels_that_a_channel_owns_serve_better_than_blocks_of_32(
    update: dict[str, Tensor],
) -> None:
    own = decompress(compress(update, 1 / 40, seed=0, blocks=BLOCKS), update)
    plain = decompress(compress(update, 1 / 40, seed=0), update)
    assert relative_error(update, own) < relative_error(update, plain)


def test_points_from_zero_beat_the_papers_points_from_the_least_magnitude(
    update: dict[str, Tensor],
) -> None:
    """Without a sign for level 0 the same kernels and levels take fewer bytes (decision 0010)."""
    parts = kernels.lay_out({n: tuple(t.shape) for n, t in update.items()}, BLOCKS)
    flat = flatten(update)
    spans = kernels.join([kernels.spans_of(part) for part in parts])
    norms = kernels.measure(flat, spans)
    kept = np.sort(kernels.rank(norms)[:8000])
    ours = kernels.grid_for(norms, kept, 64)
    paper = kernels.Grid(float(norms.least[kept].min()), ours.u_max, 64)
    sizes = []
    for grid in (ours, paper):
        symbols, negative = kernels.quantize(flat, spans.take(kept), grid, seed=0)
        counts = np.bincount(symbols)
        levels = entropy.encode_levels(symbols.astype(np.uint16), *entropy.best_table(counts))
        sizes.append(len(levels) + len(entropy.encode_signs(symbols, negative)))
    assert ours.u_min == 0.0
    assert sizes[0] < 0.9 * sizes[1]


def test_first_guess_is_close(update: dict[str, Tensor]) -> None:
    """The shipped fit, made from 16 samples, is a guess: right within a factor, not a budget."""
    from anycostfl.codec.fit import shipped_fit

    payload = compress(update, 1 / 40, seed=0, blocks=BLOCKS)
    kept = torch.cat([m.reshape(-1) for m in decompress(payload, update).masks.values()])
    guess = shipped_fit().predict(1 / 40)
    assert 1 - guess.sparsity == pytest.approx(float(kept.float().mean()), rel=0.5)
