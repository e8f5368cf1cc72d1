"""The device's half of a round, as a Flower ClientApp.

A device says who it is and what it can afford (`offer`), and performs its task as a simulated
device does (`DeviceSide.work`). It keeps the data and the traced model between messages as long as
its process lives; what it has left over (`feedback`) lies in Flower's context, for the last round
and the one before, so that a round which the server has to repeat starts from the same memory.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from torch import Tensor

from anycostfl.config import Config, load_profile, parse_config, profiles_of
from anycostfl.downlink import first_public, take_step
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import prepare
from anycostfl.fleet import draw_fleet, hardware_of
from anycostfl.flower.broadcast import mark_of
from anycostfl.flower.messages import (
    Ask,
    Download,
    MessageError,
    Offer,
    Result,
    Task,
    pack_state,
    read_ask,
    read_state,
    read_task,
    unpack_weights,
)
from anycostfl.shrink import SubModel
from anycostfl.state import State, tensors_of
from anycostfl.train import reuse_memory
from anycostfl.types import Devices, Profile, Scale, make_devices
from anycostfl.workers import DeviceSide, Job, Reply

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer which device this is and what it can afford."""
    ask = read_ask(message.content)
    device = open_device(context.node_config, ask)
    offer = device.offer(ask.round, device.public(context.state))
    return Message(RecordDict({"offer": offer.pack()}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Perform the task in a message."""
    begin = time.perf_counter()
    task = read_task(message.content)
    device = open_device(context.node_config, task.ask)
    torch.set_num_threads(device.setup.threads)
    reuse_memory()
    memory = recall(context.state, task.ask)
    try:
        public = device.catch_up(device.public(context.state), task.download)
        keep_public(context.state, public)
        reply = device.perform(task, public, memory)
    except AnycostError as problem:
        reply = Reply(task.device, error=str(problem), memory=memory)
    remember(context.state, task.ask, reply.memory)
    result = Result(
        payload=reply.payload,
        error=reply.error,
        busy_s=time.perf_counter() - begin,
        offer=device.offer(task.ask.round + 1, device.public(context.state)),
    )
    return Message(result.pack(), reply_to=message)


# --- who this device is ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What the owner of a device decides.

    Without a profile it is the member of that number of the experiment's simulated fleet. `data`
    takes the place of the experiment's dataset; with `all_data` the device trains on all of it
    instead of its part of the split.
    """

    device: int
    profile: str = ""
    rate_bps: float = 0.0
    latency_s: float = 0.0
    energy_j: float = 0.0
    data: str = ""
    all_data: bool = False
    threads: int = 1
    no_server_files: bool = False  # never read a file that the server names

    def node_config(self) -> UserConfig:
        """As Flower's node configuration."""
        names = ("profile", "rate_bps", "latency_s", "energy_j", "data", "all_data", "threads")
        given = {name.replace("_", "-"): getattr(self, name) for name in names}
        return {"device": self.device, **{key: value for key, value in given.items() if value}}


def read_setup(table: UserConfig) -> Setup:
    """From Flower's node configuration; its simulation only says `partition-id`."""
    number = table.get("device", table.get("partition-id"))
    if not isinstance(number, int):
        raise ConfigError(["--node-config: allowed device=NUMBER, its place in the fleet"])
    return Setup(
        device=number,
        profile=str(table.get("profile", "")),
        rate_bps=float(table.get("rate-bps", 0)),
        latency_s=float(table.get("latency-s", 0)),
        energy_j=float(table.get("energy-j", 0)),
        data=str(table.get("data", "")),
        all_data=bool(table.get("all-data", False)),
        threads=int(table.get("threads", 1)),
        no_server_files="device" in table,
    )


# --- what it does ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """A device in one experiment, in one round of it."""

    setup: Setup
    config: Config
    side: DeviceSide
    text: str  # the experiment, as the server wrote it

    def offer(self, number: int, public: State) -> Offer:
        """What the device can afford in a round, and which public model it holds."""
        distance_m, means = self._simulated(number) if not self.setup.profile else self._own()
        return Offer(self.setup.device, number, distance_m, means, mark_of(public))

    def public(self, state: RecordDict) -> State:
        """The public model that the device holds: at first the initial one, made from the seed."""
        if not self.config.compression.downlink:
            return {}
        return read_state(state, "public") or first_public(self.side.net.module)

    def catch_up(self, public: State, download: Download) -> State:
        """The public model of this round, from the one that the device holds; none without one."""
        if not download.whole and download.base != mark_of(public):
            raise MessageError("this device holds another public model than the steps start from")
        public = download.whole or public
        for step in download.steps:
            public = take_step(self.side.net, public, step, self.text)
        return public

    def perform(self, task: Task, public: State, memory: State | None) -> Reply:
        """Train the sub-model that came or is cut from the public model, and compress."""
        if task.device != self.setup.device:
            raise MessageError(f"a task for device {task.device}, this is {self.setup.device}")
        side = self.side
        upload = replace(task.upload, blocks=side.net.blocks())
        job = Job(task.device, task.alpha, upload, task.seed, memory, task.moved)
        return side.work(self.submodel(task, public), self.samples(), job)

    def submodel(self, task: Task, public: State) -> SubModel:
        """The sub-model of a task, with the weights that came with it, or those of all."""
        net = self.side.net
        sub = net.shrink(task.alpha)
        if dict(sub.plan.widths) != dict(task.widths):
            raise MessageError(
                f"alpha {task.alpha:g} means other widths here than on the server: do both run "
                "the same version?"
            )
        own = tensors_of(sub.module)
        if self.config.compression.downlink:
            sent = net.take(public, sub.plan)
        else:
            sent = unpack_weights(net, tensors_of(net.module), sub.plan, task.weights)
        with torch.no_grad():
            for name, tensor in sent.items():
                own[name].copy_(tensor)
        return sub

    def samples(self) -> tuple[Tensor, Tensor]:
        """The images and labels this device trains on."""
        shared = self.side.shared
        if self.setup.all_data:
            return shared.train_images, shared.train_labels
        chosen = self.side.samples_of(self.setup.device)
        return shared.train_images[chosen], shared.train_labels[chosen]

    def _simulated(self, number: int) -> tuple[float, Devices]:
        """As the experiment's fleet draws this device in a round."""
        fleet = draw_fleet(
            self.config.fleet,
            seed=self.config.run.seed,
            round_index=number,
            samples=self._counts(),
            profiles=self._kinds(),
        )
        here = slice(self.setup.device, self.setup.device + 1)
        return float(fleet.distance_m[self.setup.device]), fleet.devices.take(here)

    def _counts(self) -> npt.NDArray[np.int64]:
        """How many samples every device of the fleet holds, as far as this one knows."""
        if self.setup.all_data:
            return np.full(self.config.fleet.devices, len(self.side.shared.train_labels))
        return self.side.sample_counts()

    def _kinds(self) -> dict[str, Profile]:
        """What the experiment's fleet is made of."""
        fleet = self.config.fleet
        named = [name for name in fleet.profiles if name.endswith(".toml")]
        if named and self.setup.no_server_files:
            raise ConfigError(
                [f"fleet.profiles: the server names files of its own, {', '.join(named)}; name "
                 "what this device is with --profile"]
            )  # fmt: skip
        return profiles_of(fleet)

    def _own(self) -> tuple[float, Devices]:
        """As its owner describes it; distances do not matter where the rate is known."""
        setup, kind = self.setup, load_profile(self.setup.profile)
        means = make_devices(
            **hardware_of(kind),
            samples=len(self.samples()[1]),
            rate_bps=setup.rate_bps or kind.rate_bps or 0.0,
            latency_s=setup.latency_s or self.config.fleet.latency_s,
            energy_j=setup.energy_j,
        )
        return 0.0, means


def open_device(table: UserConfig, ask: Ask) -> Device:
    """This device in the experiment that the server asks about."""
    setup = read_setup(table)
    config, side = _ground(
        ask.config,
        ask.scale,
        setup.data,
        whole=setup.all_data,
        no_server_files=setup.no_server_files,
    )
    if not 0 <= setup.device < config.fleet.devices:
        raise ConfigError(
            [f"device: given {setup.device}, allowed 0 … {config.fleet.devices - 1} in this fleet"]
        )
    return Device(setup, config, side, ask.config)


@lru_cache(maxsize=1)
def _ground(
    text: str, scale: Scale | None, data: str, *, whole: bool, no_server_files: bool
) -> tuple[Config, DeviceSide]:
    """What stays the same from message to message: data and traced model."""
    config = _with_data(parse_config(text, "the server's configuration"), data)
    if no_server_files and not data and (config.data.path or config.data.name.endswith(".npz")):
        raise ConfigError(
            [f"data: the server names a file of its own, {config.data.path or config.data.name}; "
             "name the data of this device with --data"]
        )  # fmt: skip
    return config, prepare(config, scale, whole=whole)


def _with_data(config: Config, data: str) -> Config:
    """The experiment on the data that the owner of this device names, if any."""
    return replace(config, data=replace(config.data, name=data, path="")) if data else config


# --- what it remembers ----------------------------------------------------------------------------


def recall(state: RecordDict, ask: Ask) -> State | None:
    """What the device remembered when this round began, if it is the next one or the last again."""
    about = state.config_records.get("remembered")
    if about is None or about["experiment"] != _experiment(ask):
        return None
    last = about["round"]
    key = "after" if isinstance(last, int) and last < ask.round else "before"
    if key == "before" and last != ask.round:
        return None
    return read_state(state, key) or None


def remember(state: RecordDict, ask: Ask, memory: State | None) -> None:
    """Keep what the device remembers now, and what it did when the round began."""
    before = recall(state, ask)
    for key, kept in (("before", before), ("after", memory)):
        state.pop(key, None)
        if kept:
            state[key] = pack_state(kept)
    state["remembered"] = ConfigRecord({"experiment": _experiment(ask), "round": ask.round})


def keep_public(state: RecordDict, public: State) -> None:
    """Keep the public model of this round, if there is one."""
    if public:
        state["public"] = pack_state(public)


def _experiment(ask: Ask) -> bytes:
    return hashlib.blake2s(ask.config.encode()).digest()
