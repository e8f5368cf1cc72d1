"""Lemma 1 against real updates: the divergence ‖u − ũ‖² / ‖u‖² beside its bound.

A McMahan CNN is trained on Fashion-MNIST; at several moments a device with 1,000 samples trains the
full model for one local epoch (u) and the update is shrunk and compressed (ũ) in four ways:

- elements: keep the α·J largest elements, as Appendix A assumes shrinking does
- trained, then cut: keep the leading √α of the sorted channels of u (Assumption 5)
- cut, then trained: train the sub-model itself, which is what a device does
- kernels: as before, but sparsify whole 5×5 kernels and fc rows of 49 instead of single elements

and then sparsified with ρ = 1 − √β and quantized with L = 2^(32√β) levels, as in Appendix A.
Run `python benchmarks/lemma1.py [--data FOLDER]`; FOLDER holds the four idx.gz files.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import math
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models.cnn import Cnn
from anycostfl.server.theory import local_divergence_bound

ALPHAS = (0.25, 0.5, 0.75, 1.0)
BETAS = (0.01, 1 / 40, 1 / 15, 0.25)
STAGES = (0, 1, 5)  # epochs of central training before the updates are taken
LOCAL_SAMPLES = 1000
DEVICES = 3
SAMPLES = 10_000
State = dict[str, Tensor]


def read_idx(folder: Path) -> tuple[Tensor, Tensor]:
    """Training images (n, 1, 28, 28) in [0, 1] and labels (n,)."""
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    images = torch.from_numpy(pixels.copy()).view(-1, 1, 28, 28).float() / 255
    return images, torch.from_numpy(labels.copy()).long()


def train(model: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
    """One epoch of plain SGD, lr 0.01, batch 32; the same order for every width."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    for batch in torch.split(order, 32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def sort_channels(model: Cnn) -> None:
    """Put the channels of each hidden layer in descending order of their norm; same function."""
    with torch.no_grad():
        for layer, following in (("conv1", "conv2"), ("conv2", "fc1"), ("fc1", "fc2")):
            first, second = getattr(model, layer), getattr(model, following)
            order = first.weight.flatten(1).norm(dim=1).argsort(descending=True, stable=True)
            first.weight.copy_(first.weight[order].clone())
            first.bias.copy_(first.bias[order].clone())
            blocks = second.weight.view(second.weight.shape[0], len(order), -1)
            second.weight.copy_(blocks[:, order].reshape(second.weight.shape).clone())


def widths(alpha: float) -> tuple[int, int, int]:
    """Channels a sub-model keeps: the leading √α of each hidden layer."""
    first, second, third = (math.floor(math.sqrt(alpha) * n + 1e-9) for n in (32, 64, 512))
    return first, second, third


def slices(alpha: float) -> dict[str, tuple[slice, ...]]:
    """Where a sub-model's tensors lie in the full ones; fc1 is seen as (out, channel, 49)."""
    a, b, c = (slice(n) for n in widths(alpha))
    every = slice(None)
    return {
        "conv1.weight": (a,),
        "conv1.bias": (a,),
        "conv2.weight": (b, a),
        "conv2.bias": (b,),
        "fc1.weight": (c, b),
        "fc1.bias": (c,),
        "fc2.weight": (every, c),
        "fc2.bias": (every,),
    }


def as_blocks(name: str, tensor: Tensor) -> Tensor:
    """fc1.weight as (out, channel, 49), everything else as it is."""
    return tensor.view(tensor.shape[0], -1, 49) if name == "fc1.weight" else tensor


def keep_prefix(update: State, alpha: float) -> State:
    """The update with everything outside the sub-model set to zero."""
    kept = {}
    for name, index in slices(alpha).items():
        blocks = torch.zeros_like(as_blocks(name, update[name]))
        blocks[index] = as_blocks(name, update[name])[index]
        kept[name] = blocks.view(update[name].shape)
    return kept


def cut(model: Cnn, alpha: float) -> Cnn:
    """A dense sub-model of the leading channels."""
    a, b, c = widths(alpha)
    small = Cnn()
    small.conv1, small.conv2 = nn.Conv2d(1, a, 5, padding=2), nn.Conv2d(a, b, 5, padding=2)
    small.fc1, small.fc2 = nn.Linear(b * 49, c), nn.Linear(c, 10)
    full, own = model.state_dict(), small.state_dict()
    for name, index in slices(alpha).items():
        own[name].copy_(as_blocks(name, full[name])[index].reshape(own[name].shape))
    return small


def local_update(model: Cnn, alpha: float, images: Tensor, labels: Tensor, seed: int) -> State:
    """What one local epoch at width α changes, in the coordinates of the full model."""
    small = cut(model, alpha)
    before = copy.deepcopy(small.state_dict())
    train(small, images, labels, seed)
    update = {}
    for name, index in slices(alpha).items():
        full = torch.zeros_like(model.state_dict()[name])
        change = before[name] - small.state_dict()[name]
        blocks = as_blocks(name, full)
        blocks[index] = as_blocks(name, change)
        update[name] = full
    return update


def flat(update: State) -> Tensor:
    """All elements in one vector."""
    return torch.cat([tensor.flatten() for tensor in update.values()])


