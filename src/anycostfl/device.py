"""The device's half of a round (Sec. III-A.1 and III-A.2): train a sub-model, encode its update.

    u = w_before − w_after,   payload = encode(u)

The work ω is the share of the τ epochs' samples that a device goes through; above 1 it goes on.

Written for speed where it matters: samples are tensors that are indexed, the optimizer is a few
fused calls, nothing is logged. Plain SGD is the paper's and the default.

Deviations: a last batch of one sample joins the one before it (833 samples in batches of 64 leave
one); momentum, Adam, weight decay and clipping are options; what an optimizer remembers starts at
zero every round; a device that would miss its time ends training early.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from anycostfl.checks import Count, Interval, OneOf, Positive, check_fields
from anycostfl.codec import Upload
from anycostfl.data.samples import Samples, Tree, call
from anycostfl.errors import BetaError, PayloadError, UpdateError
from anycostfl.feedback import encode_with_feedback, no_residual
from anycostfl.methods import Method
from anycostfl.metrics import Metric
from anycostfl.records.round import Measured
from anycostfl.server.privacy import NOISE, Privacy, privatise, system_noise
from anycostfl.shrink import ElasticModel, Order, SubModel
from anycostfl.shrink.widths import Region, put, relative, take
from anycostfl.state import State
from anycostfl.tasks import Task

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
DROPOUT, AUGMENT, WIDTHS = 0x5EED, 0xA06, 0x317  # derive further seeds from the one that shuffles
TEST_CHUNK, TEST_BATCH = 1000, 100  # samples
ADAM = (0.9, 0.999)  # how much of the two moments is kept


@dataclass(frozen=True, slots=True)
class Training:
    """Local training; the number of local epochs τ is part of the workload.

    Weight decay is L2 regularisation with `sgd` and `adam`, decoupled with `adamw`. `schedule` is
    that of the learning rate over rounds: `cosine` and `linear` end at zero after the last one,
    and the first `warmup` rounds rise to it.
    """

    learning_rate: Positive
    batch: Count
    optimizer: Annotated[str, OneOf(("sgd", "adam", "adamw"))] = "sgd"
    momentum: Annotated[float, Interval(0.0, 0.999)] = 0.0  # of SGD
    weight_decay: Annotated[float, Interval(0.0)] = 0.0
    proximal: Annotated[float | None, Interval(0.0)] = None  # μ of FedProx; unset: the method's
    clip_norm: Annotated[float, Interval(0.0)] = 0.0  # 0 is off
    augment: bool = False  # as the task says, if it says how
    precision: Annotated[str, OneOf(("auto", "fp32", "bf16"))] = "auto"
    device: Annotated[str, OneOf(("auto", "cpu", "cuda"))] = "auto"
    channels_last: bool = True
    schedule: Annotated[str, OneOf(("constant", "cosine", "linear"))] = "constant"
    warmup: Annotated[int, Interval(0.0)] = 0
    winograd: bool = False  # 3×3 convolutions with fewer multiplications (`contrib`)

    def __post_init__(self) -> None:
        check_fields(self)

    def rate_in(self, number: int, rounds: int) -> float:
        """The learning rate of a round, by the schedule."""
        rate, warmup = self.learning_rate, self.warmup
        if number < warmup:
            return rate * (number + 1) / (warmup + 1)
        done = (number - warmup) / max(rounds - warmup, 1)
        if self.schedule == "cosine":
            return rate * (1 + math.cos(math.pi * done)) / 2
        return rate * (1 - done) if self.schedule == "linear" else rate


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What the server asks of a device: its width, how to upload, its seed, what it remembered.

    A device remembers channels where they were at first; `moved` says where each came from since.
    `learning_rate` is the round's, `work` a factor on the local steps. `until` is the device's own:
    the server sets no deadline here.
    """

    device: int
    alpha: float
    upload: Upload
    seed: int
    learning_rate: float
    memory: State | None = None
    moved: Order = field(default_factory=dict)
    work: float = 1.0
    until: float = math.inf  # when training has to be over, as `time.perf_counter` tells


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What comes back: a payload, or the reason why there is none; and what to remember.

    `error` is what the device reports, `missing` why nothing came from it at all, `unreadable` why
    what came cannot be understood. `bytes_down` is what the device was sent where that is known
    better than from its plan; `wire_bytes_*` are those of the whole messages. `done` is the share
    of the planned steps that the device had time for, `measured` what the round took on it.
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
    done: float = 1.0
    decode_s: float = 0.0
    train_s: float = 0.0
    encode_s: float = 0.0
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The update of local training, and the share of the planned steps that were done."""

    update: State
    done: float = 1.0


Learn = Callable[["DeviceRuntime", SubModel, Samples, Job], Trained]
"""How a device gets its update; attackers in experiments have their own."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRuntime:
    """What every device needs besides its job: task, method, traced model, how to train."""

    task: Task
    method: Method
    net: ElasticModel
    training: Training
    epochs: int = 1

    def perform(self, sub: SubModel, samples: Samples, job: Job, learn: Learn) -> Reply:
        """Train a sub-model on the device's samples and encode the update.

        `learn` is `learn_honestly`, unless the device is an attacker of an experiment.
        """
        begin = time.perf_counter()
        try:
            trained = learn(self, sub, samples, job)
            trained_at = time.perf_counter()
            payload, memory = self._encode(sub, trained.update, job)
        except (UpdateError, BetaError, PayloadError) as error:
            return Reply(job.device, error=str(error), memory=job.memory)
        return Reply(
            job.device,
            payload,
            memory=memory,
            done=trained.done,
            train_s=trained_at - begin,
            encode_s=time.perf_counter() - trained_at,
        )

    def _encode(self, sub: SubModel, update: State, job: Job) -> tuple[bytes, State | None]:
        """The payload, and what the device remembers of what it could not carry."""
        if not self.method.feedback:
            return self.method.encode(update, job.upload), None
        residual = job.memory or no_residual(dict(self.net.module.named_parameters()))
        residual = self._permuted(residual, job.moved)
        payload, left = encode_with_feedback(self.method, update, job.upload, residual, sub.plan)
        back = {name: order.argsort() for name, order in job.moved.items()}
        return payload, self._permuted(left, back)

    def measure(
        self, module: nn.Module, samples: Samples, owners: int = 1
    ) -> Iterator[list[Tensor]]:
        """The sums of every metric, of shape (owner, k), chunk by chunk of the samples."""
        whole = samples if owners > 1 else Samples(samples.inputs, samples.targets)
        for start in range(0, len(samples), TEST_CHUNK):
            chunk = whole.take(slice(start, start + TEST_CHUNK))
            yield measure(module, chunk, self.task.metrics, self.training, owners)

    @property
    def proximal(self) -> float:
        """What pulls local weights back to the global ones, as asked or as the method has it."""
        asked = self.training.proximal
        return self.method.proximal if asked is None else asked

    def nested(self, sub: SubModel) -> list[Nested]:
        """The narrower models inside a sub-model that its steps alternate with."""
        levels = nested_levels(self.method.levels, sub.plan.alpha)
        return [nested_in(sub, self.net.shrink(level)) for level in levels]

    def _permuted(self, state: State, order: Order) -> State:
        return self.net.permute(state, order) if order else state


