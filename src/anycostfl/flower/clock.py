"""Devices whose clock is wrong: boards without a battery for it, or a clock that has just jumped.

Flower's server accepts a request only if it was signed with a time within five minutes of its own,
and a reply only if it was made before its message expired, by the device's clock. So a device goes
by the server's clock: a refusal carries the server's time, and a device whose clock differs signs
again. That time may be a second old, so a refusal just after the server's own clock was set proves
nothing yet, and the request is repeated a moment later. A reply is dated by its message and the
seconds it took.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from anycostfl.flower._internal import set_lifetime, sign_headers
from anycostfl.flower.keys import public_pem

LEAST_S = 2.0  # a smaller difference between two clocks is not worth signing again
STALE_S = 1.5  # how old the time in a response may be: uvicorn looks at its clock once a second
TRIES = 4  # of a request that is refused


class Signature:
    """Signs every request of a device, by the server's clock."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = b64encode(public_pem(key.public_key())).decode("ascii")
        self._behind = timedelta()  # this machine's clock, relative to the server's

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Send a request signed; again while it is refused and the clock may be the reason."""
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
        """Sign a request; how far behind this machine's clock was assumed to be."""
        believed = self._behind
        when = (datetime.now(UTC) + believed).isoformat()
        signature = self._key.sign(when.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        sign_headers(request, self._public, when, b64encode(signature).decode("ascii"))
        return believed

    def _learn(self, response: httpx.Response, believed: timedelta) -> bool:
        """Adopt the time in a response; whether the request was signed by another one.

        Another thread may have learned it in the meantime, so what counts is what was signed.
        """
        try:
            there = parsedate_to_datetime(response.headers["date"])
            behind = there - datetime.now(UTC)
        except (KeyError, ValueError, TypeError, OverflowError):
            return False
        self._behind = behind
        return abs((behind - believed).total_seconds()) > LEAST_S


def date_reply(reply: Message, message: Message, seconds: float) -> None:
    """Date a reply by the clock of the server that sent the message."""
    asked = message.metadata
    set_lifetime(reply, asked.created_at + seconds, max(asked.ttl - seconds, 1e-3))
