"""Local training on a device (Sec. III-A.1): SGD on a sub-model, u = w_before − w_after.

Written for speed where it matters: the data is one tensor that is indexed, the optimizer is three
fused calls, nothing is logged. Plain SGD is the paper's and the default.

Deviations: a last batch of one sample joins the one before it (833 samples in batches of 64 leave
one); momentum, weight decay and clipping are options; momentum starts at zero every round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.winograd import fast_convolutions

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
DROPOUT = 0x5EED  # what makes a second seed of one that shuffles already


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a device trains.

    `bf16`: the forward pass in bfloat16; `winograd`: 3×3 convolutions with fewer multiplications.
    """

    learning_rate: float
    batch: int
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    bf16: bool = False
    channels_last: bool = True
    winograd: bool = True
    device: str = "cpu"  # where torch computes: "cpu" or "cuda"


def train(
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    options: TrainOptions,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Train in place; returns the update of every trained parameter, in main memory."""
    module.to(options.device)
    images, labels = images.to(options.device), labels.to(options.device)
    before = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    wide = options.channels_last and images.dim() == 4
    layout = torch.channels_last if wide else torch.contiguous_format
    _lay_out(module, layout)
    module.train()
    weights: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    velocity = [torch.zeros_like(w) for w in weights] if options.momentum else []
    with _drawing_alike(generator, images.device):
        for _ in range(options.epochs):
            order = torch.randperm(len(labels), generator=generator)
            for part in batches(order, options.batch):
                chosen = part.to(options.device)
                batch = images[chosen].contiguous(memory_format=layout)
                with (
                    torch.autocast(labels.device.type, torch.bfloat16, enabled=options.bf16),
                    fast_convolutions(options.winograd),
                ):
                    logits = module(batch)
                loss = F.cross_entropy(logits.float(), labels[chosen])
                step(weights, _gradients(loss, weights), velocity, options)
    after = dict(module.named_parameters())
    return {n: (w - after[n].detach()).contiguous().cpu() for n, w in before.items()}


@contextmanager
def _drawing_alike(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """What a module draws by itself (dropout) follows from the generator's seed, too."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(generator.initial_seed() ^ DROPOUT)
        yield


def _lay_out(module: nn.Module, layout: torch.memory_format) -> None:
    """Put the weights of 2-D convolutions in memory as their images are."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=layout)


def batches(order: Tensor, size: int) -> list[Tensor]:
    """The samples in batches; a last one that would stand alone joins the batch before it.

    A step on one sample is all noise, and BatchNorm cannot take it at all.
    """
    *full, last = torch.split(order, size)
    return (
        [*full[:-1], torch.cat([full[-1], last])]
        if full and len(last) == 1 < size
        else [*full, last]
    )


def _gradients(loss: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradient of every weight; zero for those that this batch did not use."""
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]


@torch.no_grad()
def step(
    weights: list[Tensor], gradients: list[Tensor], velocity: list[Tensor], options: TrainOptions
) -> None:
    """One step of SGD, all tensors at once."""
    if options.clip_norm:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scale = (options.clip_norm / (norm + 1e-12)).clamp(max=1.0)
        gradients = [g * scale for g in gradients]
    if options.weight_decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=options.weight_decay))
    if velocity:
        torch._foreach_mul_(velocity, options.momentum)
        torch._foreach_add_(velocity, gradients)
        gradients = velocity
    torch._foreach_add_(weights, gradients, alpha=-options.learning_rate)


@torch.no_grad()
def count_correct(
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    batch: int = 100,
    *,
    channels_last: bool = False,
    device: str = "cpu",
) -> int:
    """How many images the module classifies rightly; leaves it in evaluation mode."""
    module.to(device)
    images, labels = images.to(device), labels.to(device)
    if channels_last and images.dim() == 4:
        _lay_out(module, torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    module.eval()
    correct = 0
    for start in range(0, len(labels), batch):
        chosen = slice(start, start + batch)
        correct += int((module(images[chosen]).argmax(1) == labels[chosen]).sum())
    return correct


def bf16_pays() -> bool:
    """Whether this processor multiplies in bfloat16; a stopwatch would not always say the same."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def reuse_memory() -> None:
    """Let this process keep what a step frees for the next one.

    glibc gives large blocks back to the system at once, and every step of SGD then pays for each
    page of its activations anew, about 6 % of its time. Elsewhere than on glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((MMAP_THRESHOLD, 2**25), (TRIM_THRESHOLD, 2**30)):
            mallopt(option, size)
