"""What each tensor operation does to channel labels: one short rule per family of operations.

A rule returns the labels of a call's outputs, in order; outputs it leaves out carry no channels. It
may join atoms (channels that must move together), pin them (channels that may not move), or report
a matrix product for FLOP counting. An operation without a rule gets `unknown`, which pins every
channel it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from anycostfl.coupling.atoms import Atoms, Label
from anycostfl.coupling.tracer import Call, Labels, Product, Results, Rule, Tracer

RULES: dict[str, Rule] = {}

SPATIAL = "works on neighbouring positions"
POSITION = "depends on the position along this dimension"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def whole_blocks(blocks: int, inner: int) -> bool:
    """Whether grouped channels move as whole blocks, or by their position inside every block.

    Both are exact; the one with more positions offers more widths. Whole blocks win a tie: a
    GroupNorm then normalises the remaining groups exactly as before.
    """
    return blocks >= inner


def unknown(tracer: Tracer, call: Call) -> Results:
    """Pin every channel that an operation without a rule takes in."""
    if call.pointwise:
        return elementwise(tracer, call)
    for tensor in call.inputs:
        tracer.pin(call, tracer.labels(tensor), "no rule for this operation")
    return [(None,) * result.dim() for result in call.outputs]


@rule("clone", "detach", "alias", "_to_copy", "copy_", "copy", "_softmax", "_log_softmax")
@rule("_prelu_kernel", "lift_fresh", "native_dropout", "fill_", "zero_", "contiguous")
@rule("bernoulli", "bernoulli_", "uniform_", "normal_")
@rule("hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_", "hardtanh", "hardtanh_")
@rule("rrelu_with_noise", "rrelu_with_noise_", "masked_fill", "masked_fill_", "native_dropout_")
def elementwise(tracer: Tracer, call: Call) -> Results:
    """Align all operands index by index, with broadcasting."""

    def aligned(back: int) -> Label:
        wide = [x for x in call.inputs if x.dim() >= back and x.shape[-back] > 1]
        return tracer.unite(call, [tracer.labels(x)[-back] for x in wide])

    return [[aligned(back) for back in range(x.dim(), 0, -1)] for x in call.outputs]


@rule("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like")
@rule("new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor", "empty_strided")
@rule("rand", "randn", "rand_like", "randn_like")
def constant(tracer: Tracer, call: Call) -> Results:
    """A constant is the same for every channel, so it may join any of them."""
    return [[tracer.classes.new(n) for n in result.shape] for result in call.outputs]


# --- rearranging dimensions ------------------------------------------------------------------


@rule("view", "_unsafe_view", "_reshape_alias")
def reshape(tracer: Tracer, call: Call) -> Results:
    """Split and merge dimensions, block by block of equal size."""
    source, result = call.inputs[0], call.outputs[0]
    out: list[Label] = [None] * result.dim()
    for before, after in _equal_blocks(source.shape, result.shape):
        block = [call.labels[i] for i in before]
        sizes = [result.shape[i] for i in after]
        flat = _merge(tracer, call, block, [source.shape[i] for i in before])
        parts = tracer.unmerge(flat, sizes) if flat is not None and len(after) > 1 else flat
        split = dict(enumerate(parts)) if isinstance(parts, tuple) else _split(tracer, parts, sizes)
        for axis, label in split.items():
            out[after[axis]] = label
    return [out]


def _equal_blocks(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut two shapes of one size into the shortest runs of dimensions with equal products."""
    blocks, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        before, after = list(range(i, min(i + 1, len(a)))), list(range(j, min(j + 1, len(b))))
        size_a, size_b = math.prod(a[k] for k in before), math.prod(b[k] for k in after)
        i, j = i + len(before), j + len(after)
        while size_a != size_b:
            if size_a < size_b:
                before.append(i)
                size_a, i = size_a * a[i], i + 1
            else:
                after.append(j)
                size_b, j = size_b * b[j], j + 1
        blocks.append((before, after))
    return blocks


def _merge(tracer: Tracer, call: Call, labels: Sequence[Label], sizes: Sequence[int]) -> Label:
    """The label of dimensions flattened into one."""
    labelled = [(k, label) for k, label in enumerate(labels) if label is not None]
    if not labelled:
        return None
    if len(labelled) > 1:
        return tracer.merge(call, labels, sizes)
    ((only, kept),) = labelled
    inner, outer = math.prod(sizes[only + 1 :]), math.prod(sizes[:only])
    return np.tile(np.repeat(kept, inner), outer)


