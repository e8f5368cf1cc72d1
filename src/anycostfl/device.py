"""The device's half of a round (Sec. III-A.1 and III-A.2): train a sub-model, encode its update.

    u = w_before − w_after,   payload = encode(u)

Written for speed where it matters: the data is one tensor that is indexed, the optimizer is three
fused calls, nothing is logged. Plain SGD is the paper's and the default.

Deviations: a last batch of one sample joins the one before it (833 samples in batches of 64 leave
one); momentum, weight decay and clipping are options; momentum starts at zero every round.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.checks import Count, Interval, OneOf, Positive, check_fields
from anycostfl.codec import Upload
from anycostfl.errors import BetaError, PayloadError, UpdateError
from anycostfl.feedback import encode_with_feedback, no_residual
from anycostfl.methods import Method
from anycostfl.shrink import ElasticModel, Order, SubModel
from anycostfl.state import State

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
DROPOUT = 0x5EED  # derives a second seed from the one that shuffles
TEST_CHUNK = 1000  # samples

Samples = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True, slots=True)
class Training:
    """Local training; the number of local epochs τ is part of the workload."""

    learning_rate: Positive
    batch: Count
    momentum: Annotated[float, Interval(0.0, 0.999)] = 0.0
    weight_decay: Annotated[float, Interval(0.0)] = 0.0
    clip_norm: Annotated[float, Interval(0.0)] = 0.0  # 0 is off
    precision: Annotated[str, OneOf(("auto", "fp32", "bf16"))] = "auto"
    device: Annotated[str, OneOf(("auto", "cpu", "cuda"))] = "auto"
    channels_last: bool = True
    winograd: bool = False  # 3×3 convolutions with fewer multiplications (`contrib`)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What the server asks of a device: its width, how to upload, its seed, what it remembered.

    A device remembers channels where they were at first; `moved` says where each came from since.
    """

    device: int
    alpha: float
    upload: Upload
    seed: int
    memory: State | None = None
    moved: Order = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What comes back: a payload, or the reason why there is none; and what to remember.

    `error` is what the device reports, `missing` why nothing came from it at all, `unreadable` why
    what came cannot be understood. `bytes_down` is what the device was sent where that is known
    better than from its plan; `wire_bytes_*` are those of the whole messages.
    """

    device: int
    payload: bytes = b""
    error: str = ""
    missing: str = ""
    unreadable: str = ""
    memory: State | None = None
    bytes_down: int | None = None
    wire_bytes_down: int = 0
    wire_bytes_up: int = 0
    busy_s: float = 0.0


Learn = Callable[["DeviceRuntime", SubModel, Samples, Job], State]
"""How a device gets its update; attackers in experiments have their own."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRuntime:
    """What every device needs besides its job: the method, the traced model, how to train."""

    method: Method
    net: ElasticModel
    training: Training
    epochs: int = 1

    def perform(self, sub: SubModel, samples: Samples, job: Job, learn: Learn) -> Reply:
        """Train a sub-model on the device's samples and encode the update.

        `learn` is `learn_honestly`, unless the device is an attacker of an experiment.
        """
        try:
            update = learn(self, sub, samples, job)
            if not self.method.feedback:
                return Reply(job.device, self.method.encode(update, job.upload))
            residual = job.memory or no_residual(dict(self.net.module.named_parameters()))
            residual = self._permuted(residual, job.moved)
            payload, left = encode_with_feedback(
                self.method, update, job.upload, residual, sub.plan
            )
        except (UpdateError, BetaError, PayloadError) as error:
            return Reply(job.device, error=str(error), memory=job.memory)
        back = {name: order.argsort() for name, order in job.moved.items()}
        return Reply(job.device, payload, memory=self._permuted(left, back))

    def count_correct(self, samples: Samples) -> int:
        """The number of correct predictions of the full model."""
        module = self.net.shrink(1.0).module
        starts = range(0, len(samples[1]), TEST_CHUNK)
        return sum(
            count_correct(module, chunk_of(samples, start), self.training) for start in starts
        )

    def _permuted(self, state: State, order: Order) -> State:
        return self.net.permute(state, order) if order else state


