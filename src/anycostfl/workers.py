"""Where simulated devices run: in this process, or in a pool that shares data and weights.

All tensors that matter (training data, test data, global weights) lie in shared memory. A job names
a device and its strategy; the worker cuts the sub-model straight out of the shared weights. What
travels back is a payload, as from a real device. Each worker computes with one thread, so results
do not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from anycostfl import methods, models
from anycostfl.attacks import corrupt
from anycostfl.errors import AnycostError, BetaError, ConfigError, PayloadError, UpdateError
from anycostfl.feedback import encode_with_feedback, no_residual
from anycostfl.methods import Upload
from anycostfl.shrink import ElasticModel, Order, SubModel
from anycostfl.state import State, tensors_of
from anycostfl.train import TrainOptions, count_correct, reuse_memory, train
from anycostfl.types import Scale

TEST_CHUNK = 1000


class WorkerDiedError(AnycostError):
    """A process of the pool is gone."""


class SharedMemoryError(AnycostError):
    """Data that several processes cannot share."""


class WorkerFailedError(AnycostError):
    """What a process of the pool could not do, in its own words."""


class Purpose(enum.IntEnum):
    """What a device draws random numbers for; part of every seed, so never reuse a number."""

    SHUFFLE = 101
    QUANTIZE = 102


def draw_seed(seed: int, round_index: int, device: int, purpose: Purpose) -> int:
    """A 63-bit seed that no other (seed, round, device, purpose) shares."""
    words = np.random.SeedSequence([seed, round_index, device, int(purpose)]).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Everything a process needs to play any device; tensors are shared, the rest is small."""

    model: str
    widths: str
    method: str
    options: TrainOptions
    weights: dict[str, Tensor]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    samples: Tensor  # the indices of all devices' samples, one device after the other
    ends: Tensor  # where each device's samples end
    scale: Scale

    def in_shared_memory(self) -> Shared:
        """The same with every tensor visible to other processes."""
        tensors = (
            *self.weights.values(),
            self.train_images,
            self.train_labels,
            self.test_images,
            self.test_labels,
            self.samples,
            self.ends,
        )
        try:
            for tensor in tensors:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
            raise SharedMemoryError(
                f"several workers share {megabytes:.0f} MB of data, for which there is no room "
                "(/dev/shm). Give more (docker run --shm-size=1g), or use --workers 1"
            ) from error
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What the server asks of a device: its width, how to upload, its seed, what it remembered.

    It remembers channels where they were at first; `moved` says from where each has come since.
    """

    device: int
    alpha: float
    upload: Upload
    seed: int
    memory: State | None = None
    moved: Order = field(default_factory=dict)
    lie: str = ""  # a kind of attack, in experiments


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What comes back: a payload, or the reason why there is none; and what to remember.

    `error` is what the device says, `missing` why nothing came from it at all, `unreadable` why
    what came cannot be understood; the bytes on the wire are those of the whole messages that
    carried job and reply.
    """

    device: int
    payload: bytes = b""
    error: str = ""
    missing: str = ""
    unreadable: str = ""
    memory: State | None = None
    wire_bytes_down: int = 0
    wire_bytes_up: int = 0


