"""Simulated devices on several processes that share data and weights.

All tensors that matter (training data, test data, global weights) are in shared memory. A job names
a device and its strategy; the process cuts the sub-model straight out of the shared weights. What
travels back is a payload, as from a real device. Each process computes with one thread, so results
do not depend on how many there are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from anycostfl import models, tasks
from anycostfl.config import Config
from anycostfl.device import DeviceRuntime, Job, Reply, reuse_memory
from anycostfl.errors import AnycostError
from anycostfl.experiment import elastic
from anycostfl.fleets.attackers import Attackers
from anycostfl.fleets.simulated import Holdings, InProcess
from anycostfl.registry import IN_MEMORY
from anycostfl.state import tensors_of
from anycostfl.tasks import Task


class WorkerDiedError(AnycostError):
    """A process of the pool is gone."""


class SharedMemoryError(AnycostError):
    """Data that several processes cannot share."""


class WorkerFailedError(AnycostError):
    """An error in a process of the pool, with its message."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Everything a process needs to run any device; tensors are shared, the rest is small."""

    config: Config
    weights: Mapping[str, Tensor]
    holdings: Holdings
    attackers: Attackers | None
    task: Task | None  # if it goes by no name
    module: nn.Module | None  # likewise


class Pool:
    """Runs jobs on several processes, the heaviest first; replies keep the order of the jobs."""

    def __init__(self, config: Config, workers: int, local: InProcess) -> None:
        self._holdings = local.holdings
        self._counts = local.holdings.counts()
        module = local.runtime.net.module
        shared = Shared(
            config=config,
            weights=tensors_of(module),
            holdings=local.holdings,
            attackers=local.attackers,
            task=local.runtime.task.without_data() if config.data.name == IN_MEMORY else None,
            module=module if config.model.name == IN_MEMORY else None,
        )
        _share(shared)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._started = False  # whether a process has answered
        self._processes = ProcessPoolExecutor(workers, context, _start, (shared,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.shutdown(cancel_futures=True)

    def perform(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        """The replies, in the order of the jobs."""
        weights = [job.alpha * float(self._counts[job.device]) for job in jobs]
        heaviest_first = sorted(range(len(jobs)), key=lambda i: -weights[i])
        sent = {i: self._submit(_perform, _convert(_to_bytes, jobs[i])) for i in heaviest_first}
        for i in range(len(jobs)):
            yield _convert(_to_tensor, self._result(sent.pop(i)))

    def measure(self) -> Iterator[list[Tensor]]:
        """The sums of every metric for the global model, chunk by chunk of the test samples."""
        sent = [self._submit(_measure_chunk, start) for start in self._holdings.test_chunks()]
        for future in sent:
            yield [_to_tensor(part) for part in self._result(future)]

    def _submit(self, task: Callable[[Any], Any], argument: Any) -> Future[Any]:
        try:
            return self._processes.submit(task, argument)
        except BrokenProcessPool as error:
            raise self._died() from error

    def _result(self, future: Future[Any]) -> Any:
        try:
            result, failure = future.result()
        except BrokenProcessPool as error:
            raise self._died() from error
        self._started = True
        if failure:
            raise WorkerFailedError(failure)
        return result

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError(
            "a worker process died, perhaps for lack of memory. Resume with --resume, perhaps with "
            "fewer --workers"
            if self._started
            else "a worker process died while it started: does the script lack `if __name__ == "
            '"__main__":` around what it runs? Or use one worker'
        )


def _share(shared: Shared) -> None:
    """Make every tensor visible to other processes."""
    held = shared.holdings
    samples = (*held.train.tensors(), *held.test.tensors(), held.index, held.ends)
    tensors = (*shared.weights.values(), *samples)
    try:
        ForkingPickler.dumps((shared.task, shared.module))
    except Exception as error:  # whatever a class of the user's own raises
        raise SharedMemoryError(
            f"several workers need a task and a model that Python can pickle ({error}). Define "
            "them in a module, without lambdas, or use one worker"
        ) from error
    try:
        for tensor in tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
        raise SharedMemoryError(
            f"several workers share {megabytes:.0f} MB of data, for which there is no room "
            "(/dev/shm). Give more (docker run --shm-size=1g), or use --workers 1"
        ) from error


# --- in each process ------------------------------------------------------------------------------

_devices: list[InProcess] = []  # the one of this process


def _start(shared: Shared) -> None:
    """Build what runs any device."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server to handle
    torch.set_num_threads(1)
    reuse_memory()
    config = shared.config
    task = shared.task or tasks.load(config.data.name)
    module = shared.module or models.load(config.model.name).build()
    for name, own in tensors_of(module).items():
        own.data = shared.weights[name]
    example = shared.holdings.train.take(slice(0, 2)).inputs
    net = elastic(module, example, config.model.widths)
    method = config.method_of(config.run.method)
    runtime = DeviceRuntime(task, method, net, config.training, config.workload.epochs)
    _devices.append(InProcess(runtime, shared.holdings, shared.attackers, config.privacy))


def _exit_with_parent() -> None:
    """End this process when the one that opened the pool is gone, however it ended.

    The system's parent is the fork server, which itself waits for the last worker to end.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _perform(job: Any) -> tuple[Any, str]:
    return _told(lambda: _convert(_to_bytes, _devices[0].perform_one(_convert(_to_tensor, job))))


def _measure_chunk(start: int) -> tuple[Any, str]:
    return _told(lambda: [_to_bytes(sums) for sums in _devices[0].measure_chunk(start)])


def _told(work: Callable[[], Any]) -> tuple[Any, str]:
    """A result, or what went wrong as text."""
    try:
        return work(), ""
    except AnycostError as error:
        return None, str(error)
    except Exception:
        return None, traceback.format_exc()


# --- tensors on their way -------------------------------------------------------------------------

Sent = tuple[npt.NDArray[np.uint8], torch.dtype, torch.Size]


def _convert(how: Callable[[Any], Any], message: Job | Reply) -> Any:
    """A job or reply with every tensor converted, to bytes for its way through a pipe and back.

    A tensor would travel as shared memory and hold a file open on both sides while it lives.
    """
    states: dict[str, Any] = {
        item.name: {name: how(value) for name, value in state.items()}
        for item in fields(message)
        if isinstance(state := getattr(message, item.name), Mapping)
    }
    return replace(message, **states)


def _to_bytes(tensor: Tensor) -> Sent:
    return tensor.flatten().view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _to_tensor(sent: Sent) -> Tensor:
    content, dtype, shape = sent
    return torch.from_numpy(content).view(dtype).view(shape)
