"""The downlink: one compressed step a round keeps every device's copy of the model up to date.

Server and devices share a public model p. When a round begins, the server encodes how far its own
model w is ahead and broadcasts only that (docs/decisions/0014):

    p ← p + C(w − p)

Devices cut their sub-models out of p; their updates move w. What C loses is still in w − p and goes
with a later step, so errors do not add up. A device that was away is sent the steps it missed, or
the whole model where that is less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil

from torch import Tensor, nn

from anycostfl.codec import byte_budget, compress, decompress
from anycostfl.codec.frame import OVERHEAD
from anycostfl.errors import BetaError, ConfigError
from anycostfl.shrink import ElasticModel, Order
from anycostfl.state import State, clone_state
from anycostfl.types import DeviceRecord, RoundRecord

PLACE_BYTES = 4  # of one channel in an order


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """From one round's public model to the next: channels move, then values, unless none does."""

    round: int
    order: Order  # of the groups that moved
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes on the way down."""
        return len(self.payload) + PLACE_BYTES * sum(len(places) for places in self.order.values())


def first_public(module: nn.Module) -> dict[str, Tensor]:
    """The public model before the first round: every parameter, as it is."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def check_share(share: float, public: State) -> None:
    """Whether every step of this model has room for a payload, though it may be empty."""
    elements = sum(tensor.numel() for tensor in public.values())
    try:
        byte_budget(share, elements)
    except BetaError as error:
        least = ceil(OVERHEAD / (4 * elements) * 1e6) / 1e6
        raise ConfigError(
            [f"compression.downlink: given {share:g}, allowed 0 (uncompressed), or {least:g} to 1 "
             f"for a model of {elements} elements; {error}"]
        ) from error  # fmt: skip


def make_step(
    net: ElasticModel, public: State, order: Order, share: float, belongs: tuple[str, int]
) -> tuple[Step, dict[str, Tensor]]:
    """The step of a round, and the public model after it; `net` is sorted already.

    `share` is of 32 bits for each element, and for values; the order comes on top. `belongs` says
    to which experiment and round.
    """
    order = {name: new for name, new in order.items() if (new.diff() != 1).any()}
    moved = net.permute(public, order) if order else public
    own = dict(net.module.named_parameters())
    ahead = {name: own[name].detach() - tensor for name, tensor in moved.items()}
    payload = b""
    if any(bool(tensor.any()) for tensor in ahead.values()):
        binding = binding_of(*belongs)
        payload = compress(ahead, share, seed=0, codec="lowrank", binding=binding)
    step = Step(belongs[1], order, payload)
    return step, take_step(net, public, step, belongs[0])


def take_step(net: ElasticModel, public: State, step: Step, experiment: str) -> dict[str, Tensor]:
    """The next public model; PayloadError if the step does not belong here."""
    moved = net.permute(public, step.order) if step.order else dict(public)
    if not step.payload:
        return moved
    shapes = {name: tuple(tensor.shape) for name, tensor in moved.items()}
    binding = binding_of(experiment, step.round)
    values = decompress(step.payload, shapes, binding=binding).values
    return {name: tensor + values[name] for name, tensor in moved.items()}


def binding_of(experiment: str, number: int) -> bytes:
    """What a step belongs to: the experiment, as TOML, and the round."""
    return hashlib.blake2s(f"downlink {number} {experiment}".encode()).digest()


@contextmanager
def showing(net: ElasticModel, public: State) -> Iterator[None]:
    """Cut sub-models out of the public model, if there is one, instead of the server's own."""
    if not public:
        yield
        return
    own = clone_state(net.module)
    net.load(public)
    try:
        yield
    finally:
        net.load(own)


# --- what it costs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ledger:
    """The size of every round's step, and which round's public model each device holds.

    It is counted from the journal alone, so a run that goes on knows it.
    """

    steps: tuple[int, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)

    def download(self, device: int, step: int, whole: int) -> int:
        """What a device is sent in the next round, whose step has that size.

        Whoever comes for the first time has the initial model: it follows from the seed.
        """
        missed = self.steps[self.held.get(device, -1) + 1 :]
        return min(whole, sum(missed) + step)

    def after(self, record: RoundRecord) -> Ledger:
        """The ledger once a round is over."""
        there = {d.device: record.round for d in record.devices if d.bytes_down}
        return Ledger((*self.steps, record.step_bytes), {**self.held, **there})


def ledger_of(records: Iterable[RoundRecord]) -> Ledger:
    """The ledger after these rounds, from the first on."""
    ledger = Ledger()
    for record in records:
        ledger = ledger.after(record)
    return ledger


def charge_downloads(
    devices: tuple[DeviceRecord, ...], bytes_down: Mapping[int, int]
) -> tuple[DeviceRecord, ...]:
    """Records with what each device was really sent, for those who were sent anything."""
    return tuple(
        replace(d, bytes_down=bytes_down.get(d.device, d.bytes_down)) if d.bytes_down else d
        for d in devices
    )