class DeviceSide:
    """Plays any device of the fleet, on the global weights as they are at that moment."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.method = methods.load(shared.method)
        module = models.load(shared.model).build()
        bind(module, shared.weights)
        self.net = ElasticModel(module, shared.train_images[:2], rule=shared.widths)

    def perform(self, job: Job) -> Reply:
        """Cut the device's sub-model and let the device work on its own samples."""
        chosen = self.samples_of(job.device)
        samples = self.shared.train_images[chosen], self.shared.train_labels[chosen]
        return self.work(self.net.shrink(job.alpha), samples, job)

    def work(self, sub: SubModel, samples: tuple[Tensor, Tensor], job: Job) -> Reply:
        """What a device does with its sub-model: train, compress (Sec. III-A.1 and III-A.2)."""
        try:
            update = self._train(sub, samples, job)
            if not job.upload.feedback:
                return Reply(job.device, self.method.encode(update, job.upload))
            residual = job.memory or no_residual(dict(self.net.module.named_parameters()))
            payload, left = encode_with_feedback(
                self.method, update, job.upload, self._moved(residual, job.moved), sub.plan
            )
        except (UpdateError, BetaError, PayloadError) as error:
            return Reply(job.device, error=str(error), memory=job.memory)
        back = {name: order.argsort() for name, order in job.moved.items()}
        return Reply(job.device, payload, memory=self._moved(left, back))

    def _train(self, sub: SubModel, samples: tuple[Tensor, Tensor], job: Job) -> State:
        self.method.prepare(sub.module, self.net.module)
        draw = torch.Generator().manual_seed(job.seed)
        try:
            update = train(sub.module, *samples, self.shared.options, draw)
        except ValueError as error:
            if len(samples[1]) > 1:
                raise  # a mistake of the model's
            raise UpdateError(f"one sample is too few for this model: {error}") from error
        return corrupt(update, job.lie, job.seed) if job.lie else update

    def _moved(self, state: State, order: Order) -> State:
        return self.net.permute(state, order) if order else state

    def samples_of(self, device: int) -> Tensor:
        """The indices of a device's training samples."""
        start = int(self.shared.ends[device - 1]) if device else 0
        return self.shared.samples[start : int(self.shared.ends[device])]

    def sample_counts(self) -> npt.NDArray[np.int64]:
        """How many samples every device of the fleet holds."""
        return np.diff(self.shared.ends.numpy(), prepend=0)

    def test_chunks(self) -> range:
        """Where each chunk of the test images starts."""
        return range(0, len(self.shared.test_labels), TEST_CHUNK)

    def correct(self, start: int) -> int:
        """How many test images of one chunk the global model classifies rightly."""
        chunk = slice(start, start + TEST_CHUNK)
        images, labels = self.shared.test_images[chunk], self.shared.test_labels[chunk]
        options = self.shared.options
        return count_correct(
            self.net.shrink(1.0).module,
            images,
            labels,
            channels_last=options.channels_last,
            device=options.device,
        )


