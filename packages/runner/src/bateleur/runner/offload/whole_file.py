"""Files that are written atomically, and read with checks."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

from bateleur.runner.errors import PrefixRefused

_numbers = count()


def write_whole(path: Path, data: bytes) -> int:
    """Write a file that only its owner can read, and return its size. A failed write leaves no file.

    Other processes see the whole file or the one before. After a power failure it may be empty or incomplete.
    """
    written = path.parent / f".{os.getpid()}-{next(_numbers)}.tmp"  # see `_TEMPORARY` of disk_folder.py
    number = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    return len(data)


@contextmanager
def opened_file(path: Path, *, follow_symlinks: bool) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading; yields file and size. follow_symlinks: whether to accept a symbolic link.

    Raises PrefixRefused for any other file, and for every error while the file is open.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe does not wait
    try:
        with os.fdopen(os.open(path, flags if follow_symlinks else flags | os.O_NOFOLLOW), "rb") as file:
            at = os.fstat(file.fileno())
            if not stat.S_ISREG(at.st_mode):
                raise PrefixRefused("unreadable", f"{path}: is not a regular file")
            yield file, at.st_size
    except OSError as error:
        reason = "gone" if isinstance(error, FileNotFoundError) else "unreadable"
        raise PrefixRefused(reason, f"{path}: {error.strerror}") from error