def learn_honestly(runtime: DeviceRuntime, sub: SubModel, samples: Samples, job: Job) -> State:
    """The update of local training."""
    if runtime.method.prepare:
        runtime.method.prepare(sub.module, runtime.net.module)
    generator = torch.Generator().manual_seed(job.seed)
    try:
        return train(sub.module, samples, runtime.training, generator, epochs=runtime.epochs)
    except ValueError as error:
        if len(samples[1]) > 1:
            raise  # a mistake in the model
        raise UpdateError(f"one sample is too few for this model: {error}") from error


def train(
    module: nn.Module,
    samples: Samples,
    training: Training,
    generator: torch.Generator,
    *,
    epochs: int = 1,
) -> dict[str, Tensor]:
    """Train in place; returns the update of every trained parameter, in main memory."""
    device = torch.device("cpu" if training.device == "auto" else training.device)
    module.to(device)
    inputs, targets = (part.to(device) for part in samples)
    before = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    wide = training.channels_last and inputs.dim() == 4
    layout = torch.channels_last if wide else torch.contiguous_format
    _lay_out(module, layout)
    module.train()
    weights: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    velocity = [torch.zeros_like(w) for w in weights] if training.momentum else []
    bf16, convolutions = training.precision == "bf16", _convolutions(training)
    with _drawing_alike(generator, device):
        for _ in range(epochs):
            order = torch.randperm(len(targets), generator=generator)
            for part in batches(order, training.batch):
                chosen = part.to(device)
                batch = inputs[chosen].contiguous(memory_format=layout)
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16), convolutions():
                    logits = module(batch)
                loss = F.cross_entropy(logits.float(), targets[chosen])
                step(weights, _gradients(loss, weights), velocity, training)
    after = dict(module.named_parameters())
    return {n: (w - after[n].detach()).contiguous().cpu() for n, w in before.items()}


def _convolutions(training: Training) -> Callable[[], AbstractContextManager[object]]:
    """How convolutions are computed while training."""
    if not training.winograd:
        return nullcontext
    extra = import_module("anycostfl.contrib.winograd")  # by name: the core depends on no extra
    found: Callable[[], AbstractContextManager[object]] = extra.fast_convolutions
    return found


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
    weights: list[Tensor], gradients: list[Tensor], velocity: list[Tensor], training: Training
) -> None:
    """One step of SGD, all tensors at once."""
    if training.clip_norm:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scale = (training.clip_norm / (norm + 1e-12)).clamp(max=1.0)
        gradients = [g * scale for g in gradients]
    if training.weight_decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=training.weight_decay))
    if velocity:
        torch._foreach_mul_(velocity, training.momentum)
        torch._foreach_add_(velocity, gradients)
        gradients = velocity
    torch._foreach_add_(weights, gradients, alpha=-training.learning_rate)


def chunk_of(samples: Samples, start: int) -> Samples:
    """The samples of one chunk."""
    inputs, targets = samples
    return inputs[start : start + TEST_CHUNK], targets[start : start + TEST_CHUNK]


@torch.no_grad()
def count_correct(module: nn.Module, samples: Samples, training: Training, batch: int = 100) -> int:
    """The number of correct predictions; leaves the module in evaluation mode."""
    device = "cpu" if training.device == "auto" else training.device
    module.to(device)
    inputs, targets = (part.to(device) for part in samples)
    if training.channels_last and inputs.dim() == 4:
        _lay_out(module, torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    module.eval()
    correct = 0
    for start in range(0, len(targets), batch):
        chosen = slice(start, start + batch)
        correct += int((module(inputs[chosen]).argmax(1) == targets[chosen]).sum())
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


def cores() -> int:
    """How many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[int]:
    """Let torch use this many threads; restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