def bind(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let a module's parameters and buffers live in these tensors."""
    for name, own in tensors_of(module).items():
        own.data = tensors[name]


class Executor(Protocol):
    """Runs what devices do."""

    def perform(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        """The replies, in the order of the jobs."""

    def correct(self) -> int:
        """How many of all test images the global model classifies rightly."""


@contextmanager
def open_executor(device_side: DeviceSide, workers: int) -> Iterator[Executor]:
    """One worker: this process. More: a pool; 0 is one per core."""
    workers = count_workers(workers)
    if workers == 1:
        yield InProcess(device_side)
        return
    with Pool(device_side, workers) as pool:
        yield pool


class InProcess:
    """One device after the other."""

    def __init__(self, device_side: DeviceSide) -> None:
        self._side = device_side

    def perform(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        """The replies, in the order of the jobs."""
        return map(self._side.perform, jobs)

    def correct(self) -> int:
        """How many of all test images the global model classifies rightly."""
        return sum(map(self._side.correct, self._side.test_chunks()))


class Pool:
    """Several processes, each with a pipe of its own.

    The heaviest jobs start first; replies are handed on in the order of the jobs.
    """

    def __init__(self, device_side: DeviceSide, workers: int) -> None:
        self._side = device_side
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        shared = device_side.shared.in_shared_memory()
        self._pipes: dict[Connection, BaseProcess] = {}
        self._started = False  # whether one has answered
        for _ in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, shared), daemon=True)
            process.start()
            theirs.close()
            self._pipes[mine] = process

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._pipes.items():
            process.terminate()
            pipe.close()
        for process in self._pipes.values():
            process.join()

    def perform(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        """The replies, in the order of the jobs."""
        counts = self._side.sample_counts()
        weights = [job.alpha * float(counts[job.device]) for job in jobs]
        heaviest_first = sorted(range(len(jobs)), key=lambda i: -weights[i])
        return self._run("perform", jobs, heaviest_first)

    def correct(self) -> int:
        """How many of all test images the global model classifies rightly."""
        starts = self._side.test_chunks()
        return sum(self._run("correct", starts, list(range(len(starts)))))

    def _run(self, task: str, arguments: Sequence[Any], order: list[int]) -> Iterator[Any]:
        """Give out the arguments in one order, return the results in the other."""
        waiting, busy, results = list(reversed(order)), dict[Connection, int](), dict[int, Any]()
        for wanted in range(len(arguments)):
            while wanted not in results:
                for pipe in self._pipes:
                    if waiting and pipe not in busy:
                        busy[pipe] = waiting.pop()
                        self._send(pipe, task, arguments[busy[pipe]])
                for pipe in self._ready(list(busy)):
                    results[busy.pop(pipe)] = self._receive(pipe)
            yield results.pop(wanted)

    def _ready(self, pipes: list[Connection]) -> list[Connection]:
        """Wait until some of these pipes have something to say, if only that they broke."""
        return [pipe for pipe in wait(pipes) if isinstance(pipe, Connection)]

    def _send(self, pipe: Connection, task: str, argument: Any) -> None:
        try:
            pipe.send((task, _with(_to_bytes, argument)))
        except OSError as error:
            raise self._died(pipe) from error

    def _receive(self, pipe: Connection) -> Any:
        try:
            result, failure = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(pipe) from error
        if failure:
            raise WorkerFailedError(failure)
        self._started = True
        return _with(_to_tensor, result)

    def _died(self, pipe: Connection) -> WorkerDiedError:
        process = self._pipes[pipe]
        process.join(1.0)
        why = (
            'while it started: does the script lack `if __name__ == "__main__":` around what it '
            "runs? Or use one worker"
            if process.exitcode == 1 and not self._started
            else "perhaps for lack of memory. Go on with --resume, perhaps with fewer --workers"
        )
        return WorkerDiedError(f"a worker process died (exit code {process.exitcode}), {why}")


def _serve(pipe: Connection, shared: Shared) -> None:
    """Do what the pipe asks for, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server to handle
    torch.set_num_threads(1)
    reuse_memory()
    side = DeviceSide(shared)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the server is gone, and so are we
        while True:
            task, argument = pipe.recv()
            result, failure = None, ""
            try:
                result = _with(_to_bytes, getattr(side, task)(_with(_to_tensor, argument)))
            except AnycostError as error:
                failure = str(error)
            except Exception:
                failure = traceback.format_exc()
            pipe.send((result, failure))


def _with(convert: Callable[[Any], Any], message: Any) -> Any:
    """A job or reply with every tensor converted, to bytes for its way through a pipe and back.

    A tensor would go as shared memory and hold a file open on both sides for as long as it lives.
    """
    if not isinstance(message, Job | Reply):
        return message
    states: dict[str, Any] = {
        item.name: {name: convert(value) for name, value in state.items()}
        for item in fields(message)
        if isinstance(state := getattr(message, item.name), Mapping)
    }
    return replace(message, **states)


Sent = tuple[npt.NDArray[np.uint8], torch.dtype, torch.Size]


def _to_bytes(tensor: Tensor) -> Sent:
    return tensor.flatten().view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _to_tensor(sent: Sent) -> Tensor:
    content, dtype, shape = sent
    return torch.from_numpy(content).view(dtype).view(shape)


def count_workers(asked: int) -> int:
    """How many processes to use; 0 means one per core."""
    if asked < 0:
        raise ConfigError([f"workers: given {asked}, allowed 0 (one per core) or more"])
    return asked or cores()


def cores() -> int:
    """How many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[int]:
    """So many threads for torch, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[int]:
    """Compute as every worker does, so that results are the same everywhere."""
    return threads(1)
