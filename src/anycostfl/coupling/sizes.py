"""Sizes that a model's code passes to functions: `x.view(b, -1, 64)`, `h[:, 8:]`, `h.split(64, 1)`.

A narrower copy of a model runs the same code, so a size written into it, or computed from one, no
longer fits. For each function that takes sizes, this table says which of its arguments they are and
which channels each of them counts; `shrink.literals` replaces them in a sub-model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from anycostfl.coupling.atoms import Label

LabelsOf = Callable[[Tensor], Sequence[Label]]

Counted = Label | tuple[Label, ...]
"""The channels that one size counts; of a size that several parts share, those of each part."""


@dataclass(frozen=True, slots=True)
class SizeArguments:
    """The sizes among a call's arguments, and how to call the function with others.

    A size may be replaced by a list of sizes where the function takes both.
    """

    sizes: list[Any]
    call: Callable[[Sequence[Any]], Any]


Read = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], SizeArguments]
Count = Callable[[SizeArguments, tuple[Any, ...], Any, LabelsOf], list[Counted]]


@dataclass(frozen=True, slots=True)
class Family:
    """How functions take sizes: where they stand, and what they count, given the result."""

    read: Read
    count: Count


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeArguments:
    """Sizes as integers, or in one tuple: view(2, 8), view((2, 8)), reshape(x, (2, 8))."""
    keys = [key for key in ("size", "shape", "sizes", "normalized_shape") if key in kwargs]
    if keys:
        given = kwargs[keys[0]]
        found = list(given) if isinstance(given, tuple | list) else []
        return SizeArguments(found, lambda new: func(*args, **{**kwargs, keys[0]: tuple(new)}))
    at = next((i for i, x in enumerate(args) if isinstance(x, tuple | list)), None)
    if at is not None:
        nested = list(args[at])
        return SizeArguments(
            nested, lambda new: func(*args[:at], tuple(new), *args[at + 1 :], **kwargs)
        )
    first = next((i for i, x in enumerate(args) if not isinstance(x, Tensor)), len(args))
    return SizeArguments(list(args[first:]), lambda new: func(*args[:first], *new, **kwargs))


def _count_last(
    given: SizeArguments, _args: tuple[Any, ...], result: Any, labels: LabelsOf
) -> list[Counted]:
    """Sizes of the result's last dimensions."""
    own = list(labels(result))
    return [*own[len(own) - len(given.sizes) :]] if len(given.sizes) <= len(own) else []


def _count_unflattened(
    given: SizeArguments, args: tuple[Any, ...], result: Any, labels: LabelsOf
) -> list[Counted]:
    """unflatten(x, dim, sizes)."""
    dim = args[1] % args[0].dim()
    return [*labels(result)[dim : dim + len(given.sizes)]]


def _read_parts(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeArguments:
    """split(x, 8, dim), split(x, [8, 4], dim), chunk(x, 2, dim)."""
    if not args:
        return SizeArguments([], lambda _: func(**kwargs))
    key = next((k for k in ("split_size_or_sections", "split_size", "chunks") if k in kwargs), None)
    given = kwargs[key] if key else args[1]
    dim = kwargs.get("dim", args[-1] if len(args) + bool(key) > 2 else 0)
    if isinstance(given, tuple | list):
        return SizeArguments(list(given), lambda new: torch.split(args[0], list(new), dim))

    def call(new: Sequence[Any]) -> Any:
        changed = new[0] != given
        return torch.split(args[0], new[0], dim) if changed else func(*args, **kwargs)

    return SizeArguments([given], call)


def _count_parts(
    given: SizeArguments, args: tuple[Any, ...], result: Any, labels: LabelsOf
) -> list[Counted]:
    """Each part's size; of one size for all parts, the first."""
    return [*_labels_of_parts(args, result, labels)[: len(given.sizes)]]


def _count_chunks(
    _given: SizeArguments, args: tuple[Any, ...], result: Any, labels: LabelsOf
) -> list[Counted]:
    """The sizes of all parts, which take the place of their number."""
    parts = _labels_of_parts(args, result, labels)
    return [parts] if parts else []


def _labels_of_parts(args: tuple[Any, ...], result: Any, labels: LabelsOf) -> tuple[Label, ...]:
    """The labels of parts along the dimension in which they differ from the whole."""
    sizes = zip(args[0].shape, result[0].shape, strict=True) if args else ()
    dims = [d for d, (whole, part) in enumerate(sizes) if whole != part]
    return tuple(labels(part)[dims[0]] for part in result) if dims else ()


def _read_index(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeArguments:
    """x[:, 2:8]: starts and stops of all slices, None where there is none."""
    whole, given = args
    index = given if isinstance(given, tuple) else (given,)
    ends = [end for part in index if isinstance(part, slice) for end in (part.start, part.stop)]

    def call(new: Sequence[Any]) -> Any:
        pairs = iter(zip(new[::2], new[1::2], strict=True))
        changed = tuple(
            slice(*next(pairs), part.step) if isinstance(part, slice) else part for part in index
        )
        return func(whole, changed if isinstance(given, tuple) else changed[0], **kwargs)

    return SizeArguments(ends, call)


def _count_ends(
    _given: SizeArguments, args: tuple[Any, ...], _result: Any, labels: LabelsOf
) -> list[Counted]:
    """What lies before each end of a slice; behind it, if it counts from the back."""
    whole, given = args
    own = list(labels(whole))
    found: list[Counted] = []
    index = given if isinstance(given, tuple) else (given,)
    dim, explicit = 0, sum(part is not None and part is not Ellipsis for part in index)
    for part in index:
        if part is Ellipsis:
            dim += whole.dim() - explicit
            continue
        if isinstance(part, slice):
            found += [_before(own[dim], end) for end in (part.start, part.stop)]
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            dim += part.dim() - 1
        dim += part is not None
    return found


def _before(label: Label, end: Any) -> Label:
    if label is None or not isinstance(end, int) or end == 0:
        return None
    return label[:end] if end > 0 else label[end:]


def _read_range(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeArguments:
    """narrow(x, dim, start, length)."""
    if len(args) != 4:
        return SizeArguments([], lambda _: func(*args, **kwargs))
    return SizeArguments(list(args[2:]), lambda new: func(*args[:2], *new, **kwargs))


def _count_range(
    given: SizeArguments, args: tuple[Any, ...], result: Any, labels: LabelsOf
) -> list[Counted]:
    if not given.sizes:
        return []
    dim = args[1] % args[0].dim()
    return [_before(labels(args[0])[dim], args[2]), labels(result)[dim]]


SHAPE = Family(_read, _count_last)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to", "layer_norm", "rms_norm"), SHAPE),
    **dict.fromkeys(("zeros", "ones", "empty", "randn", "rand", "full", "new_full"), SHAPE),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), SHAPE),
    **dict.fromkeys(("split", "split_with_sizes"), Family(_read_parts, _count_parts)),
    "chunk": Family(_read_parts, _count_chunks),
    "unflatten": Family(_read, _count_unflattened),
    "__getitem__": Family(_read_index, _count_ends),
    "narrow": Family(_read_range, _count_range),
}
"""By the name of a function or method of torch."""


# --- where a call stands -----------------------------------------------------------------------

Place = tuple[str, int, int]
"""A file, a line, and an instruction: one call in the model's code."""

TORCH = str(Path(torch.__file__).parent)


def place_of_call(frame: FrameType) -> Place:
    """The call in the model's code that led to this frame; torch's own frames are passed over."""
    while frame.f_code.co_filename.startswith(TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
