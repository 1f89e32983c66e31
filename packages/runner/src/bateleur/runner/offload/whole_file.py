"""Files that are written atomically, and read with checks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

from bateleur.runner.errors import PrefixRefused

TEMPORARY = ".{process}-{number}.tmp"
_numbers = count()


def write_whole(path: Path, data: bytes) -> int:
    """Write a file that only its owner can read, and return its size.

    Other processes see the whole file or the one before. Nothing is flushed to disk: after a power failure the file may
    be empty or incomplete. Raises OSError; a failed write leaves no file.
    """
    written = path.parent / TEMPORARY.format(process=os.getpid(), number=next(_numbers))
    number = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    return len(data)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file of `size` bytes that is read from start to end."""

    path: Path
    file: BinaryIO
    size: int

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises PrefixRefused if there are fewer."""
        data = self.file.read(size)
        if len(data) < size:
            raise PrefixRefused("truncated", f"{self.path}: ends too early")
        return data


@contextmanager
def opened_file(path: Path, *, follow_symlinks: bool) -> Iterator[OpenFile]:
    """Open a regular file for reading. follow_symlinks: whether to accept a symbolic link.

    Raises PrefixRefused for any other file, and for every error while the file is open.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe does not wait
    try:
        number = os.open(path, flags if follow_symlinks else flags | os.O_NOFOLLOW)
        at = os.fstat(number)
        if not stat.S_ISREG(at.st_mode):
            os.close(number)
            raise PrefixRefused("unreadable", f"{path}: is not a regular file")
        with os.fdopen(number, "rb") as file:
            yield OpenFile(path, file, at.st_size)
    except FileNotFoundError as error:
        raise PrefixRefused("gone", f"{path}: {error.strerror}") from error
    except OSError as error:
        raise PrefixRefused("unreadable", f"{path}: {error.strerror}") from error
