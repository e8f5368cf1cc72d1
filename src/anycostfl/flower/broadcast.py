"""The server's side of the downlink: which steps a device has missed, by a digest of what it holds.

A device identifies its public model by a digest, not by a round's number: after a server went back
to a checkpoint, a round of the same number may have another public model. Steps live in memory
only; a device that holds something else is sent the whole model. Steps come with the digest of what
they start from, for a device may have been restarted since: it then fails its task, and its next
message says what it holds now.
"""

from __future__ import annotations

import hashlib

from anycostfl.server.downlink import Step
from anycostfl.state import State
from anycostfl.wire.envelope import raw_bytes
from anycostfl.wire.messages import Download


def model_digest(public: State) -> bytes:
    """A digest of a public model; empty without one."""
    digest = hashlib.blake2s(digest_size=16)
    for name in sorted(public):
        digest.update(name.encode())
        digest.update(raw_bytes(public[name]))
    return digest.digest() if public else b""


class Chain:
    """The public model, and the steps that led to it."""

    def __init__(self, public: State) -> None:
        self._public = public
        self._digests = [model_digest(public)]  # before the first step, then after each
        self._steps: list[Step] = []

    def add(self, step: Step, public: State) -> None:
        """Add a step; steps that would take more than the whole model are dropped."""
        self._public = public
        self._steps.append(step)
        self._digests.append(model_digest(public))
        while len(self._steps) > 1 and sum(s.size for s in self._steps) >= self._whole():
            del self._steps[0], self._digests[0]

    def since(self, digest: bytes) -> Download:
        """What brings a device up to date that holds the public model of this digest."""
        if digest and digest in self._digests:
            ago = self._digests[::-1].index(digest)  # a step may change nothing: the latest counts
            missed = tuple(self._steps[len(self._steps) - ago :])
            if sum(step.size for step in missed) < self._whole():
                return Download(steps=missed, base=digest)
        return Download(whole=self._public)

    def _whole(self) -> int:
        return Download(whole=self._public).size
