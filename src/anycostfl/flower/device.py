"""The device as a Flower ClientApp: it says what it can spend, trains, and evaluates.

It performs its task as a simulated device does (`device.DeviceRuntime`). It keeps the data and the
traced model between messages as long as its process lives; its residual (`feedback`) is in Flower's
context, for the last round and the one before, so that a round which the server has to repeat
starts from the same memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from anycostfl import data, methods
from anycostfl.config import load_profile, profiles_of
from anycostfl.config.loading import checked
from anycostfl.device import (
    DeviceRuntime,
    Job,
    Reply,
    Samples,
    count_correct,
    learn_honestly,
    reuse_memory,
)
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import initial_module, resolve_training, split, trace_model
from anycostfl.flower.broadcast import model_digest
from anycostfl.flower.messages import read_state, to_envelope, to_records, write_state
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.planning.draw import Profile, draw_fleet, hardware_of
from anycostfl.server.downlink import first_public, take_step
from anycostfl.shrink import SubModel, calibration_batches, recalibrate
from anycostfl.state import State, tensors_of
from anycostfl.wire.envelope import MessageError
from anycostfl.wire.messages import (
    Capabilities,
    Download,
    EvaluateTask,
    Evaluation,
    ExperimentInfo,
    Result,
    RoundInfo,
    Task,
    read_evaluate_task,
    read_info,
    read_task,
    unpack_weights,
)

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer which device this is and what it can spend."""
    info = read_info(to_envelope(message.content))
    device = open_device(context.node_config, info.experiment)
    known = device.capabilities(info.round, device.public(context.state))
    return Message(to_records(known.pack()), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Perform the task in a message."""
    begin = time.perf_counter()
    task = read_task(to_envelope(message.content))
    device = open_device(context.node_config, task.info.experiment)
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
    result = Result(
        payload=reply.payload,
        error=reply.error,
        busy_s=time.perf_counter() - begin,
        next=device.capabilities(task.info.round + 1, device.public(context.state)),
    )
    return Message(to_records(result.pack()), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model in a message on this device's test samples."""
    task = read_evaluate_task(to_envelope(message.content))
    device = open_device(context.node_config, task.info.experiment)
    torch.set_num_threads(device.setup.threads)
    return Message(to_records(device.evaluate(task).pack()), reply_to=message)


# --- who this device is ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What the owner of a device decides.

    Without a profile it is the member of that number of the experiment's simulated fleet. `data`
    replaces the experiment's dataset; with `all_data` the device trains on all of it instead of its
    part of the split. `server_files` allows files that the server names, as Flower's simulation
    engine needs it.
    """

    device: int
    profile: str = ""
    rate_bps: float = 0.0
    latency_s: float = 0.0
    energy_j: float = 0.0
    data: str = ""
    all_data: bool = False
    threads: int = 1
    server_files: bool = False

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
    told: ExperimentInfo
    runtime: DeviceRuntime
    samples: Samples
    test: Samples
    counts: tuple[int, ...]  # samples of every member of the fleet, as far as this one knows

    def capabilities(self, number: int, public: State) -> Capabilities:
        """What the device can spend in a round, and which public model it holds."""
        distance_m, resources = self._own() if self.setup.profile else self._simulated(number)
        digest = model_digest(public)
        return Capabilities(self.setup.device, number, distance_m, resources, digest)

    def public(self, state: RecordDict) -> State:
        """The public model that the device holds: at first the initial one, made from the seed."""
        if not self.told.downlink:
            return {}
        return read_state(state, "public") or first_public(self.runtime.net.module)

    def catch_up(self, public: State, download: Download) -> State:
        """The public model of this round, from the one that the device holds; none without one."""
        if not download.whole and download.base != model_digest(public):
            raise MessageError("this device holds another public model than the steps start from")
        public = download.whole or public
        for step in download.steps:
            public = take_step(self.runtime.net, public, step, self.told.fingerprint)
        return public

    def perform(self, task: Task, public: State, memory: State | None) -> Reply:
        """Train the sub-model that came or is cut from the public model, and encode its update."""
        if task.device != self.setup.device:
            raise MessageError(f"a task for device {task.device}, this is {self.setup.device}")
        upload = replace(task.upload, blocks=self.runtime.net.blocks())
        job = Job(task.device, task.alpha, upload, task.seed, memory, task.moved)
        return self.runtime.perform(
            self._sub_model(task, public), self.samples, job, learn_honestly
        )

    def evaluate(self, task: EvaluateTask) -> Evaluation:
        """The number of correct predictions on this device's test samples."""
        sub = self.runtime.net.shrink(1.0)
        _fill(sub, task.weights)
        if len(self.samples[1]):
            recalibrate(sub.module, calibration_batches(self.samples[0]))
        correct = count_correct(sub.module, self.test, self.runtime.training)
        return Evaluation(correct, len(self.test[1]))

    def _sub_model(self, task: Task, public: State) -> SubModel:
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
            like = tensors_of(net.module)
            _fill(sub, unpack_weights(net, like, sub.plan, task.weights))
        return sub

    def _simulated(self, number: int) -> tuple[float, Devices]:
        """As the experiment's fleet draws this device in a round."""
        fleet = draw_fleet(
            self.told.fleet,
            seed=self.told.seed,
            round_index=number,
            samples=np.array(self.counts),
            profiles=self._profiles(),
        )
        here = slice(self.setup.device, self.setup.device + 1)
        return float(fleet.distance_m[self.setup.device]), fleet.devices.take(here)

    def _profiles(self) -> dict[str, Profile]:
        """What the experiment's fleet is made of."""
        named = [name for name in self.told.fleet.profiles if name.endswith(".toml")]
        if named and not self.setup.server_files:
            raise ConfigError(
                [f"fleet.profiles: the server names files, {', '.join(named)}; say what this "
                 "device is with --profile"]
            )  # fmt: skip
        return profiles_of(self.told.fleet)

    def _own(self) -> tuple[float, Devices]:
        """As its owner describes it; the distance does not matter where the rate is known."""
        setup, kind = self.setup, load_profile(self.setup.profile)
        resources = make_devices(
            **hardware_of(kind),
            samples=len(self.samples[1]),
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


def open_device(table: UserConfig, told: ExperimentInfo) -> Device:
    """This device in the experiment that the server describes."""
    setup = read_setup(table)
    if not 0 <= setup.device < told.fleet.devices:
        raise ConfigError(
            [f"device: given {setup.device}, must be 0 to {told.fleet.devices - 1} in this fleet"]
        )
    return _open(setup, told)


@lru_cache(maxsize=1)  # a process is one device, but for simulated fleets
def _open(setup: Setup, told: ExperimentInfo) -> Device:
    """This device with its own samples."""
    dataset, runtime = _ground(told, setup.data, server_files=setup.server_files)
    if setup.all_data:
        parts = [np.arange(len(dataset.train_labels))] * told.fleet.devices
    else:
        parts = split(told.data, told.fleet.devices, told.seed, dataset)
    chosen = torch.from_numpy(parts[setup.device])
    tested = torch.arange(len(dataset.test_labels))
    if not setup.data:  # a common test set is split over the fleet, too
        tested = tested[setup.device :: told.fleet.devices]
    return Device(
        setup=setup,
        told=told,
        runtime=runtime,
        samples=(dataset.train_images[chosen], dataset.train_labels[chosen]),
        test=(dataset.test_images[tested], dataset.test_labels[tested]),
        counts=tuple(map(len, parts)),
    )


@lru_cache(maxsize=1)
def _ground(
    told: ExperimentInfo, own_data: str, *, server_files: bool
) -> tuple[data.Dataset, DeviceRuntime]:
    """What stays the same from message to message: data and traced model."""
    name, path = (own_data, "") if own_data else (told.data.name, told.data.path)
    if not own_data and not server_files and (path or name.endswith(".npz")):
        raise ConfigError(
            [f"data: the server names a file, {path or name}; name the data of this device with "
             "--data"]
        )  # fmt: skip
    dataset = data.load(name, path, told.scale)
    module = initial_module(told.model, told.seed)
    net = trace_model(told.model, told.widths, module, dataset)
    method = replace(methods.load(told.method), feedback=told.feedback)
    return dataset, DeviceRuntime(method, net, resolve_training(told.training), told.epochs)


# --- what it remembers ----------------------------------------------------------------------------


def recall(state: RecordDict, info: RoundInfo) -> State | None:
    """The residual when this round began, if it is the next round or a repeat of the last."""
    about = state.config_records.get("remembered")
    if about is None or about["experiment"] != info.experiment.fingerprint:
        return None
    last = about["round"]
    key = "after" if isinstance(last, int) and last < info.round else "before"
    if key == "before" and last != info.round:
        return None
    return read_state(state, key) or None


def remember(state: RecordDict, info: RoundInfo, memory: State | None) -> None:
    """Keep the residual as it is now, and as it was when the round began."""
    before = recall(state, info)
    write_state(state, "before", before)
    write_state(state, "after", memory)
    state["remembered"] = ConfigRecord(
        {"experiment": info.experiment.fingerprint, "round": info.round}
    )