def _split(tracer: Tracer, flat: Label, sizes: Sequence[int]) -> dict[int, Label]:
    """Distribute a flat label over the dimensions it is split into.

    If channels differ along one axis only, that axis carries them. Otherwise (attention heads,
    channel shuffle) the innermost axis does, and equal positions of the outer ones are tied.
    """
    if flat is None:
        return {}
    axes = [k for k, n in enumerate(sizes) if n > 1]
    grid = flat.reshape([sizes[k] for k in axes])
    roots = tracer.classes.roots(flat).reshape(grid.shape)
    for position, axis in enumerate(axes):
        front = np.moveaxis(roots, position, 0).reshape(roots.shape[position], -1)
        if (front == front[:, :1]).all():
            lead = np.moveaxis(grid, position, 0).reshape(front.shape)[:, 0]
            return {axis: lead.copy()}
    return {axes[-1]: tracer.classes.tie(flat, len(flat) // sizes[axes[-1]])}


@rule("t", "transpose", "transpose_", "permute", "t_")
def permute(_tracer: Tracer, call: Call) -> Results:
    """Reorder dimensions."""
    labels = call.labels
    if call.name == "permute":
        return [[labels[d] for d in call.arguments["dims"]]]
    if call.name in ("t", "t_"):
        return [labels[::-1]]
    a, b = call.dim("dim0"), call.dim("dim1")
    labels[a], labels[b] = labels[b], labels[a]
    return [labels]


@rule("as_strided", "as_strided_")
def as_strided(tracer: Tracer, call: Call) -> Results:
    """Set the strides, as pooling does to keep a memory format; another shape is unknown."""
    lengths = [
        n if label is None else len(label)
        for n, label in zip(call.outputs[0].shape, call.labels, strict=False)
    ]
    same = len(call.labels) == call.outputs[0].dim() and lengths == list(call.outputs[0].shape)
    return [call.labels] if same else unknown(tracer, call)


@rule("unsqueeze", "unsqueeze_")
def unsqueeze(_tracer: Tracer, call: Call) -> Results:
    """Insert a dimension of size one."""
    call.labels.insert(call.arguments["dim"] % (len(call.labels) + 1), None)
    return [call.labels]


@rule("squeeze", "squeeze_")
def squeeze(_tracer: Tracer, call: Call) -> Results:
    """Drop dimensions of size one; they carry no channels."""
    kept = iter(x for x, n in zip(call.labels, call.inputs[0].shape, strict=True) if n > 1)
    return [[next(kept) if n > 1 else None for n in call.outputs[0].shape]]


@rule("expand")
def expand(_tracer: Tracer, call: Call) -> Results:
    """Repeat dimensions of size one."""
    new = call.outputs[0].dim() - len(call.labels)
    return [[*(None,) * new, *call.labels]]


@rule("repeat")
def repeat(_tracer: Tracer, call: Call) -> Results:
    """Tile a tensor: copies of a channel move with it."""
    times: list[int] = call.arguments["repeats"]
    labels = [*(None,) * (len(times) - len(call.labels)), *call.labels]
    return [[None if x is None else np.tile(x, n) for x, n in zip(labels, times, strict=True)]]


# --- parts and joins --------------------------------------------------------------------------


@rule("select", "unbind")
def select(tracer: Tracer, call: Call) -> Results:
    """Take single positions of a dimension, which must then stay where they are."""
    tracer.pin(call, [call.labels.pop(call.dim())], POSITION)
    return [call.labels] * len(call.outputs)


@rule("slice")
def narrow(_tracer: Tracer, call: Call) -> Results:
    """Keep a range of positions and their atoms; signatures tell them from the rest."""
    label = call.labels[call.dim()]
    span = slice(call.arguments["start"], call.arguments["end"], call.arguments["step"])
    call.labels[call.dim()] = None if label is None else label[span]
    return [call.labels]


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "split_copy")
def split(_tracer: Tracer, call: Call) -> Results:
    """Cut a dimension into consecutive parts."""
    labels, dim = call.labels, call.dim()
    label = labels[dim]
    ends = list(accumulate((part.shape[dim] for part in call.outputs), initial=0))
    parts = [None if label is None else label[a:b] for a, b in pairwise(ends)]
    return [[*labels[:dim], part, *labels[dim + 1 :]] for part in parts]


@rule("cat")
def cat(tracer: Tracer, call: Call) -> Results:
    """Concatenate along one dimension and align the others."""
    parts = [x for x in call.inputs if x.dim() == call.outputs[0].dim()]
    dim = call.dim()
    labels = _align_others(tracer, call, [tracer.labels(x) for x in parts], dim)
    own = [tracer.labels(x)[dim] for x in parts]
    if any(label is not None for label in own):
        labels[dim] = np.concatenate(
            [
                _fixed_atoms(tracer, call, x.shape[dim]) if label is None else label
                for x, label in zip(parts, own, strict=True)
            ]
        )
    return [labels]


@rule("stack")
def stack(tracer: Tracer, call: Call) -> Results:
    """Add a new dimension and align all others."""
    dim = call.arguments["dim"] % call.outputs[0].dim()
    parts = [tracer.labels(x) for x in call.inputs]
    widened = [(*part[:dim], None, *part[dim:]) for part in parts]
    return [_align_others(tracer, call, widened, dim)]


def _align_others(tracer: Tracer, call: Call, parts: list[Labels], dim: int) -> list[Label]:
    columns = enumerate(zip(*parts, strict=True))
    return [None if k == dim else tracer.unite(call, column) for k, column in columns]


def _fixed_atoms(tracer: Tracer, call: Call, count: int) -> Atoms:
    atoms = tracer.classes.new(count)
    tracer.pin(call, [atoms], "holds data beside channels")
    return atoms


@rule("constant_pad_nd")
def pad(tracer: Tracer, call: Call) -> Results:
    """Add constant positions at the ends of dimensions, listed from the last one."""
    labels, amounts = call.labels, call.arguments["pad"]
    for k, (left, right) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        label = labels[-1 - k]
        if label is not None and (left, right) != (0, 0):
            before, after = (_fixed_atoms(tracer, call, max(n, 0)) for n in (left, right))
            kept = label[max(-left, 0) : len(label) - max(-right, 0)]
            labels[-1 - k] = np.concatenate([before, kept, after])
    return [labels]


@rule("cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk", "index_select")
@rule("flip", "roll")
def positional(tracer: Tracer, call: Call) -> Results:
    """Operations that depend on the position along some dimensions and keep the others."""
    dims = call.arguments.get("dims", call.arguments.get("dim", -1))
    for dim in [dims] if isinstance(dims, int) else (dims or range(len(call.labels))):
        tracer.pin(call, [call.labels[dim]], POSITION)
        call.labels[dim] = None
    return [call.labels] * len(call.outputs)


@rule("index")
def index(tracer: Tracer, call: Call) -> Results:
    """Look up positions in one dimension (`table[tokens]`); several at once are unknown."""
    lookups = [(d, i) for d, i in enumerate(call.arguments["indices"]) if i is not None]
    if len(lookups) != 1 or lookups[0][1].dtype not in (torch.int32, torch.int64):
        return unknown(tracer, call)
    dim, positions = lookups[0]
    tracer.pin(call, [call.labels[dim]], POSITION)
    return [[*call.labels[:dim], *(None,) * positions.dim(), *call.labels[dim + 1 :]]]


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(tracer: Tracer, call: Call) -> Results:
    """Trade blocks of r² channels for r×r pixels."""
    tracer.pin(call, call.labels[-2:], SPATIAL)
    label, channels = call.labels[-3], call.outputs[0].shape[-3]
    if label is not None and len(label) > channels:
        label = tracer.classes.glue(label, channels)
    elif label is not None:
        label = np.repeat(label, channels // len(label))
    return [[*call.labels[:-3], label, None, None]]


# --- products ---------------------------------------------------------------------------------


@rule("mm", "bmm", "addmm", "baddbmm", "mv")
def matmul(tracer: Tracer, call: Call) -> Results:
    """(…, n, k) · (…, k, m), plus a bias: contraction joins, rows and columns are produced."""
    *bias, left, right = call.inputs
    a, b = tracer.labels(left), tracer.labels(right)
    batch, columns = (b[:-2], b[-1:]) if right.dim() > 1 else ((), ())
    tracer.unite(call, [a[-1], b[0] if right.dim() == 1 else b[-2]])
    shared = [tracer.unite(call, pair) for pair in zip(a[:-2], batch, strict=True)]
    labels = [*shared, a[-2], *columns]
    tracer.producers += [a[-2], *columns]
    for offset in bias:
        for back in range(1, offset.dim() + 1):
            if offset.shape[-back] > 1:
                tracer.unite(call, [tracer.labels(offset)[-back], labels[-back]])
    sizes = [*zip(call.outputs[0].shape, labels, strict=True), (left.shape[-1], a[-1])]
    _count(tracer, 1, sizes, (left, right))
    return [labels]


def _count(
    tracer: Tracer, fixed: int, sizes: Sequence[tuple[int, Label]], operands: tuple[Tensor, Tensor]
) -> None:
    passes = 1 + sum(id(x) in tracer.trained for x in operands)
    tracer.products.append(Product(fixed, tuple(sizes), passes))


@rule("convolution")
def convolution(tracer: Tracer, call: Call) -> Results:
    """Convolutions of any rank; grouped ones couple inputs with outputs (see `whole_blocks`)."""
    x, weight, bias = (call.arguments[k] for k in ("input", "weight", "bias"))
    labels, kernel = tracer.labels(x), tracer.labels(weight)
    tracer.pin(call, (*labels[2:], *kernel[2:]), SPATIAL)
    transposed, groups = call.arguments["transposed"], call.arguments["groups"]
    produced = _couple_channels(tracer, call, transposed, groups)
    if bias is not None:
        tracer.unite(call, [produced, tracer.labels(bias)[0]])
    tracer.producers.append(produced)
    result = call.outputs[0]
    area = math.prod((x if transposed else result).shape[2:]) * math.prod(weight.shape[2:])
    sizes = list(zip(weight.shape[:2], kernel[:2], strict=True))
    _count(tracer, x.shape[0] * area, sizes, (x, weight))
    return [[labels[0], produced, *(None,) * (result.dim() - 2)]]


def _couple_channels(tracer: Tracer, call: Call, transposed: bool, groups: int) -> Label:
    """Join a convolution's input channels with its weight; returns the label of its outputs."""
    x, weight = call.arguments["input"], call.arguments["weight"]
    entering, (first, second) = tracer.labels(x)[1], tracer.labels(weight)[:2]
    classes = tracer.classes
    if groups == 1:
        consumed, produced = (first, second) if transposed else (second, first)
        tracer.unite(call, [entering, consumed])
        return produced
    if transposed:
        tracer.pin(call, (entering, first, second), "is transposed and grouped")
        return None
    if whole_blocks(groups, min(weight.shape[0] // groups, weight.shape[1])):
        tracer.pin(call, [second], "shrinks by whole groups")
        tracer.unite(call, [classes.glue(entering, groups), classes.glue(first, groups)])
    else:
        tracer.unite(call, [classes.tie(entering, groups), second])
        classes.tie(first, groups)
    return first


@rule("embedding")
def embedding(tracer: Tracer, call: Call) -> Results:
    """Rows are chosen by data; columns are channels."""
    rows, columns = tracer.labels(call.arguments["weight"])
    tracer.pin(call, [rows], "rows are chosen by the data")
    tracer.producers.append(columns)
    return [[*tracer.labels(call.arguments["indices"]), columns]]


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
def attention(tracer: Tracer, call: Call) -> Results:
    """softmax(q kᵀ) v on (batch, head, token, size)."""
    query, key, value = (call.arguments[k] for k in ("query", "key", "value"))
    q, k, v = (tracer.labels(x) for x in (query, key, value))
    heads = tracer.unite(call, [q[1], k[1], v[1]] if query.shape[1] > 1 else [])
    tracer.unite(call, [q[3], k[3]])
    tracer.unite(call, [k[2], v[2]])
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    if mask is not None:
        own = zip(mask.shape, tracer.labels(mask), strict=True)
        for (size, label), met in zip(list(own)[::-1], (k[2], q[2], heads, q[0]), strict=False):
            if size > 1:
                tracer.unite(call, [label, met])
    area = query.shape[0] * query.shape[2] * key.shape[2]
    head_size = (query.shape[1], heads)
    _count(tracer, area, [head_size, (query.shape[3], q[3])], (query, key))
    _count(tracer, area, [head_size, (value.shape[3], v[3])], (query, value))
    return [[q[0], heads, q[2], v[3]]]


# --- normalisation, pooling, reduction --------------------------------------------------------


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
@rule("cudnn_batch_norm", "_batch_norm_no_update", "batch_norm", "_batch_norm_with_update")
def batch_norm(tracer: Tracer, call: Call) -> Results:
    """Per-channel statistics and affine parameters move with their channel."""
    return _norm(tracer, call, [(1, 0)])


@rule("_weight_norm_interface")
def weight_norm(tracer: Tracer, call: Call) -> Results:
    """A weight of given norms along one dimension; sums over the others do not see their order."""
    weight, norms = call.inputs
    labels, dim = list(tracer.labels(weight)), call.dim()
    if norms.dim() == weight.dim() and norms.shape[dim] > 1:
        labels[dim] = tracer.unite(call, [labels[dim], tracer.labels(norms)[dim]])
    kept = [label if d == dim else None for d, label in enumerate(labels)]
    return [labels, kept if call.outputs[1].dim() == len(kept) else [None] * call.outputs[1].dim()]


@rule("native_group_norm")
def group_norm(tracer: Tracer, call: Call) -> Results:
    """As batch norm, with channels coupled inside or across groups."""
    groups, channels = call.arguments["group"], call.arguments["C"]
    ((_, label, *_),) = results = _norm(tracer, call, [(1, 0)])
    module = tracer.stack[-1].module if tracer.stack else None
    resizable = isinstance(module, nn.GroupNorm) and module.affine  # a cut can set its num_groups
    if resizable and whole_blocks(groups, channels // groups):
        tracer.classes.glue(label, groups)
    else:
        tracer.classes.tie(label, groups)
    return results


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(tracer: Tracer, call: Call) -> Results:
    """Statistics over the last dimensions do not depend on their order."""
    last = range(-1, -1 - len(call.arguments["normalized_shape"]), -1)
    return _norm(tracer, call, [(dim, dim) for dim in last])


def _norm(tracer: Tracer, call: Call, aligned: Sequence[tuple[int, int]]) -> Results:
    """Align pairs (dimension of the input, dimension of each vector)."""
    labels = call.labels
    names = ("weight", "bias", "running_mean", "running_var")
    vectors = [v for n in names if (v := call.arguments.get(n)) is not None]
    for dim, own in aligned:
        if call.inputs[0].shape[dim] > 1:
            met = (tracer.labels(vector)[own] for vector in vectors)
            labels[dim] = tracer.unite(call, [labels[dim], *met])
    return [labels]


@rule("glu")
def glu(tracer: Tracer, call: Call) -> Results:
    """The first half is gated by the second, position by position."""
    labels, dim = call.labels, call.dim()
    labels[dim] = tracer.classes.tie(labels[dim], 2)
    return [labels]


def _spatial(tracer: Tracer, call: Call) -> Results:
    """Pooling, resizing, padding: channels pass through, positions stay."""
    rank = next(k for k in (1, 2, 3) if f"{k}d" in call.name)
    tracer.pin(call, call.labels[-rank:], SPATIAL)
    return [[*call.labels[:-rank], *(None,) * rank]] * len(call.outputs)


for _rank in ("1d", "2d", "3d"):
    _names = (
        "avg_pool{}", "max_pool{}_with_indices", "_adaptive_avg_pool{}", "adaptive_max_pool{}",
        "upsample_nearest{}", "_upsample_nearest_exact{}", "reflection_pad{}", "replication_pad{}",
        "upsample_linear{}", "upsample_bilinear{}", "upsample_bicubic{}", "upsample_trilinear{}",
        "_upsample_bilinear{}_aa", "_upsample_bicubic{}_aa",
    )  # fmt: skip
    rule(*(name.format(_rank) for name in _names))(_spatial)


@rule("mean", "sum", "amax", "amin", "var", "std", "var_mean", "logsumexp", "prod", "any", "all")
@rule("linalg_vector_norm", "norm", "max", "min", "argmax", "argmin", "median", "count_nonzero")
def reduction(tracer: Tracer, call: Call) -> Results:
    """Reduced dimensions vanish; where positions are returned, channels must stay."""
    if len(call.inputs) == 2:  # max(a, b) is elementwise
        return elementwise(tracer, call)
    labels, dims = call.labels, call.arguments.get("dim")
    listed = range(len(labels)) if dims is None or dims == [] else dims
    gone = {d % len(labels) for d in ([listed] if isinstance(listed, int) else listed)}
    if call.name.startswith("arg") or (dims is not None and call.name in ("max", "min", "median")):
        tracer.pin(call, [labels[d] for d in gone], POSITION)
    kept = [x for d, x in enumerate(labels) if d not in gone]
    blanked = [None if d in gone else x for d, x in enumerate(labels)]  # with keepdim
    return [blanked if result.dim() == len(labels) else kept for result in call.outputs]
