"""The server's side of the downlink: which steps a device has missed, by the mark of what it holds.

A device says in its offer what it holds, by a digest, not by a round's number: after a server went
back to a checkpoint, a round of the same number may have another public model. Steps live in memory
only. Whoever holds something else is sent the whole model. Steps come with the mark of what they
start from, for a device may have been restarted since its offer: it then fails its task, and its
next offer says what it holds now.
"""

from __future__ import annotations

import hashlib

from anycostfl.downlink import Step
from anycostfl.flower.messages import Download, raw_bytes
from anycostfl.state import State


def mark_of(public: State) -> bytes:
    """A digest of a public model; none of no model."""
    digest = hashlib.blake2s(digest_size=16)
    for name in sorted(public):
        digest.update(name.encode())
        digest.update(raw_bytes(public[name]))
    return digest.digest() if public else b""


class Chain:
    """The public model, and the steps that led to it."""

    def __init__(self, public: State) -> None:
        self._public = public
        self._marks = [mark_of(public)]  # before the first step, then after each
        self._steps: list[Step] = []

    def add(self, step: Step | None, public: State) -> None:
        """Go on by a step; those that would take more than the whole model are forgotten."""
        self._public = public
        if step is None:
            return
        self._steps.append(step)
        self._marks.append(mark_of(public))
        while len(self._steps) > 1 and sum(s.size for s in self._steps) >= self._whole():
            del self._steps[0], self._marks[0]

    def since(self, mark: bytes) -> Download:
        """What brings a device up to date that holds the public model of this mark."""
        if mark and mark in self._marks:
            ago = self._marks[::-1].index(mark)  # a step may change nothing: the latest counts
            missed = tuple(self._steps[len(self._steps) - ago :])
            if sum(step.size for step in missed) < self._whole():
                return Download(steps=missed, base=mark)
        return Download(whole=self._public)

    def _whole(self) -> int:
        return Download(whole=self._public).size
