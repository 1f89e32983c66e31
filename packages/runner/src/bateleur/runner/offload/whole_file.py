"""Files that are written atomically, and read with checks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.errors import PrefixRefused

TEMPORARY = ".{process}-{number}.tmp"
_MAX_BUFFERS = 1024
"""Maximum number of buffers in one system call."""
_numbers = count()


def write_whole(path: Path, buffers: list[memoryview]) -> int:
    """Write a file, readable by its owner only, and return its size.

    Other processes see the whole file or the one before. Nothing is flushed to disk: after a power failure the file may
    be empty or incomplete. Raises OSError; a failed write leaves no file.
    """
    size = sum(each.nbytes for each in buffers)
    written = path.parent / TEMPORARY.format(process=os.getpid(), number=next(_numbers))
    opened = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write(opened, [each.cast("B") for each in buffers if each.nbytes])
        finally:
            os.close(opened)
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    return size


def _write(opened: int, buffers: list[memoryview]) -> None:
    while buffers:
        done = os.writev(opened, buffers[:_MAX_BUFFERS])
        while buffers and done >= buffers[0].nbytes:
            done -= buffers.pop(0).nbytes
        if done:
            buffers[0] = buffers[0][done:]


class Opened:
    """An open file that is read from start to end."""

    def __init__(self, path: Path, number: int, size: int) -> None:
        self.path, self.size = path, size
        self._number = number

    def read(self, size: int) -> NDArray[np.uint8]:
        """Return the next `size` bytes. Raises PrefixRefused if there are fewer."""
        found = np.empty(size, np.uint8)
        view, have = found.data, 0
        while have < size:
            if not (more := os.readv(self._number, [view[have:]])):
                raise PrefixRefused("truncated", f"{self.path}: ends too early")
            have += more
        return found


@contextmanager
def opened_file(path: Path, *, follow: bool) -> Iterator[Opened]:
    """Open a regular file for reading. follow: whether to accept a symbolic link.

    Raises PrefixRefused for any other file, and for every error while the file is open.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe does not wait
    try:
        number = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        try:
            at = os.fstat(number)
            if not stat.S_ISREG(at.st_mode):
                raise PrefixRefused("unreadable", f"{path}: is not a regular file")
            yield Opened(path, number, at.st_size)
        finally:
            os.close(number)
    except FileNotFoundError as error:
        raise PrefixRefused("gone", f"{path}: {error.strerror}") from error
    except OSError as error:
        raise PrefixRefused("unreadable", f"{path}: {error.strerror}") from error