def learn_honestly(runtime: DeviceRuntime, sub: SubModel, samples: Samples, job: Job) -> Trained:
    """The update of local training."""
    if runtime.method.prepare:
        runtime.method.prepare(sub.module, runtime.net.module)
    task, training, epochs = runtime.task, runtime.training, runtime.epochs
    try:
        return train_until(
            sub.module,
            samples,
            task,
            training,
            job.seed,
            epochs=epochs,
            rate=job.learning_rate,
            work=job.work,
            proximal=runtime.proximal,
            nested=runtime.nested(sub),
            until=job.until,
        )
    except ValueError as error:
        if len(samples) > 1:
            raise  # a mistake in the model
        raise UpdateError(f"one sample is too few for this model: {error}") from error


def learn_privately(learn: Learn, privacy: Privacy) -> Learn:
    """The same with the update clipped and noise on it, which the seed of the job decides.

    Unless it is secret: the server knows the seed, and could take seeded noise off again.
    """

    def learn_it(runtime: DeviceRuntime, sub: SubModel, samples: Samples, job: Job) -> Trained:
        trained = learn(runtime, sub, samples, job)
        seeded = torch.Generator().manual_seed(job.seed ^ NOISE)
        noise = system_noise() if privacy.secret else seeded
        return replace(trained, update=privatise(trained.update, privacy, noise))

    return learn_it


