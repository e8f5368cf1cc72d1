"""How training samples are split over a simulated fleet (Sec. V-A).

iid         equal random parts
dirichlet   every class shared out by a Dirichlet draw (the paper's)
shards      sorted by class and cut into shards, a few for each device (McMahan et al., 2017)
skew        equal sizes, classes by a Dirichlet draw for each device
owner       whole owners: each to one device
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from torch import Tensor

from anycostfl.checks import Count, OneOf, Positive, check_fields
from anycostfl.data.samples import Samples
from anycostfl.errors import ConfigError

Partition = list[npt.NDArray[np.int64]]
"""For every device, the indices of its training samples."""

Labels = npt.NDArray[np.int64]

LEAST_SAMPLES = 10
"""As in FedMA's partition, nobody is left with fewer (where the data suffices)."""


@dataclass(frozen=True, slots=True)
class Data:
    """The task, how its samples are split over the fleet, and who holds the part to test on.

    name: a task, or an .npz file. path: the folder of its files, where it needs one.
    concentration: of the Dirichlet draws. shards: for each device.
    With `evaluate = "devices"` a server over Flower loads no data: devices test on their own.
    With `validation` a simulated run is tested on every tenth training sample, which it does not
    train on: to choose by, so that the test samples stay unseen.
    """

    name: str
    path: str = ""
    evaluate: Annotated[str, OneOf(("server", "devices"))] = "server"
    partition: Annotated[str, OneOf(("iid", "dirichlet", "shards", "skew", "owner"))] = "iid"
    concentration: Positive = 0.5
    shards: Count = 2
    validation: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def split_samples(
    how: Data, samples: Samples, devices: int, random: np.random.Generator
) -> Partition:
    """The training samples of every device."""
    count = len(samples)
    if devices > count:
        raise ConfigError([f"devices: given {devices}, must be at most {count}, one sample each"])
    if how.partition == "iid":
        return split_iid(count, devices, random)
    if how.partition == "owner":
        return split_by_owner(samples, devices)
    labels = class_labels(samples)
    if labels is None:
        raise ConfigError(
            [f"data.partition: given {how.partition}, which splits by class, but the targets are "
             "not one class for each sample; must be iid or owner here"]
        )  # fmt: skip
    if how.partition == "dirichlet":
        return split_dirichlet(labels, devices, how.concentration, random)
    if how.partition == "shards":
        return split_shards(labels, devices, how.shards, random)
    return split_skewed(labels, devices, how.concentration, random)


def class_labels(samples: Samples) -> Labels | None:
    """The class of every sample, if targets are one class each."""
    targets = samples.targets
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
        return None
    found: Labels = targets.numpy()
    return found


def split_iid(count: int, devices: int, random: np.random.Generator) -> Partition:
    """Equal random parts; the remainder goes to the first devices."""
    return [np.sort(part) for part in np.array_split(random.permutation(count), devices)]


def split_dirichlet(
    labels: Labels, devices: int, concentration: float, random: np.random.Generator
) -> Partition:
    """Every class split over the devices by a Dirichlet draw, as the paper of FedMA has it.

    FedMA's program besides gives no more of the next classes to a device that holds its equal part
    already: there sizes differ less (a deviation of 0.31 of the mean at 0.5 and 60 devices, here
    0.44), labels more.
    """
    least = min(LEAST_SAMPLES, len(labels) // (10 * devices) + 1)
    for _ in range(100):  # one or two will do, unless none will
        parts: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(devices)]
        for kind in np.unique(labels):
            members = random.permutation(np.flatnonzero(labels == kind))
            shares = random.dirichlet(np.full(devices, concentration))
            ends = np.floor(np.cumsum(shares)[:-1] * len(members) + 0.5).astype(int)
            for part, members_of in zip(parts, np.split(members, ends), strict=True):
                part.append(members_of)
        joined = [np.sort(np.concatenate(part)) for part in parts]
        if min(map(len, joined)) >= least:
            return joined
    raise ConfigError(
        [f"concentration: given {concentration:g} for {devices} devices; some device always "
         f"has fewer than {least} samples; use a larger one, or fewer devices"]
    )  # fmt: skip


def split_shards(
    labels: Labels, devices: int, shards: int, random: np.random.Generator
) -> Partition:
    """Sort by class, cut into equal shards, deal each device the same number of them."""
    if devices * shards > len(labels):
        raise ConfigError(
            [f"data.shards: given {shards} for {devices} devices, must be at most "
             f"{len(labels) // devices}, one sample each"]
        )  # fmt: skip
    order = random.permutation(len(labels))
    cut = np.array_split(order[np.argsort(labels[order], kind="stable")], devices * shards)
    dealt = random.permutation(devices * shards).reshape(devices, shards)
    return [np.sort(np.concatenate([cut[i] for i in own])) for own in dealt]


def split_skewed(
    labels: Labels, devices: int, concentration: float, random: np.random.Generator
) -> Partition:
    """As many samples for each device, its mix of classes drawn; what runs out is replaced.

    Each sample is drawn from the device's mix over the classes that have samples left.
    """
    kinds, inverse = np.unique(labels, return_inverse=True)
    left = [
        random.permutation(np.flatnonzero(inverse == kind)).tolist() for kind in range(len(kinds))
    ]
    mixes = random.dirichlet(np.full(len(kinds), concentration), devices)
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), devices)]
    parts = []
    for mix, size in zip(mixes, sizes, strict=True):
        own: list[int] = []
        while len(own) < size:
            there = np.array([len(members) for members in left])
            chances = np.where(there > 0, mix + 1e-12, 0.0)
            wanted = random.multinomial(size - len(own), chances / chances.sum())
            for kind, count in enumerate(np.minimum(wanted, there)):
                own += [left[kind].pop() for _ in range(count)]
        parts.append(np.sort(np.array(own)))
    return parts


def split_by_owner(samples: Samples, devices: int) -> Partition:
    """Whole owners; with fewer devices than owners, the largest go first, to the least loaded."""
    if samples.owners is None:
        raise ConfigError(["data.partition: given owner, but the data does not name owners"])
    numbers, inverse = np.unique(samples.owners.numpy(), return_inverse=True)
    if devices > len(numbers):
        raise ConfigError(
            [f"fleet.devices: given {devices}, must be at most {len(numbers)}, one owner each"]
        )  # fmt: skip
    sizes = np.bincount(inverse)
    device_of = np.arange(len(numbers))
    if devices < len(numbers):
        loads = np.zeros(devices, np.int64)
        for owner in np.argsort(-sizes, kind="stable"):
            device_of[owner] = loads.argmin()
            loads[device_of[owner]] += sizes[owner]
    return [np.flatnonzero(device_of[inverse] == device) for device in range(devices)]
