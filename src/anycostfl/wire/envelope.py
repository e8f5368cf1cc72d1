"""An envelope: what a message holds, as tables of plain values and named arrays of bytes.

Nothing is pickled; tensors travel as raw bytes of a known type and shape. Whatever does not read as
its message is a `MessageError`, which says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from anycostfl.checks import rule_problems
from anycostfl.errors import AnycostError
from anycostfl.state import State

Scalar = TypeVar("Scalar", int, float, str, bytes, bool)
Record = TypeVar("Record")

TENSOR = "anycostfl/tensor"
Table = Mapping[str, Any]


class MessageError(AnycostError, ValueError):
    """A message that does not say what it should."""


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """Bytes with what they are: a kind, and type and shape of their elements."""

    kind: str
    data: bytes
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """Tables of plain values (numbers, text, bytes, lists of one kind), and arrays of bytes."""

    tables: Mapping[str, Table] = field(default_factory=dict)
    arrays: Mapping[str, Mapping[str, Blob]] = field(default_factory=dict)

    def __or__(self, other: Envelope) -> Envelope:
        return Envelope({**self.tables, **other.tables}, {**self.arrays, **other.arrays})

    def table(self, name: str) -> Table:
        """A table that must be there."""
        found = self.tables.get(name)
        if found is None:
            raise MessageError(f"a message without {name}")
        return found

    def bytes_of(self, record: str, name: str, kind: str) -> bytes:
        """An array of bytes of that kind that must be there."""
        blob = self.arrays.get(record, {}).get(name)
        if blob is None or blob.kind != kind:
            raise MessageError(f"a message without {kind}")
        return blob.data

    def state(self, record: str, prefix: str = "") -> dict[str, Tensor]:
        """Named tensors as `blobs_of` made them; none if there is no such record.

        With a prefix, those whose names begin with it, without it.
        """
        return {
            name.removeprefix(prefix): _as_tensor(blob)
            for name, blob in self.arrays.get(record, {}).items()
            if name.startswith(prefix)
        }


def table_of(record: Any, *without: str) -> dict[str, Any]:
    """The fields of a dataclass that are set, as a table holds them, without some."""
    known = {item.name: getattr(record, item.name) for item in fields(record)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in known.items()
        if value is not None and name not in without
    }


def read_record(kind: type[Record], table: Table, **known: Any) -> Record:
    """A dataclass from a table: what is not known must have exactly its type, within its rules."""
    read = {
        name: value_of(table, name, hint)
        for name, hint in get_type_hints(kind).items()
        if name not in known
    }
    if problems := rule_problems(kind, read):
        raise MessageError("; ".join(problems))
    return kind(**read, **known)


def value_of(table: Table, key: str, kind: type[Scalar]) -> Scalar:
    """A value of exactly that type."""
    value = table.get(key)
    if type(value) is not kind:
        raise MessageError(f"{key}: given {value!r:.80}, must be {kind.__name__}")
    return value


def list_of(table: Table, key: str, kind: type[Scalar]) -> list[Scalar]:
    """A list whose values all have that type."""
    values = table.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise MessageError(f"{key}: given {values!r:.80}, must be a list of {kind.__name__}")
    return values


def bytes_blob(data: bytes, kind: str) -> Blob:
    """Bytes as an array."""
    return Blob(kind, data, shape=(len(data),))


def blobs_of(state: State) -> dict[str, Blob]:
    """Named tensors, one array each."""
    return {name: _as_blob(tensor) for name, tensor in state.items()}


def _as_blob(tensor: Tensor) -> Blob:
    kind = str(tensor.dtype).removeprefix("torch.")
    return Blob(TENSOR, raw_bytes(tensor), kind, tuple(tensor.shape))


def raw_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor, one after the other."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def tensor_of(data: bytearray, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor with these elements."""
    if not data:
        return torch.zeros(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _as_tensor(blob: Blob) -> Tensor:
    kind = getattr(torch, blob.dtype, None)
    if blob.kind != TENSOR or not isinstance(kind, torch.dtype):
        raise MessageError(f"an array of kind {blob.kind!r} and type {blob.dtype!r}")
    whole = all(n >= 0 for n in blob.shape)
    if not whole or len(blob.data) != math.prod(blob.shape) * kind.itemsize:
        raise MessageError(f"an array of shape {blob.shape} with {len(blob.data)} bytes")
    return tensor_of(bytearray(blob.data), kind, blob.shape)