def train(
    module: nn.Module,
    samples: Samples,
    task: Task,
    training: Training,
    seed: int,
    *,
    epochs: int = 1,
    rate: float | None = None,
    work: float = 1.0,
    proximal: float = 0.0,
    nested: Sequence[Nested] = (),
) -> dict[str, Tensor]:
    """Train in place; returns the update of every trained parameter, in main memory.

    `rate` is the learning rate of the round, if it is not that of the first; `work` a factor on
    the local steps. `proximal` pulls weights back to where they began; steps alternate with the
    `nested` models.
    """
    trained = train_until(
        module,
        samples,
        task,
        training,
        seed,
        epochs=epochs,
        rate=rate,
        work=work,
        proximal=proximal,
        nested=nested,
    )
    return dict(trained.update)


def train_until(
    module: nn.Module,
    samples: Samples,
    task: Task,
    training: Training,
    seed: int,
    *,
    epochs: int = 1,
    rate: float | None = None,
    work: float = 1.0,
    proximal: float = 0.0,
    nested: Sequence[Nested] = (),
    until: float = math.inf,
) -> Trained:
    """The same, but no step begins that would end after a point in time; the first one always does.

    The update is then that of the steps that were done.
    """
    device = torch.device("cpu" if training.device == "auto" else training.device)
    generator = torch.Generator().manual_seed(seed)
    module.to(device)
    held = samples.map(lambda tensor: tensor.to(device))
    before = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    lay_out = _layout(module, held.inputs, training)
    module.train()
    weights: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    rate = training.learning_rate if rate is None else rate
    take_step = _proximal(optimizer_of(weights, training, rate), weights, proximal)
    parts = _alternating(module, nested, seed)
    bf16, convolutions = training.precision == "bf16", _convolutions(training)
    augment = _augmentation(task, training, seed)
    steps, done, begin = 0, 0, time.perf_counter()
    with _drawing_alike(seed, device):
        for count in epoch_parts(len(held), epochs, work):
            order = torch.randperm(len(held), generator=generator)[:count]
            planned = batches(order, training.batch)
            steps += len(planned)
            for chosen in planned:
                if not is_time_left(begin, done, until):
                    continue
                done += 1
                batch = held.take(chosen.to(device))
                inputs, targets = augment(batch.inputs, batch.targets)
                inputs = lay_out(inputs)
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16), convolutions():
                    part = next(parts)
                    outputs = call(part.module, inputs)
                loss = task.loss(_as_float32(outputs), targets)
                take_step(part.gradients(loss))
    after = dict(module.named_parameters())
    update = {n: (w - after[n].detach()).contiguous().cpu() for n, w in before.items()}
    return Trained(update, done / steps)


def is_time_left(begin: float, done: int, until: float) -> bool:
    """Whether one more step, as long as those before, ends in time; the first is always done."""
    now = time.perf_counter()
    return done == 0 or now + (now - begin) / done <= until


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """A narrower model inside a sub-model, and where its tensors are in the sub-model's."""

    module: nn.Module
    index: Mapping[str, Region]


def nested_in(sub: SubModel, narrower: SubModel) -> Nested:
    """A narrower sub-model of the same model as part of a wider one."""
    own, index = sub.plan.index, narrower.plan.index
    return Nested(narrower.module, {name: relative(index[name], own[name]) for name in index})


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one local step trains: the whole of a module, or a narrower model inside it."""

    module: nn.Module
    whole: Mapping[str, nn.Parameter]
    index: Mapping[str, Region] | None = None

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """The gradients of the whole, zero outside the part."""
        own = dict(self.module.named_parameters())
        found = _gradients(loss, [own[name] for name in self.whole])
        if self.index is None:
            return found
        padded = [torch.zeros_like(w) for w in self.whole.values()]
        for name, into, gradient in zip(self.whole, padded, found, strict=True):
            put(into, self.index[name], gradient)
        return padded

    @torch.no_grad()
    def refreshed(self) -> _Part:
        """With the whole's weights as they are now."""
        if self.index is not None:
            for name, own in self.module.named_parameters():
                if name in self.whole:
                    own.copy_(take(self.whole[name], self.index[name]))
        return self


