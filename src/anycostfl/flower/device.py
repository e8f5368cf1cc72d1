"""The device as a Flower ClientApp: it says what it can spend, trains, and evaluates.

It performs its task as a simulated device does (`device.DeviceRuntime`). Data and traced model stay
in memory between messages; its residual (`feedback`) is in Flower's context, for the last round and
the one before, so that a round which the server has to repeat starts from the same memory.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from logging import INFO
from typing import cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from anycostfl import methods, tasks
from anycostfl.config import load_profile, profiles_of
from anycostfl.config.loading import checked
from anycostfl.data.files import read_own
from anycostfl.data.prepare import prepare_dataset
from anycostfl.data.samples import Dataset, Samples
from anycostfl.data.split import Partition, split_samples
from anycostfl.device import (
    DeviceRuntime,
    Job,
    Learn,
    Reply,
    learn_honestly,
    learn_privately,
    reuse_memory,
)
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import (
    check_fit,
    initial_module,
    resolve_training,
    splitting_generator,
    trace_model,
)
from anycostfl.flower._internal import log
from anycostfl.flower.messages import read_state, to_envelope, to_records, write_state
from anycostfl.flower.policy import Policy, PolicyError, check_cost
from anycostfl.planning.cost import Devices, Workload, make_devices
from anycostfl.planning.draw import draw_fleet, hardware_of
from anycostfl.server.downlink import first_public, take_step
from anycostfl.server.privacy import Privacy
from anycostfl.shrink import SubModel, calibration_batches, recalibrate
from anycostfl.state import State, tensors_of
from anycostfl.tasks import Task
from anycostfl.wire import messages as wire
from anycostfl.wire.envelope import MessageError

DONE = "round %d: α %.3g, β %.3g; measured %.2f s, %d bytes"

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer which device this is and what it can spend."""
    info = wire.read_info(to_envelope(message.content))
    device = open_device(read_setup(context.node_config), info.experiment)
    known = device.capabilities(info.round, device.public(context.state))
    return Message(to_records(known.pack()), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Perform the task in a message."""
    begin = time.perf_counter()
    task = wire.read_task(to_envelope(message.content))
    device = open_device(read_setup(context.node_config), task.info.experiment)
    torch.set_num_threads(device.setup.threads)
    reuse_memory()
    memory = recall(context.state, task.info)
    try:
        public = device.catch_up(device.public(context.state), task.download)
        if public:
            write_state(context.state, "public", public)
        reply = device.perform(task, public, memory)
    except AnycostError as problem:
        reply = Reply(task.device, error=str(problem), memory=memory)
    remember(context.state, task.info, reply.memory)
    known = device.capabilities(task.info.round + 1, device.public(context.state))
    seconds = time.perf_counter() - begin
    log(INFO, DONE, task.info.round, task.alpha, task.upload.beta, seconds, len(reply.payload))
    result = wire.Result(reply.payload, reply.error, seconds, known)
    return Message(to_records(result.pack()), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model in a message on this device's test samples."""
    task = wire.read_evaluate_task(to_envelope(message.content))
    device = open_device(read_setup(context.node_config), task.info.experiment)
    torch.set_num_threads(device.setup.threads)
    return Message(to_records(device.evaluate(task).pack()), reply_to=message)


# --- who this device is ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What the owner of a device decides."""

    device: int
    profile: str = ""  # without one, it is that member of the experiment's simulated fleet
    rate_bps: float = 0.0
    latency_s: float = 0.0
    energy_j: float = 0.0
    data: str = ""  # a task, or data of its own (`data.files`), instead of the experiment's
    split: bool = False  # train on a part of its own data, as the experiment is split
    threads: int = 1
    methods: str = ""  # that are allowed, separated by commas; empty: all (`policy`)
    max_epochs: int = 0
    min_batch: int = 0
    clip_norm: float = 0.0  # of updates, and noise on them as a multiple of it (`server.privacy`)
    noise: float = 0.0
    server_files: bool = False  # read files that the server names, as Flower's engine needs it

    def node_config(self) -> UserConfig:
        """As Flower's node configuration; only what differs from the defaults."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {name: value for name, value in given.items() if value}
        return {"device": self.device, **{k.replace("_", "-"): v for k, v in changed.items()}}


def read_setup(table: UserConfig) -> Setup:
    """From Flower's node configuration; its simulation engine only says `partition-id`."""
    known = {item.name for item in fields(Setup)}
    given = {k.replace("-", "_"): v for k, v in table.items() if k.replace("-", "_") in known}
    if "device" not in given and isinstance(number := table.get("partition-id"), int):
        given |= {"device": number, "server_files": True}
    return checked(Setup, given, "--node-config", [])


# --- what it does ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """A device in one experiment: who it is, what it was told, what it holds."""

    setup: Setup
    told: wire.ExperimentInfo
    runtime: DeviceRuntime
    samples: Samples
    test: Samples
    counts: tuple[int, ...]  # samples of every member of the fleet, as far as this one knows
    sums: State  # of its samples, as long as the server does not know what to prepare them by

    def capabilities(self, number: int, public: State) -> wire.Capabilities:
        """What the device can spend in a round, and which public model it holds."""
        distance_m, resources = self._own() if self.setup.profile else self._simulated(number)
        held = wire.model_digest(public)
        device = self.setup.device
        return wire.Capabilities(device, number, distance_m, resources, held, self.sums)

    def public(self, state: RecordDict) -> State:
        """The public model that the device holds: at first the initial one, made from the seed."""
        if not self.told.downlink:
            return {}
        return read_state(state, "public") or first_public(self.runtime.net.module)

    def catch_up(self, public: State, download: wire.Download) -> State:
        """The public model of this round, from the one that the device holds; none without one."""
        if not download.whole and download.base != wire.model_digest(public):
            raise MessageError("this device holds another public model than the steps start from")
        public = download.whole or public
        for step in download.steps:
            public = take_step(self.runtime.net, public, step, self.told.fingerprint)
        return public

    def perform(self, task: wire.TrainTask, public: State, memory: State | None) -> Reply:
        """Train the sub-model that came or is cut from the public model, and encode its update."""
        if self.sums:
            raise MessageError("a task that does not say what samples are prepared by")
        if task.device != self.setup.device:
            raise MessageError(f"a task for device {task.device}, this is {self.setup.device}")
        self._check_cost(task)
        upload = replace(task.upload, blocks=self.runtime.net.blocks())
        job = Job(
            device=task.device,
            alpha=task.alpha,
            upload=upload,
            seed=task.seed,
            learning_rate=task.learning_rate,
            work=task.work,
            memory=memory,
            moved=task.moved,
        )
        sub = self._sub_model(task, public)
        return self.runtime.perform(sub, self.samples, job, self._learn())

    def _learn(self) -> Learn:
        """How it learns: privately, if its owner says so."""
        setup = self.setup
        if not setup.noise:
            return learn_honestly
        if self.told.feedback:
            raise PolicyError(
                "error feedback returns what clipping cut off; the owner of this device allows "
                "only methods without it"
            )
        return learn_privately(
            learn_honestly, Privacy("local", setup.clip_norm, setup.noise, secret=True)
        )

    def _check_cost(self, task: wire.TrainTask) -> None:
        """Refuse what is beyond the owner's budgets; a member of a simulated fleet has none."""
        policy = Policy(max_epochs=self.setup.max_epochs)
        policy.check(self.told.method, self.runtime.epochs * task.work, self.told.training.batch)
        if not self.setup.profile:
            return
        net = self.runtime.net
        plan = net.plan(task.alpha)
        elements = sum(math.prod(plan.shapes[n]) for n, _ in net.module.named_parameters())
        bits = 32 * task.upload.beta * elements
        flops = task.work * net.training_flops
        workload = Workload(flops, net.size_bits, self.runtime.epochs)
        check_cost(self._own()[1], workload, plan.flops_ratio, bits)

    def evaluate(self, task: wire.EvaluateTask) -> wire.Evaluation:
        """The sums of every metric over this device's test samples."""
        if not len(self.test):
            raise ConfigError(["data: this device has no samples to test on"])
        sub = self.runtime.net.shrink(1.0)
        _fill(sub, task.weights)
        recalibrate(sub.module, calibration_batches(self.samples.inputs))
        chunks = self.runtime.measure(sub.module, self.test)
        sums = tuple(torch.cat(parts).sum(0) for parts in zip(*chunks, strict=True))
        return wire.Evaluation(len(self.test), sums)

    def _sub_model(self, task: wire.TrainTask, public: State) -> SubModel:
        """The sub-model of a task, with the weights that came with it, or the public ones."""
        net = self.runtime.net
        sub = net.shrink(task.alpha)
        if dict(sub.plan.widths) != dict(task.widths):
            raise MessageError(
                f"alpha {task.alpha:g} means other widths here than on the server: do both have "
                "the same model?"
            )
        if self.told.downlink:
            _fill(sub, net.take(public, sub.plan))
        else:
            _fill(sub, wire.unpack_weights(net, sub.plan, task.weights))
        return sub

    def _simulated(self, number: int) -> tuple[float, Devices]:
        """As the experiment's fleet draws this device in a round."""
        spec, device = self.told.fleet, self.setup.device
        named = [name for name in spec.profiles if name.endswith(".toml")]
        if named and not self.setup.server_files:
            raise ConfigError(
                [f"fleet.profiles: the server names files, {', '.join(named)}; say what this "
                 "device is with --profile"]
            )  # fmt: skip
        fleet = draw_fleet(
            spec,
            seed=self.told.seed,
            round_index=number,
            samples=np.array(self.counts),
            profiles=profiles_of(spec),
        )
        return float(fleet.distance_m[device]), fleet.devices.take(slice(device, device + 1))

    def _own(self) -> tuple[float, Devices]:
        """As its owner describes it; the distance does not matter where the rate is known."""
        setup, kind = self.setup, load_profile(self.setup.profile)
        resources = make_devices(
            **hardware_of(kind),
            samples=len(self.samples),
            rate_bps=setup.rate_bps or kind.rate_bps or 0.0,
            latency_s=setup.latency_s or self.told.fleet.latency_s,
            energy_j=setup.energy_j,
        )
        return 0.0, resources


def _fill(sub: SubModel, state: State) -> None:
    """Copy these tensors into a sub-model; MessageError if they are not its own."""
    own = tensors_of(sub.module)
    for name, tensor in state.items():
        if name not in own or own[name].shape != tensor.shape:
            raise MessageError(f"{name} of shape {tuple(tensor.shape)} is not part of this model")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


@lru_cache(maxsize=1)  # a process is one device, but for simulated fleets
def open_device(setup: Setup, told: wire.ExperimentInfo) -> Device:
    """This device, with its own samples, in the experiment that the server describes."""
    policy = Policy(setup.methods, setup.max_epochs, setup.min_batch)
    policy.check(told.method, told.epochs, told.training.batch)
    if not 0 <= setup.device < told.fleet.devices:
        last = told.fleet.devices - 1
        raise ConfigError([f"device: given {setup.device}, must be 0 to {last} in this fleet"])
    raw, dataset, runtime = _ground(told, setup.data, server_files=setup.server_files)
    is_common = not setup.data or setup.data in tasks.names()  # and not this device's alone
    parts: Partition = [np.arange(len(dataset.train))] * told.fleet.devices
    if is_common or setup.split:
        random = splitting_generator(told.seed)
        parts = split_samples(told.data, dataset.train, told.fleet.devices, random)
    chosen = torch.from_numpy(parts[setup.device])
    tested = torch.arange(len(dataset.test))
    if is_common:  # the test set is split over the fleet, too
        tested = tested[setup.device :: told.fleet.devices]
    how = runtime.task.preparation
    return Device(
        setup=setup,
        told=told,
        runtime=runtime,
        samples=dataset.train.take(chosen),
        test=dataset.test.take(tested),
        counts=tuple(map(len, parts)),
        sums=how.measure(raw.train.take(chosen)) if how and not told.fitted else {},
    )


@lru_cache(maxsize=1)
def _ground(
    told: wire.ExperimentInfo, own_data: str, *, server_files: bool
) -> tuple[Dataset, Dataset, DeviceRuntime]:
    """What stays the same from message to message: data as it is and prepared, traced model."""
    task, raw = _task_and_data(told, own_data, server_files=server_files)
    dataset = prepare_dataset(task.preparation, raw, told.prepared_by() or None)
    module = initial_module(told.model, told.seed)
    net = trace_model(told.model, told.widths, module, dataset.train)
    check_fit(task, net, dataset.train)
    method = replace(methods.load(told.method), feedback=told.feedback)
    training = resolve_training(told.training)
    return raw, dataset, DeviceRuntime(task, method, net, training, told.epochs)


def _task_and_data(
    told: wire.ExperimentInfo, own_data: str, *, server_files: bool
) -> tuple[Task, Dataset]:
    """What is learnt, by its name, and from what: as this device's owner says, or the server."""
    name, path = told.data.name, told.data.path
    if not own_data and not server_files and (path or name.endswith(".npz")):
        problem = f"data: the server names a file, {path or name}; name the device's with --data"
        raise ConfigError([problem])
    if not own_data:
        task = tasks.load(name)
        return task, task.dataset(path)
    if name.endswith(".npz"):  # the server's arrays say no more than what kind of task it is
        raw = read_own(own_data)
        return tasks.task_of(raw, own_data), _with_tests(raw, told)
    task = tasks.load(name)
    if own_data in tasks.names():
        return task, tasks.load(own_data).dataset()
    return task, _with_tests(read_own(own_data, task.classes, task.transform), told)


def _with_tests(raw: Dataset, told: wire.ExperimentInfo) -> Dataset:
    """Data that a device can be tested on, if devices evaluate."""
    is_needed = told.data.evaluate == "devices" and not len(raw.test)
    return tasks.hold_out_tenth(raw) if is_needed else raw


# --- what it remembers ----------------------------------------------------------------------------


def recall(state: RecordDict, info: wire.RoundInfo) -> State | None:
    """The residual when this round began, if it is the next round or a repeat of the last."""
    about = state.config_records.get("remembered")
    if about is None or about["experiment"] != info.experiment.fingerprint:
        return None
    ahead = info.round - cast(int, about["round"])
    if ahead < 0:
        return None
    return read_state(state, "after" if ahead else "before") or None


def remember(state: RecordDict, info: wire.RoundInfo, memory: State | None) -> None:
    """Keep the residual as it is now, and as it was when the round began."""
    write_state(state, "before", recall(state, info))
    write_state(state, "after", memory)
    fingerprint, number = info.experiment.fingerprint, info.round
    state["remembered"] = ConfigRecord({"experiment": fingerprint, "round": number})
