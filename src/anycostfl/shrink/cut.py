"""Cutting a sub-model: a plain, dense, smaller nn.Module with the same state_dict keys.

The module is deep-copied with its tensors already replaced by their kept parts, so nothing large is
copied twice; then the sizes that torch's own layers remember are set right. Sizes written into a
model's own forward (`x.view(-1, 1024)`) are `literals.py`'s business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anycostfl.coupling import whole_blocks
from anycostfl.shrink.widths import Region, take
from anycostfl.state import tensors_of


def cut(model: nn.Module, index: Mapping[str, Region]) -> nn.Module:
    """A copy of the model that holds only the regions of its tensors; shared ones stay shared."""
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


# Each fix gets a layer as it was and as it is; the tensors of the second are already cut.


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


def fix_bare_norm(module: nn.Module, returned: Sequence[Sequence[int]]) -> None:
    """An InstanceNorm without tensors knows its width only from what it returns."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and not module.affine:
        module.num_features = returned[0][-module._get_no_batch_dim()]  # type: ignore[no-untyped-call]


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
"""What to set right in which of torch's layers."""
