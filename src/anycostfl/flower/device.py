"""The device as a Flower ClientApp: it says what it can spend, trains, and evaluates.

It performs its task as a simulated device does (`device.DeviceRuntime`). Data and traced model stay
in memory between messages; its residual (`feedback`) is in Flower's context, for the last round and
the one before, so that a round which the server has to repeat starts from the same memory.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from logging import INFO, WARNING
from pathlib import Path
from statistics import NormalDist
from typing import cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from anycostfl import methods, tasks
from anycostfl.codec import Upload
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
    return_memory,
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
from anycostfl.flower.costs import (
    AT_FIRST,
    RESERVED,
    Costs,
    DamagedCostsError,
    Pending,
    from_text,
    load_costs,
    offer_of,
    plan_own,
    save_costs,
    smallest_share,
    to_text,
    without_budgets,
    workload_key,
)
from anycostfl.flower.messages import (
    Transfer,
    read_state,
    read_transfer,
    to_envelope,
    to_records,
    write_state,
)
from anycostfl.flower.policy import Policy, PolicyError, check_cost
from anycostfl.machine.clock import set_clock, settable_clock
from anycostfl.machine.sensors import read_clock
from anycostfl.machine.usage import Usage, has_meter, release_memory, start_usage
from anycostfl.planning import estimator
from anycostfl.planning.cost import UNLIMITED, Devices, Workload, make_devices
from anycostfl.planning.draw import Profile, draw_fleet, hardware_of
from anycostfl.planning.estimator import Estimate, Terms
from anycostfl.planning.planner import needed_budgets
from anycostfl.planning.strategy import Reason, Strategies
from anycostfl.records.round import Measured
from anycostfl.server.downlink import first_public, take_step
from anycostfl.server.privacy import Privacy
from anycostfl.shrink import SubModel, calibration_batches, recalibrate
from anycostfl.state import State, tensors_of
from anycostfl.tasks import Task
from anycostfl.wire import messages as wire
from anycostfl.wire.envelope import MessageError

ANY_RATE_BPS = 1e6  # of an uplink that nobody has described: what is measured replaces it
LEAST_COEFFICIENT, TRANSMITTER_W = 1e-28, 0.1  # of energy that nobody has described
DONE = "round %d: α %.3g, β %.3g; measured %.2f s, %d bytes"

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer which device this is and what it can spend."""
    info = wire.read_info(to_envelope(message.content))
    device = open_device(read_setup(context.node_config), info.experiment)
    costs = device.recall_costs(context.state)
    known = device.capabilities(info.round, device.public(context.state), costs)
    device.keep_costs(context.state, costs, known)
    return Message(to_records(known.pack()), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Perform the task in a message."""
    setup = read_setup(context.node_config)
    if setup.memory_bytes:
        return_memory()
        release_memory()
    else:
        reuse_memory()
    stop, begin = start_usage(), time.perf_counter()
    task = wire.read_task(to_envelope(message.content))
    device = open_device(setup, task.info.experiment)
    torch.set_num_threads(setup.threads)
    transfer, costs = read_transfer(context.state), device.recall_costs(context.state)
    time_used = device.time_used(costs, transfer)
    if costs:
        device.set_clock(costs)
        costs = costs.completed(transfer.upload_s, setup.confidence)
        until = begin + device.training_s(costs, task, transfer)
    else:
        until = math.inf
    memory = recall(context.state, task.info)
    try:
        public = device.catch_up(device.public(context.state), task.download)
        if public:
            write_state(context.state, "public", public)
        reply = device.perform(task, public, memory, until)
        reply = replace(
            reply, decode_s=time.perf_counter() - begin - reply.train_s - reply.encode_s
        )
    except AnycostError as problem:
        reply = Reply(task.device, error=str(problem), memory=memory)
    remember(context.state, task.info, reply.memory)
    usage = stop()
    costs = costs and device.learn(costs, task, reply, usage, transfer)
    known = device.capabilities(task.info.round + 1, device.public(context.state), costs)
    device.keep_costs(context.state, costs, known)
    seconds = time.perf_counter() - begin
    log(INFO, DONE, task.info.round, task.alpha, task.upload.beta, seconds, len(reply.payload))
    result = wire.Result(
        payload=reply.payload,
        error=reply.error,
        busy_s=seconds,
        next=known,
        done=reply.done,
        measured=replace(device.measured(reply, usage, transfer), earlier_time_used=time_used),
    )
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
    memory_bytes: float = 0.0  # that training may take; 0 is no limit
    confidence: float = 0.95  # with which a budget is kept
    state: str = ""  # the file of what the device learns about its costs
    believe: bool = False  # the profile, whatever is measured
    set_clock: bool = False  # to what is planned, where the system lets this process
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
        changed = {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default
        }
        return {"device": self.device, **{k.replace("_", "-"): v for k, v in changed.items()}}

    @property
    def is_member(self) -> bool:
        """Whether the device acts as a member of the simulated fleet: its owner says no budget."""
        return not any(
            (self.profile, self.rate_bps, self.latency_s, self.energy_j, self.memory_bytes)
        )


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
    latest: list[Costs] = field(default_factory=list)  # what it has learnt, once it is known

    def capabilities(
        self, number: int, public: State, costs: Costs | None = None
    ) -> wire.Capabilities:
        """What the device can spend in a round, and which public model it holds.

        What it has learnt is better than its profile.
        """
        distance_m, known = self._simulated(number) if self.setup.is_member else self._own()
        offer = None
        if costs:
            how, confidence = (self.runtime.method, self.told.limits), self.setup.confidence
            known, plan = plan_own(costs, known, self.terms, how, confidence)
            if offer := offer_of(plan, self.runtime.method):
                self._warn_infeasible(plan, known, number)
                known = without_budgets(known)
        held, device = wire.model_digest(public), self.setup.device
        return wire.Capabilities(device, number, distance_m, known, held, self.sums, offer)

    def _warn_infeasible(self, plan: Strategies, known: Devices, number: int) -> None:
        """Tell the owner what would suffice; the server does not know the budgets."""
        if not plan.feasible[0]:
            reason, needs = Reason(int(plan.reason[0])), needed_budgets(plan, known, 0)
            log(WARNING, "round %d: this device sits out (%s); it needs %s", number, reason, needs)

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

    def perform(
        self,
        task: wire.TrainTask,
        public: State,
        memory: State | None,
        until: float = math.inf,
    ) -> Reply:
        """Train the sub-model that came or is cut from the public model, and encode its update.

        No step of training begins that would end after a point in time.
        """
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
            until=until,
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

    def warm_up(self) -> None:
        """Train on one batch and encode: the first time compiles, which no round should pay for."""
        alpha, runtime = self.told.limits.alpha_min, self.runtime
        upload = Upload(0.01, 0, b"", runtime.net.blocks(), runtime.method.codec)
        job = Job(self.setup.device, alpha, upload, 0, runtime.training.learning_rate)
        if self.setup.memory_bytes:
            return_memory()
        few = self.samples.take(slice(0, runtime.training.batch))
        runtime.perform(runtime.net.shrink(alpha), few, job, learn_honestly)

    def _check_cost(self, task: wire.TrainTask) -> None:
        """Refuse what is beyond the owner's budgets; a member of a simulated fleet has none.

        A device that planned for itself does no more than it offered.
        """
        policy = Policy(max_epochs=self.setup.max_epochs)
        policy.check(self.told.method, self.runtime.epochs * task.work, self.told.training.batch)
        if self.setup.is_member:
            return
        net = self.runtime.net
        plan = net.plan(task.alpha)
        elements = sum(math.prod(plan.shapes[n]) for n, _ in net.module.named_parameters())
        bits = 32 * task.upload.beta * elements
        if self.latest:
            self.latest[0].check(task.alpha * max(task.work, 1.0), bits / net.size_bits)
        elif self.setup.profile:
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
        setup = self.setup
        kind = load_profile(setup.profile) if setup.profile else unknown_machine()
        watts_known = bool(setup.profile) or has_meter()
        hardware = hardware_of(kind)
        if not setup.believe:  # without setting the clock, there is the one that the governor gives
            clock = settable_clock() if setup.set_clock else None
            high = clock.max_hz if clock else kind.frequency_max_hz
            hardware |= {
                "frequency_min_hz": clock.min_hz if clock else high,
                "frequency_max_hz": high,
            }
        resources = make_devices(
            **hardware,
            samples=len(self.samples),
            rate_bps=setup.rate_bps or kind.rate_bps or ANY_RATE_BPS,
            latency_s=setup.latency_s or self.told.fleet.latency_s,
            energy_j=setup.energy_j if setup.energy_j and watts_known else UNLIMITED,
            memory_bytes=setup.memory_bytes or UNLIMITED,
        )
        return 0.0, resources

    # --- what it learns about its costs -----------------------------------------------------------

    @property
    def terms(self) -> Terms:
        """What its costs are turned into a plan with."""
        told = self.told
        return Terms(
            workload=told.workload,
            smallest=smallest_share(told.limits),
            downloads_model=not told.downlink,
            has_meter=has_meter(),
        )

    def recall_costs(self, state: RecordDict) -> Costs | None:
        """What it has learnt so far; nothing of a member of a simulated fleet, which pays nothing.

        At first from its file, or what Flower keeps for it, else from its profile or from nothing.
        """
        setup = self.setup
        if setup.is_member or setup.believe:
            return None
        if self.latest:
            return self.latest[0]
        kept, known = state.config_records.get("costs") or ConfigRecord(), None
        try:
            if setup.state:
                known = load_costs(Path(setup.state), self._workload)
            elif kept.get("workload") == self._workload:
                known = from_text(cast(str, kept["text"]))
        except DamagedCostsError as problem:
            log(WARNING, "%s; starting anew", problem)
        return known or Costs(self._prior())

    def _prior(self) -> Estimate:
        """What is believed before the first round."""
        _, known = self._own()
        if not self.setup.profile:
            smallest = self.terms.smallest
            return estimator.unknown(known.latency_s, smallest, AT_FIRST)
        return estimator.from_profile(known, self.terms, AT_FIRST)

    def keep_costs(self, state: RecordDict, costs: Costs | None, known: wire.Capabilities) -> None:
        """Remember what was learnt, and whether the device sits out; in its file, too."""
        if costs is None:
            return
        if known.offer:
            costs = costs.sat_out(known.round, feasible=not known.offer.reason)
            offer = known.offer
            costs = replace(
                costs,
                frequency_hz=offer.frequency_hz,
                alpha=offer.alpha,
                uploads=offer.alpha * offer.beta,
            )
        self.latest[:] = [costs]
        if self.setup.state:
            with suppress(OSError):  # a full disk stops no device
                save_costs(Path(self.setup.state), self._workload, costs)
        else:
            kept = ConfigRecord({"workload": self._workload, "text": to_text(costs)})
            state["costs"] = kept

    @property
    def _workload(self) -> str:
        """What costs belong to."""
        told, training = self.told, self.runtime.training
        model = told.model, told.widths, told.method, told.epochs, told.downlink
        how = training.batch, training.optimizer, training.precision, training.device
        return workload_key(*model, *how, len(self.samples), self.setup.threads)

    def set_clock(self, costs: Costs) -> None:
        """Run at the clock that was planned, if the owner and the system let this process."""
        if self.setup.set_clock and costs.frequency_hz and settable_clock():
            set_clock(costs.frequency_hz)

    def training_s(self, costs: Costs, task: wire.TrainTask, transfer: Transfer) -> float:
        """Seconds after the task came at which training has to be over to upload in time."""
        _, known = self._own()
        elements = self.runtime.net.plan(task.alpha)
        bits = task.upload.beta * 32 * sum(map(math.prod, elements.shapes.values()))
        share = np.array([bits / self.told.workload.size_bits])
        upload = costs.estimate.upload
        bound = NormalDist().inv_cdf(RESERVED) * np.sqrt(upload.variance_at(share))
        upload_s = float((upload.predict(share) * np.exp(bound))[0]) if upload.rounds[0] else 0.0
        spent = 0.0 if math.isnan(transfer.download_s) else transfer.download_s
        return float(known.latency_s[0]) - spent - upload_s - costs.finish_s

    def learn(
        self,
        costs: Costs,
        task: wire.TrainTask,
        reply: Reply,
        usage: Usage,
        transfer: Transfer,
    ) -> Costs:
        """With what this round took, as far as it is known before its upload."""
        if reply.error:
            return costs
        unfinished = reply.train_s * (1.0 / reply.done - 1.0)
        whole = (usage.seconds + unfinished) / usage.seconds
        _, known = self._own()
        fastest = float(known.frequency_max_hz[0])
        # As it would have been at the highest clock: T is in proportion to 1/f, E to f².
        slower = (
            costs.frequency_hz / fastest if self.setup.set_clock and costs.frequency_hz else 1.0
        )
        pending = Pending(
            round=task.info.round,
            alpha=task.alpha,
            uploaded=8 * len(reply.payload) / self.told.workload.size_bits,
            download_s=transfer.download_s,
            compute_s=whole * usage.seconds * slower / task.work,
            joules=math.nan if usage.joules is None else whole * usage.joules / slower**2,
            until_upload_s=usage.seconds + transfer.download_s,
        )
        peaks = costs.peaks
        if usage.peak_bytes is not None and usage.base_bytes is not None:
            peaks = peaks.after(task.alpha, usage.base_bytes, usage.peak_bytes)
        finish_s = usage.seconds - reply.decode_s - reply.train_s
        return replace(costs, pending=pending, peaks=peaks, finish_s=finish_s)

    def time_used(self, costs: Costs | None, transfer: Transfer) -> float | None:
        """The share of its latency budget that the last round took, now that its upload is over."""
        pending = costs and costs.pending
        if not pending or pending.round != transfer.earlier_round:
            return None
        _, known = self._own()
        return _known((pending.until_upload_s + transfer.upload_s) / float(known.latency_s[0]))

    def measured(self, reply: Reply, usage: Usage, transfer: Transfer) -> Measured:
        """What this round took, for the server's journal."""
        setup = self.setup
        energy_used = memory_used = None
        if usage.joules is not None and setup.energy_j:
            energy_used = usage.joules / setup.energy_j
        if usage.peak_bytes is not None and setup.memory_bytes:
            memory_used = usage.peak_bytes / setup.memory_bytes
        return Measured(
            download_s=_known(transfer.download_s),
            decode_s=reply.decode_s,
            train_s=reply.train_s,
            encode_s=max(usage.seconds - reply.decode_s - reply.train_s, 0.0),
            joules=usage.joules,
            energy_used=energy_used,
            memory_bytes=usage.peak_bytes,
            memory_used=memory_used,
            clock_hz=usage.clock_hz,
            celsius=usage.celsius,
            throttled=usage.throttled,
            earlier_round=transfer.earlier_round,
            earlier_upload_s=_known(transfer.upload_s),
        )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def unknown_machine() -> Profile:
    """A machine without a profile: its clock is known, and what it does with it will be learnt."""
    hertz = read_clock().now_hz
    return Profile("this machine", 1.0, LEAST_COEFFICIENT, hertz, hertz, TRANSMITTER_W)


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
    device = Device(
        setup=setup,
        told=told,
        runtime=runtime,
        samples=dataset.train.take(chosen),
        test=dataset.test.take(tested),
        counts=tuple(map(len, parts)),
        sums=how.measure(raw.train.take(chosen)) if how and not told.fitted else {},
    )
    if not setup.is_member and not device.sums:
        device.warm_up()
    return device


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
