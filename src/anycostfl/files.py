"""Files that are there whole or not at all, folders that one process works on, disks that fail.

A run directory may come from somebody else, so nothing is read or written through a link in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from anycostfl.errors import AnycostError

LOCK = "lock"
GO_ON = "Free some space, then resume with --resume"
LEAVING_S = 2.0  # for another process to leave a folder


class StorageError(AnycostError, OSError):
    """A run directory that cannot be written or read; says what is still intact."""


class InUseError(AnycostError):
    """A folder that another process works on."""


def atomic_write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file beside its place, then move it there: it is there whole or not at all.

    A secret is its owner's to read from the first byte on.
    """
    refuse_special(path)
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    try:
        part.touch(0o600 if secret else 0o666, exist_ok=False)  # never through a link left there
        part.write_bytes(content)
        sync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def refuse_special(path: Path) -> None:
    """Nothing but a file may be replaced by one: no folder, and no device such as /dev/null."""
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} is there and is not a file; choose another name")


def open_nofollow(path: str | Path, flags: int) -> int:
    """For `open(…, opener=open_nofollow)`: no link is followed, no pipe waited for."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StorageError(f"{path} is a link, which no run writes; it is not followed") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{path} is not a file, and a run writes nothing else")
    return descriptor


def read_file(path: Path, most: int = -1) -> bytes:
    """What a file holds, or the first bytes of it."""
    with open(path, "rb", opener=open_nofollow) as file:
        return file.read(most)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, which need not be there yet."""
    with open(path, "a", opener=open_nofollow) as file:
        file.write(line + "\n")


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_lock(
    folder: Path, then: str = GO_ON, *, name: str = LOCK, mark: str = ""
) -> Iterator[None]:
    """Keep other processes away from a folder; the lock goes when this one does, however it ends.

    A process that is about to exit gets a moment to leave. The file names the process, or the mark.
    """
    with writing_to(folder, then):
        lock = open(folder / name, "a+", opener=open_nofollow)  # noqa: SIM115 - closed below
    with lock:
        until = time.monotonic() + LEAVING_S
        while not try_lock(lock):
            if time.monotonic() > until:
                lock.seek(0)
                who = lock.read() or "another process"
                raise InUseError(f"{who} is working on {folder}; wait for it or stop it")
            time.sleep(0.1)
        with writing_to(folder, then):
            lock.truncate(0)
            lock.write(mark or f"process {os.getpid()}")
            lock.flush()
        yield


def try_lock(file: TextIO) -> bool:
    """Take the lock of an open file, unless another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def writing_to(folder: Path, then: str = GO_ON, *, intact: str = "") -> Iterator[None]:
    """Turn a failing disk into one clear message."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        also = f"; {intact}" if intact else ""
        raise StorageError(f"cannot write to {folder}: {error}{also}. {then}") from error