def _alternating(module: nn.Module, nested: Sequence[Nested], seed: int) -> Iterator[_Part]:
    """What each step trains: always the module, or it and its nested models in random turns."""
    whole = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parts = [_Part(module, whole)]
    for narrower in nested:
        narrower.module.to(next(iter(whole.values())).device).train()
        parts.append(_Part(narrower.module, whole, narrower.index))
    random = torch.Generator().manual_seed(seed ^ WIDTHS)
    while True:
        for i in torch.randperm(len(parts), generator=random).tolist():
            yield parts[i].refreshed()


def _proximal(take_step: Step, weights: list[Tensor], strength: float) -> Step:
    """FedProx's local step: the gradient of loss + μ/2·‖w − w₀‖²."""
    if not strength:
        return take_step
    start = [w.detach().clone() for w in weights]

    @torch.no_grad()
    def step(gradients: list[Tensor]) -> None:
        away = torch._foreach_sub(weights, start)
        take_step(list(torch._foreach_add(gradients, away, alpha=strength)))

    return step


def _as_float32(outputs: Tree) -> Tree:
    """Outputs for a loss; a model may return more than tensors, such as None for no cache."""

    def convert(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return outputs.float() if isinstance(outputs, Tensor) else tree_map(convert, outputs)


def _augmentation(
    task: Task, training: Training, seed: int
) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
    """What happens to every batch before it is trained on."""
    change = task.augment if training.augment else None
    if change is None:
        return lambda inputs, targets: (inputs, targets)
    generator = torch.Generator().manual_seed(seed ^ AUGMENT)
    return lambda inputs, targets: change(inputs, targets, generator)


def _convolutions(training: Training) -> Callable[[], AbstractContextManager[object]]:
    """How convolutions are computed while training."""
    if not training.winograd:
        return nullcontext
    extra = import_module("anycostfl.contrib.winograd")  # by name: the core depends on no extra
    found: Callable[[], AbstractContextManager[object]] = extra.fast_convolutions
    return found


@contextmanager
def _drawing_alike(seed: int, device: torch.device) -> Iterator[None]:
    """What a module draws by itself (dropout) follows from the seed, too."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed ^ DROPOUT)
        yield


def _layout(module: nn.Module, inputs: Tree, training: Training) -> Callable[[Tree], Tree]:
    """Put weights of 2-D convolutions in memory as their images are; how to lay out a batch."""
    wide = training.channels_last and any(leaf.dim() == 4 for leaf in tree_leaves(inputs))
    chosen = torch.channels_last if wide else torch.contiguous_format
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=chosen)

    def lay_out(leaf: Tensor) -> Tensor:
        return leaf.contiguous(memory_format=chosen) if leaf.dim() == 4 else leaf.contiguous()

    return lambda batch: tree_map(lay_out, batch)


def epoch_parts(samples: int, epochs: int, work: float) -> list[int]:
    """How many samples each local epoch goes through, if `work` of the epochs is to be done.

    A further epoch of one sample is left out: it would be one step, all noise.
    """
    total = max(min(2, samples), math.floor(work * epochs * samples + 1e-9))
    whole, rest = divmod(total, samples)
    return [samples] * whole + ([rest] if rest > 1 or not whole else [])


def steps_of(samples: int, batch: int, epochs: int, work: float) -> int:
    """How many local steps that takes."""
    parts = epoch_parts(samples, epochs, work)
    return sum(len(batches(torch.arange(part), batch)) for part in parts)


def share_done(samples: int, epochs: int, work: float) -> float:
    """The share of the epochs' samples that a device really goes through."""
    return sum(epoch_parts(samples, epochs, work)) / (epochs * samples)


def nested_levels(levels: Sequence[float], alpha: float) -> list[float]:
    """The widths below its own that a device's steps alternate with."""
    return [level for level in levels if level < alpha]


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


Step = Callable[[list[Tensor]], None]
"""Moves the weights by their gradients."""


def optimizer_of(weights: list[Tensor], training: Training, rate: float) -> Step:
    """The local optimizer, at the beginning of a round."""
    move = (_sgd if training.optimizer == "sgd" else _adam)(weights, training, rate)

    @torch.no_grad()
    def step(gradients: list[Tensor]) -> None:
        if training.clip_norm:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            scale = (training.clip_norm / (norm + 1e-12)).clamp(max=1.0)
            gradients = [g * scale for g in gradients]
        if training.weight_decay and training.optimizer != "adamw":
            gradients = list(torch._foreach_add(gradients, weights, alpha=training.weight_decay))
        move(gradients)

    return step


def _sgd(weights: list[Tensor], training: Training, rate: float) -> Step:
    velocity = [torch.zeros_like(w) for w in weights] if training.momentum else []

    def move(gradients: list[Tensor]) -> None:
        if velocity:
            torch._foreach_mul_(velocity, training.momentum)
            torch._foreach_add_(velocity, gradients)
            gradients = velocity
        torch._foreach_add_(weights, gradients, alpha=-rate)

    return move


def _adam(weights: list[Tensor], training: Training, rate: float) -> Step:
    """Kingma and Ba (2015); `adamw` decays weights directly (Loshchilov and Hutter, 2019)."""
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    (keep1, keep2), steps = ADAM, itertools.count(1)

    def move(gradients: list[Tensor]) -> None:
        number = next(steps)
        if training.optimizer == "adamw":
            torch._foreach_mul_(weights, 1 - rate * training.weight_decay)
        torch._foreach_lerp_(first, gradients, 1 - keep1)
        torch._foreach_mul_(second, keep2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - keep2)
        spread = torch._foreach_sqrt(torch._foreach_div(second, 1 - keep2**number))
        torch._foreach_add_(spread, 1e-8)
        torch._foreach_addcdiv_(weights, first, spread, -rate / (1 - keep1**number))

    return move


@torch.no_grad()
def measure(
    module: nn.Module,
    samples: Samples,
    metrics: Sequence[Metric],
    training: Training,
    owners: int = 1,
) -> list[Tensor]:
    """The sums of every metric, of shape (owner, k); leaves the module in evaluation mode.

    `owners` is how many there are; samples without owners count as the first one's.
    """
    device = torch.device("cpu" if training.device == "auto" else training.device)
    module.to(device)
    lay_out = _layout(module, samples.inputs, training)
    module.eval()
    sums: list[Tensor] = []
    for start in range(0, len(samples), TEST_BATCH):
        batch = samples.take(slice(start, start + TEST_BATCH)).map(lambda x: x.to(device))
        outputs = call(module, lay_out(batch.inputs))
        rows = [metric.rows(outputs, batch.targets).double().cpu() for metric in metrics]
        sums = sums or [torch.zeros(owners, row.shape[1], dtype=torch.float64) for row in rows]
        whose = torch.zeros(len(batch), dtype=torch.long) if batch.owners is None else batch.owners
        for total, row in zip(sums, rows, strict=True):
            total.index_add_(0, whose.cpu(), row)
    return sums


def bf16_pays() -> bool:
    """Whether this processor multiplies in bfloat16; a stopwatch would not always say the same."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def reuse_memory() -> None:
    """Let this process keep what a step frees for the next one.

    glibc gives large blocks back to the system at once, and every step of SGD then pays for each
    page of its activations anew, about 6 % of its time. Elsewhere than on glibc nothing happens.
    """
    _set_thresholds(2**25, 2**30)


def return_memory() -> None:
    """The opposite: what is freed goes back at once, so that a process holds what it uses."""
    _set_thresholds(2**18, 2**18)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((MMAP_THRESHOLD, mapped), (TRIM_THRESHOLD, trimmed)):
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
