"""Devices whose clock is wrong: boards without a battery for it, or a clock that has just jumped.

Flower's server takes a request only if it was signed with a time within five minutes of its own,
and a reply only if it was made before its question lapsed, by the device's clock. So a device goes
by the server's clock: a refusal says what time it is there, and whoever was wrong signs again. That
time is a second old at times, so a refusal just after the server's own clock was set says nothing
yet, and the request is repeated a moment later. A reply is dated by its question and the seconds it
took.
"""

from __future__ import annotations

import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

LEAST_S = 2.0  # a smaller difference between two clocks is not worth signing again
STALE_S = 1.5  # how old the time in an answer may be: uvicorn looks at its clock once a second
TRIES = 4  # of a request that is refused


class Signature:
    """Signs every request of a device, by the server's clock."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = b64encode(public_key_to_bytes(key.public_key())).decode("ascii")
        self._behind = timedelta()  # this machine's clock, of the server's

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send a request signed; again while it is refused and the clock may be why."""
        waited = False
        for _ in range(TRIES):
            believed = self._sign(context.request)
            response = call_next(context)
            if response.status_code != httpx.codes.UNAUTHORIZED:
                break
            if self._learn(response, believed):
                continue
            if waited:
                break
            time.sleep(STALE_S)
            waited = True
        return response

    def _sign(self, request: httpx.Request) -> timedelta:
        """Sign a request; how far behind this machine's clock was taken to be."""
        believed = self._behind
        when = (datetime.now(UTC) + believed).isoformat()
        signature = sign_message(self._key, when.encode("ascii"))
        request.headers.update(
            {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: when,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
            }
        )
        return believed

    def _learn(self, response: httpx.Response, believed: timedelta) -> bool:
        """Take over the time in an answer; whether the request was signed by another.

        Another thread may have learned it in the meantime, so what counts is what was signed.
        """
        try:
            there = parsedate_to_datetime(response.headers["date"])
            behind = there - datetime.now(UTC)
        except (KeyError, ValueError, TypeError, OverflowError):
            return False
        self._behind = behind
        return abs((behind - believed).total_seconds()) > LEAST_S


def date_reply(reply: Message, question: Message, seconds: float) -> None:
    """Date a reply by the clock of whoever asked."""
    asked = question.metadata
    reply.metadata.__dict__["_created_at"] = asked.created_at + seconds
    reply.metadata.__dict__["_ttl"] = max(asked.ttl - seconds, 1e-3)
