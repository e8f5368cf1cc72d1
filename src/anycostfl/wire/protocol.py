"""Which versions of server and device understand each other.

Every message carries the protocol of its sender and the oldest one that the sender still
understands. A new key that others may ignore changes neither; anything else raises `PROTOCOL`, and
`OLDEST` too where messages of before can no longer be served.

    1   the server's whole configuration as TOML; messages carried no version
    2   this one
"""

from __future__ import annotations

from anycostfl.wire.envelope import Envelope, MessageError, value_of

PROTOCOL = 2
OLDEST = 2


def protocol_envelope() -> Envelope:
    """What every message says of its sender."""
    return Envelope({"protocol": {"version": PROTOCOL, "oldest": OLDEST}})


def check_protocol(envelope: Envelope, *, peer: str, me: str) -> None:
    """Raise a MessageError that says which side to upgrade, if the two do not fit."""
    table = envelope.tables.get("protocol", {"version": 1, "oldest": 1})
    version, oldest = value_of(table, "version", int), value_of(table, "oldest", int)
    if version < OLDEST:
        raise MessageError(
            f"the {peer} speaks protocol {version}, this {me} needs {OLDEST} or newer: upgrade "
            f"anycostfl on the {peer}"
        )
    if oldest > PROTOCOL:
        raise MessageError(
            f"the {peer} needs protocol {oldest} or newer, this {me} speaks {PROTOCOL}: upgrade "
            f"anycostfl on this {me}"
        )
