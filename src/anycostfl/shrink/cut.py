"""Sorting and cutting (Sec. III-B): channels in order of importance, then a smaller dense module.

A channel's importance is the L2 norm of its output weights, in float64, summed over all layers that
produce it (a residual stream has several). Equal channels keep their order, so sorting twice
changes nothing and sub-models nest. Sorting changes global coordinates: any other state in them
(momentum, error-feedback residuals) must go through `permute` with the same order.

A sub-model is a deep copy whose tensors are replaced by their kept parts during the copy, so no
full tensor is duplicated; then the sizes stored in torch's own layers are updated. `literals.py`
handles sizes in a model's code (`x.view(-1, 1024)`).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anycostfl.coupling.result import Coupling, Group, Widths
from anycostfl.coupling.rules import whole_blocks
from anycostfl.shrink.literals import replace_sizes
from anycostfl.shrink.widths import Region, Ties, take
from anycostfl.state import State, tensors_of

Order = Mapping[str, Tensor]
"""By group: the old position of the channel at each new position; groups not listed stay."""


# --- sorting ----------------------------------------------------------------------------------


def importance(group: Group, state: State) -> Tensor:
    """The L2 norm of every channel's output weights, as float64 of shape (channels,)."""
    total = torch.zeros(group.size, dtype=torch.float64)
    for slot in group.slots:
        if slot.produces:
            rows = state[slot.tensor].detach().movedim(slot.dim, 0).flatten(1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu()
            total += norms[torch.from_numpy(slot.index)].square().sum(1)
    return total.sqrt()


def sorting_order(coupling: Coupling, state: State) -> dict[str, Tensor]:
    """The stable descending order of every group's channels."""
    return {
        group.name: torch.sort(importance(group, state), descending=True, stable=True).indices
        for group in coupling.groups
    }


def permute(coupling: Coupling, state: State, order: Order) -> dict[str, Tensor]:
    """Return new tensors with every group's channels in the given order."""
    sources = _sources(coupling, state, order)
    result = {}
    for name, tensor in state.items():
        moved = tensor
        for dim, source in sources.get(coupling.aliases[name], {}).items():
            moved = _gather(moved, dim, source)
        result[name] = tensor.clone() if moved is tensor else moved
    return result


def permute_in_place(coupling: Coupling, state: State, order: Order) -> None:
    """Permute the tensors themselves; the last gather writes to its target, to save a copy."""
    for name, sources in _sources(coupling, state, order).items():
        moved = state[name].detach()
        moves = {dim: source for dim, source in sources.items() if moved.stride(dim)}
        if not moves:  # expanded: all channels share one value
            continue
        *first, (last_dim, last_source) = moves.items()
        for dim, source in first:
            moved = _gather(moved, dim, source)
        _gather(moved if first else moved.clone(), last_dim, last_source, out=state[name].detach())


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


def _sources(coupling: Coupling, state: State, order: Order) -> dict[str, dict[int, Tensor]]:
    """For every tensor and dimension that changes, the old position of each new one."""
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


# --- cutting ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CutSpec:
    """How to cut a model: the module to copy, its coupling, and which widths are tied.

    `rewritten` says whether the sizes in the model's code are replaced.
    """

    source: nn.Module
    coupling: Coupling
    ties: Ties
    rewritten: bool = False

    def build(self, widths: Widths, index: Mapping[str, Region]) -> nn.Module:
        """Build the sub-model of these widths, which keeps these regions of the tensors."""
        small = cut(self.source, index)
        if self.rewritten:
            replace_sizes(small, self.coupling.sites, widths)
        for call in self.coupling.returned:
            module = small.get_submodule(call.module)
            # An InstanceNorm without tensors shows its width only in what it returns.
            if isinstance(module, nn.modules.instancenorm._InstanceNorm) and not module.affine:
                channels = -module._get_no_batch_dim()  # type: ignore[no-untyped-call]
                module.num_features = call.at(widths)[0][channels]
        return small


def cut(model: nn.Module, index: Mapping[str, Region]) -> nn.Module:
    """Copy the model with only these regions of its tensors; shared tensors stay shared."""
    memo: dict[int, object] = {}
    for name, tensor in tensors_of(model).items():
        if id(tensor) not in memo:
            memo[id(tensor)] = _part(tensor, index[name])
    small = copy.deepcopy(model, memo)
    for old, new in zip(model.modules(), small.modules(), strict=True):
        for kind, fix in FIXES:
            if isinstance(new, kind):
                fix(old, new)
    return small


def _part(tensor: Tensor, region: Region) -> Tensor:
    part = take(tensor.detach(), region).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(part, requires_grad=tensor.requires_grad)
    return part


# Each fix gets the full layer and the new one, whose tensors are already cut.


def _fix_linear(_old: nn.Linear, new: nn.Linear) -> None:
    new.out_features, new.in_features = new.weight.shape


def _fix_convolution(old: nn.Conv2d, new: nn.Conv2d) -> None:
    first, second = new.weight.shape[:2]
    if new.transposed:
        new.in_channels, new.out_channels = first, second * new.groups
        return
    inner = min(old.out_channels, old.in_channels) // old.groups
    if old.groups > 1 and whole_blocks(old.groups, inner):
        new.groups = first * old.groups // old.out_channels
    new.in_channels, new.out_channels = second * new.groups, first


def _fix_batch_norm(_old: nn.BatchNorm2d, new: nn.BatchNorm2d) -> None:
    kept = new.weight if new.affine else new.running_mean
    if kept is not None:
        new.num_features = kept.shape[0]


def _fix_layer_norm(_old: nn.LayerNorm, new: nn.LayerNorm) -> None:
    if new.elementwise_affine:
        new.normalized_shape = tuple(new.weight.shape)


def _fix_group_norm(old: nn.GroupNorm, new: nn.GroupNorm) -> None:
    if new.affine:
        new.num_channels = new.weight.shape[0]
        if whole_blocks(old.num_groups, old.num_channels // old.num_groups):
            new.num_groups = new.num_channels * old.num_groups // old.num_channels


def _fix_embedding(_old: nn.Embedding, new: nn.Embedding) -> None:
    new.num_embeddings, new.embedding_dim = new.weight.shape


def _fix_recurrent(old: Any, new: Any) -> None:
    gates = old.weight_hh_l0.shape[0] // old.hidden_size  # rows per hidden channel: 4, 3 or 1
    new.input_size = new.weight_ih_l0.shape[1]
    new.hidden_size = new.weight_hh_l0.shape[0] // gates
    if old.proj_size > 0:
        new.proj_size = new.weight_hh_l0.shape[1]
    new._flat_weights = [getattr(new, name) for name in new._flat_weights_names]


def _fix_attention(_old: nn.MultiheadAttention, new: nn.MultiheadAttention) -> None:
    if new.in_proj_weight is not None:
        new.embed_dim = new.kdim = new.vdim = new.in_proj_weight.shape[1]
        new.head_dim = new.embed_dim // new.num_heads


FIXES: tuple[tuple[type[nn.Module], Callable[[Any, Any], None]], ...] = (
    (nn.Linear, _fix_linear),
    (nn.modules.conv._ConvNd, _fix_convolution),
    (nn.modules.batchnorm._NormBase, _fix_batch_norm),
    (nn.LayerNorm, _fix_layer_norm),
    (nn.RMSNorm, _fix_layer_norm),
    (nn.GroupNorm, _fix_group_norm),
    (nn.Embedding, _fix_embedding),
    (nn.RNNBase, _fix_recurrent),
    (nn.MultiheadAttention, _fix_attention),
)
"""How to update the sizes stored in each of torch's layers."""
