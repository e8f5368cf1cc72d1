"""Which channels of any nn.Module move together (the basis of Sec. III-B).

`trace` runs the model on example inputs and explores what they do not reach. Every index of every
parameter dimension starts as its own atom; operations join atoms into classes (`rules.py`). A class
is a channel; classes that every operation treated alike form a `Group`, the unit that is sorted and
shrunk.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anycostfl.coupling.atoms import AtomClasses, Atoms, Label, Reason
from anycostfl.coupling.result import Cost, Coupling, Extent, Group, Pin, Returned, Site, Slot
from anycostfl.coupling.rules import RULES, unknown
from anycostfl.coupling.sizes import Counted
from anycostfl.coupling.tracer import (
    Labels,
    SiteKey,
    SizesTaken,
    Tracer,
    evaluation,
    follow,
    tensors_in,
    train_mode,
)
from anycostfl.errors import TraceError
from anycostfl.state import State, tensors_of


def trace(model: nn.Module, inputs: Sequence[Any]) -> Coupling:
    """Find the coupled channels of a model by running it on example inputs."""
    named = tensors_of(model)
    _check(named)
    tracer = Tracer(RULES, unknown)
    first_name: dict[int, str] = {}
    for name, tensor in named.items():
        if first_name.setdefault(id(tensor), name) == name:
            tracer.enter(tensor)
    for tensor in tensors_in(inputs):
        tracer.enter_data(tensor)
    with evaluation(model, plain=True), follow(model, tracer), tracer:
        returned = _labels_of(tracer, _run(model, inputs))
    products, outputs = list(tracer.products), list(tracer.outputs)
    _explore(model, inputs, tracer)
    tracer.products, tracer.outputs = products, outputs  # those of the example only
    _pin_outputs(tracer, returned)
    merged = tracer.resolve_merged()
    aliases = {n: first_name[id(t)] for n, t in named.items()}
    return _pin_around_unused(_collect(tracer, named, aliases, merged), named)


def _check(named: State) -> None:
    """Refuse lazy tensors, and tensors that share memory: permuting one would move the other."""
    lazy = [name for name, tensor in named.items() if is_lazy(tensor)]
    if lazy:
        raise TraceError(f"{lazy[0]} has no shape yet; run the model once first, on an example")
    spans = {
        id(x): (x.data_ptr(), x.data_ptr() + x.element_size() * _elements_spanned(x), name)
        for name, x in reversed(list(named.items()))  # of several names, the first remains
        if x.numel() and x.device.type != "meta"
    }
    for (_, end, one), (begin, _, other) in pairwise(sorted(spans.values())):
        if begin < end:
            raise TraceError(
                f"{one} and {other} share memory without being one tensor; "
                "to tie weights, use the same nn.Parameter under both names (a.weight = b.weight)."
            )


def _elements_spanned(tensor: Tensor) -> int:
    """The distance in memory from the first to the last element, inclusive."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _run(forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    try:
        result = forward(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(getattr(x, "shape", ()))) for x in inputs)
        raise TraceError(
            f"the model cannot run on its example input of shape {shapes}: {error}. "
            "Pass example inputs exactly as the model's forward takes them, batch first."
        ) from error
    if not tensors_in(result):
        raise TraceError(
            f"the model returned {type(result).__name__}, which contains no visible tensor; "
            "return a tensor, or tuples, lists and dicts of tensors."
        )
    return result