def quantize(values: Tensor, beta: float, rng: torch.Generator) -> Tensor:
    """Unbiased rounding of |u| to L = 2^(32√β) intervals between its least and largest."""
    size = values.abs()
    low, high = size.min(), size.max()
    step = (high - low) / 2 ** (32 * math.sqrt(beta))
    if step <= 0:
        return values
    levels = torch.floor((size - low) / step + torch.rand(size.shape, generator=rng))
    return torch.sign(values) * (low + levels * step)


def compress_elements(shrunk: Tensor, alpha: float, beta: float, rng: torch.Generator) -> Tensor:
    """Keep the √β largest elements of the sub-model, quantized."""
    count = max(1, round(math.sqrt(beta) * alpha * shrunk.numel()))
    index = shrunk.abs().topk(count).indices
    out = torch.zeros_like(shrunk)
    out[index] = quantize(shrunk[index], beta, rng)
    return out


def kernel_ids(update: State) -> Tensor:
    """The kernel every element belongs to: 5×5 for convolutions, 49 for fc1, else one element."""
    ids, start = [], 0
    for name, tensor in update.items():
        size = {"conv1.weight": 25, "conv2.weight": 25, "fc1.weight": 49}.get(name, 1)
        ids.append(start + torch.arange(tensor.numel()) // size)
        start += tensor.numel() // size
    return torch.cat(ids)


def compress_kernels(
    shrunk: Tensor, ids: Tensor, alpha: float, beta: float, rng: torch.Generator
) -> Tensor:
    """Keep the kernels of largest norm per element, up to √β of the sub-model's elements."""
    count = torch.bincount(ids).float()
    energy = torch.zeros(len(count)).index_add_(0, ids, shrunk**2)
    order = (energy / count).argsort(descending=True)
    budget = math.sqrt(beta) * alpha * shrunk.numel()
    kept = order[: max(1, int((count[order].cumsum(0) <= budget).sum()))]
    chosen = torch.zeros(len(count), dtype=torch.bool)
    chosen[kept] = True
    mask = chosen[ids] & (shrunk != 0)
    out = torch.zeros_like(shrunk)
    out[mask] = quantize(shrunk[mask], beta, rng)
    return out


def divergences(
    model: Cnn, images: Tensor, labels: Tensor, seed: int
) -> dict[tuple[float, float], list[float]]:
    """The divergence of the four ways for every (α, β), on the data of one device."""
    full = local_update(model, 1.0, images, labels, seed)
    u, ids, rng = flat(full), kernel_ids(full), torch.Generator().manual_seed(seed)
    found = {}
    for alpha in ALPHAS:
        real = flat(local_update(model, alpha, images, labels, seed))
        prefix = flat(keep_prefix(full, alpha))
        for beta in BETAS:
            ways = (
                compress_elements(largest(u, alpha), alpha, beta, rng),
                compress_elements(prefix, alpha, beta, rng),
                compress_elements(real, alpha, beta, rng),
                compress_kernels(real, ids, alpha, beta, rng),
            )
            found[alpha, beta] = [float(((u - w) ** 2).sum() / (u**2).sum()) for w in ways]
    return found


def largest(u: Tensor, alpha: float) -> Tensor:
    """Only the α·J largest elements."""
    index = u.abs().topk(round(alpha * u.numel())).indices
    out = torch.zeros_like(u)
    out[index] = u[index]
    return out


def warm_up(model: Cnn, images: Tensor, labels: Tensor, seed: int, *, elastic: bool) -> None:
    """One epoch of training: the full model, or sub-models of every width in turn."""
    if not elastic:
        train(model, images, labels, seed)
        return
    for i, start in enumerate(range(0, len(images), 500)):
        part = slice(start, start + 500)
        alpha = ALPHAS[i % len(ALPHAS)]
        update = local_update(model, alpha, images[part], labels[part], seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(update[name])


def report(model: Cnn, images: Tensor, labels: Tensor) -> None:
    """Print a Markdown table of means over devices; ! marks a value above the bound."""
    parts = [slice(i * LOCAL_SAMPLES, (i + 1) * LOCAL_SAMPLES) for i in range(DEVICES)]
    found = [divergences(model, images[p], labels[p], seed) for seed, p in enumerate(parts)]
    print("| α | β | bound | elements | trained, then cut | cut, then trained | kernels |")
    print("|---|---|---|---|---|---|---|")
    for alpha, beta in found[0]:
        bound = float(local_divergence_bound(alpha, beta))
        means = np.mean([device[alpha, beta] for device in found], axis=0)
        cells = " | ".join(f"{value:.3f}{'!' if value > bound else ''}" for value in means)
        print(f"| {alpha} | {beta:.3g} | {bound:.3f} | {cells} |")


def main() -> None:
    """Train, and at every stage take updates and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    embedded = str(resources.files("anycostfl").joinpath("embedded", "fashion-mnist"))
    parser.add_argument("--data", type=Path, default=Path(embedded))
    parser.add_argument("--elastic", action="store_true", help="warm up with every width in turn")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = read_idx(options.data)
    images, labels = images[:SAMPLES], labels[:SAMPLES]
    model, done = Cnn(), 0
    own = DEVICES * LOCAL_SAMPLES  # the devices' samples are new to the model
    for stage in STAGES:
        for epoch in range(done, stage):
            warm_up(model, images[own:], labels[own:], 100 + epoch, elastic=options.elastic)
            sort_channels(model)
        done = stage
        sort_channels(model)
        print(f"\nafter {stage} epochs\n")
        report(model, images, labels)


if __name__ == "__main__":
    main()
