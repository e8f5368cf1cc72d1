"""Envelopes as the records that Flower carries, and back."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from anycostfl.flower._internal import message_bytes
from anycostfl.state import State
from anycostfl.wire.envelope import Blob, Envelope, blobs_of

__all__ = ["message_bytes", "read_state", "to_envelope", "to_message", "to_records", "write_state"]


def to_records(envelope: Envelope) -> RecordDict:
    """What Flower carries."""
    tables = {name: ConfigRecord(dict(table)) for name, table in envelope.tables.items()}
    arrays = {name: _array_record(blobs) for name, blobs in envelope.arrays.items()}
    return RecordDict({**tables, **arrays})


def to_envelope(records: RecordDict) -> Envelope:
    """What a message holds."""
    tables = {name: dict(table) for name, table in records.config_records.items()}
    arrays = {name: _blobs(record) for name, record in records.array_records.items()}
    return Envelope(tables, arrays)


def to_message(envelope: Envelope, node: int, kind: str, group: int, ttl: float | None) -> Message:
    """A message to a node, in the group of a round; Flower drops it after `ttl` seconds."""
    return Message(to_records(envelope), node, kind, ttl=ttl, group_id=str(group))


def write_state(records: RecordDict, key: str, state: State | None) -> None:
    """Keep named tensors in a device's context; nothing is kept of an empty state."""
    records.pop(key, None)
    if state:
        records[key] = _array_record(blobs_of(state))


def read_state(records: RecordDict, key: str) -> State:
    """Named tensors that `write_state` kept."""
    return to_envelope(records).state(key)


def _array_record(blobs: Mapping[str, Blob]) -> ArrayRecord:
    return ArrayRecord(
        {
            name: Array(dtype=blob.dtype, shape=blob.shape, stype=blob.kind, data=blob.data)
            for name, blob in blobs.items()
        }
    )


def _blobs(record: ArrayRecord) -> dict[str, Blob]:
    return {
        name: Blob(array.stype, bytes(array.data), array.dtype, tuple(array.shape))
        for name, array in record.items()
    }