def _explore(model: nn.Module, inputs: Sequence[Any], tracer: Tracer) -> None:
    """Run in training mode and on the negated example, which may take other branches."""
    negated = [-x if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    tracer.forget_results()
    for tensor in tensors_in(negated):
        tracer.enter_data(tensor)

    def run(mode: contextlib.AbstractContextManager[None], given: Sequence[Any]) -> None:
        with mode, follow(model, tracer), tracer, contextlib.suppress(Exception):
            _pin_outputs(tracer, _labels_of(tracer, model(*given)))
        tracer.forget_results()

    run(train_mode(model, plain=True), inputs)
    if any(x is not y for x, y in zip(negated, inputs, strict=True)):  # tokens have no sign
        run(evaluation(model, plain=True), negated)


def _pin_around_unused(coupling: Coupling, named: State) -> Coupling:
    """Pin groups whose size matches an unused tensor: an unseen branch may connect them."""
    for unused in coupling.unused:
        near = {
            group.name
            for group in coupling.groups
            for slot in group.slots
            if named[slot.tensor].shape[slot.dim] in named[unused].shape
        }
        why = f"may feed {unused}, which the example did not use"
        coupling = coupling.freeze(near, Reason("unused", "", why))
    return coupling


def _labels_of(tracer: Tracer, result: Any) -> list[Label]:
    """The labels of everything that a model returns."""
    return [label for tensor in tensors_in(result) for label in tracer.labels(tensor)]


def _pin_outputs(tracer: Tracer, labels: Sequence[Label]) -> None:
    for label in labels:
        tracer.classes.pin(label, Reason("output", "", "is an output of the model"))


Place = tuple[str, int]
"""A tensor's name and one of its dimensions."""

Places = dict[Place, list[int]]
"""The positions that one class owns, per tensor and dimension."""


def _collect(
    tracer: Tracer, named: State, aliases: Mapping[str, str], merged: Mapping[int, Atoms]
) -> Coupling:
    """Turn classes of atoms into groups, pins, costs and expected shapes."""
    labels = {
        (name, dim): label
        for name, tensor in named.items()
        if aliases[name] == name
        for dim, label in enumerate(tracer.labels(tensor))
        if label is not None
    }
    pinned = tracer.classes.pinned()
    groups = _groups(tracer, named, labels, pinned)
    extents = Extents(tracer.classes, groups, merged)
    return Coupling(
        groups=groups,
        pins=_pins(tracer.classes, labels, pinned),
        costs=tuple(
            Cost(2 * p.fixed / tracer.samples, p.passes, tuple(extents.of(*s) for s in p.sizes))
            for p in tracer.products
        ),
        returned=tuple(
            Returned(o.module, tuple(map(extents.of_all, o.shapes, o.labels)))
            for o in tracer.outputs
        ),
        sites=tuple(extents.sites(tracer.sites)),
        aliases=aliases,
        unused=tuple(n for n, t in named.items() if t.dim() and id(t) not in tracer.used),
    )


class Extents:
    """Sizes as functions of widths, from the labels of dimensions."""

    def __init__(
        self, classes: AtomClasses, groups: Sequence[Group], merged: Mapping[int, Atoms]
    ) -> None:
        self._classes = classes
        self._groups = groups
        self._merged = merged  # by the first atom of a merged dimension, the atoms that can move
        self._owner = np.full(classes.count, -1)  # of every root: the number of its group
        for number, group in enumerate(groups):
            self._owner[group.roots] = number
        self._known: dict[int, tuple[Atoms, Mapping[str, tuple[float, int]]]] = {}

    def of(self, size: int, label: Label) -> Extent:
        """The extent of one dimension."""
        return Extent(size, {} if label is None else self._owned(label))

    def of_all(self, shape: Sequence[int], labels: Labels) -> tuple[Extent, ...]:
        """The extents of a tensor's dimensions."""
        return tuple(map(self.of, shape, labels))

    def sites(self, taken: Mapping[SiteKey, SizesTaken]) -> Iterator[Site]:
        """The calls that take sizes of groups."""
        for key, call in taken.items():
            counted = tuple(map(self._counted, call.sizes, call.counted))
            if any(extent is not None for extent in counted):
                yield Site(*key, call.sizes, counted)

    def _counted(self, size: Any, label: Counted) -> Extent | tuple[Extent, ...] | None:
        if isinstance(label, tuple):
            if any(part is None for part in label):
                return None
            parts = tuple(self.of(len(part), part) for part in label if part is not None)
            return parts if any(part.groups for part in parts) else None
        if type(size) is not int or label is None:
            return None
        extent = self.of(len(label), label)
        return extent if extent.groups else None

    def _owned(self, label: Atoms) -> Mapping[str, tuple[float, int]]:
        """Positions that one channel of each group owns, and its width; looked up once a label."""
        if id(label) not in self._known:
            atoms = self._merged.get(int(label[0]), label) if len(label) else label
            owners = self._owner[self._classes.roots(atoms)]
            numbers, first, counts = np.unique(owners, return_index=True, return_counts=True)
            found = sorted(zip(first.tolist(), numbers.tolist(), counts.tolist(), strict=True))
            groups = [(self._groups[number], n) for _, number, n in found if number >= 0]
            self._known[id(label)] = label, {g.name: (n / g.size, g.size) for g, n in groups}
        return self._known[id(label)][1]


def _groups(
    tracer: Tracer, named: State, labels: Mapping[Place, Atoms], pinned: Mapping[int, Reason]
) -> tuple[Group, ...]:
    """Classes with one layout and one signature form a group, if a weight produces them."""
    owned: dict[int, Places] = defaultdict(lambda: defaultdict(list))
    for place, label in labels.items():
        for position, root in enumerate(tracer.classes.roots(label).tolist()):
            if root not in pinned:
                owned[root][place].append(position)
    signatures = tracer.classes.signatures()
    alike: dict[object, list[tuple[int, Places]]] = defaultdict(list)
    for root, places in owned.items():
        layout = tuple((place, len(positions)) for place, positions in places.items())
        alike[int(signatures[root]), layout].append((root, places))
    producing = _producing(tracer, named, labels)
    found = [_group(members, producing) for members in alike.values() if len(members) > 1]
    kept = [group for group in found if any(slot.produces for slot in group.slots)]
    names = Counter(group.name for group in kept)
    return tuple(
        replace(g, name=f"{g.name}@{_lead(g.slots).dim}") if names[g.name] > 1 else g for g in kept
    )


def _producing(tracer: Tracer, named: State, labels: Mapping[Place, Atoms]) -> set[Place]:
    """The dimensions of weights (not of vectors) that are outputs of a layer."""
    outputs = [label for label in tracer.producers if label is not None]
    produced = np.concatenate([np.empty(0, np.int64), *outputs])
    weights = {place: label for place, label in labels.items() if named[place[0]].dim() > 1}
    return {place for place, label in weights.items() if np.isin(label, produced).any()}


def _group(members: list[tuple[int, Places]], producing: set[Place]) -> Group:
    members = sorted(members, key=lambda member: list(member[1].values()))
    slots = tuple(
        Slot(*place, np.array([places[place] for _, places in members]), place in producing)
        for place in members[0][1]
    )
    lead = _lead(slots)
    # Several groups can share a weight (the parts of a split); the offset tells them apart.
    offset = int(lead.index.min())
    name = lead.tensor.removesuffix(".weight") + (f"[{offset}:]" if offset else "")
    return Group(name, len(members), slots, np.array([root for root, _ in members]))


def _lead(slots: Sequence[Slot]) -> Slot:
    """The first slot that produces a group."""
    return next((slot for slot in slots if slot.produces), slots[0])


def _pins(
    classes: AtomClasses, labels: Mapping[Place, Atoms], pinned: Mapping[int, Reason]
) -> tuple[Pin, ...]:
    """The reasons of each pinned dimension, without kernel positions, which are not channels."""
    pins = []
    for (name, dim), label in labels.items():
        roots = classes.roots(label).tolist()
        counts = Counter(pinned[root] for root in roots if root in pinned)
        pins += [Pin(name, dim, n, reason) for reason, n in counts.items()]
    return tuple(pin for pin in pins if not (pin.dim > 1 and pin.reason.operation == "convolution"))
