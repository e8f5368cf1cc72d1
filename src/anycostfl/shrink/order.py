"""Server-side channel sorting (Sec. III-B.1): important channels first, the function unchanged.

A channel's importance is the L2 norm of its output weights, in float64, summed over all layers that
produce it (a residual stream has several). Ties keep their order, so sorting twice changes nothing
and sub-models nest.

Sorting moves global coordinates: whatever else lives in them (momentum, error-feedback residuals)
must go through `permute` with the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from anycostfl.coupling import Coupling, Group

Order = Mapping[str, Tensor]
"""By group, the old position of the channel that now stands at each place; others stay."""


def importance(group: Group, state: Mapping[str, Tensor]) -> Tensor:
    """The L2 norm of every channel's output weights, as float64 of shape (channels,)."""
    total = torch.zeros(group.size, dtype=torch.float64)
    for slot in group.slots:
        if slot.produces:
            rows = state[slot.tensor].detach().movedim(slot.dim, 0).flatten(1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu()
            total += norms[torch.from_numpy(slot.index)].square().sum(1)
    return total.sqrt()


def sorting_order(coupling: Coupling, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stable descending order of every group's channels."""
    return {
        group.name: torch.sort(importance(group, state), descending=True, stable=True).indices
        for group in coupling.groups
    }


def permute(coupling: Coupling, state: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
    """The same state with every group's channels in the given order; new tensors, old values."""
    sources = _sources(coupling, state, order)
    result = {}
    for name, tensor in state.items():
        moved = tensor
        for dim, source in sources.get(coupling.aliases[name], {}).items():
            moved = _gather(moved, dim, source)
        result[name] = tensor.clone() if moved is tensor else moved
    return result


def permute_in_place(coupling: Coupling, state: Mapping[str, Tensor], order: Order) -> None:
    """As `permute`, into the tensors themselves, each copied no more often than need be."""
    for name, sources in _sources(coupling, state, order).items():
        moved = state[name].detach()
        moves = {dim: source for dim, source in sources.items() if moved.stride(dim)}
        if not moves:  # expanded: one value stands for all channels
            continue
        *first, (last_dim, last_source) = moves.items()
        for dim, source in first:
            moved = _gather(moved, dim, source)
        source_tensor = moved if first else moved.clone()
        _gather(source_tensor, last_dim, last_source, out=state[name].detach())


def _gather(tensor: Tensor, dim: int, source: Tensor, out: Tensor | None = None) -> Tensor:
    """index_select, by blocks where a channel owns several neighbours (a flattened image)."""
    breaks = (source.diff() != 1).nonzero()
    block = math.gcd(len(source), *(breaks.flatten() + 1).tolist())
    shape = tensor.shape
    if block > 1 and (source[::block] % block == 0).all() and tensor.is_contiguous():
        shape = torch.Size((*shape[:dim], shape[dim] // block, block, *shape[dim + 1 :]))
        source = source[::block] // block
    target = None if out is None else out.view(shape)
    moved = torch.index_select(tensor.view(shape), dim, source.to(tensor.device), out=target)
    return moved.view(tensor.shape)


def _sources(
    coupling: Coupling, state: Mapping[str, Tensor], order: Order
) -> dict[str, dict[int, Tensor]]:
    """For every tensor and dimension that changes, where each position comes from."""
    shapes = {coupling.aliases[name]: tensor.shape for name, tensor in state.items()}
    sources: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for group in coupling.groups:
        places = order.get(group.name)
        if places is None or torch.equal(places, torch.arange(group.size)):
            continue
        for slot in group.slots:
            if slot.tensor in shapes:
                whole = torch.arange(shapes[slot.tensor][slot.dim])
                source = sources[slot.tensor].setdefault(slot.dim, whole)
                index = torch.from_numpy(slot.index)
                source[index.flatten()] = index[places].flatten()
    return sources
