"""A folder of prefixes that several processes share, each of which may come and go at any moment.

Files appear whole under names that say what they hold, `LAYOUT/KEY.kv.safetensors`, and nothing is ever locked: who
writes what another has just written replaces it by the same. Anything else in the folder is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.layout import Layout
from bateleur.runner.offload.prefix_file import Prefix, prefix_bytes, read_prefix, write_prefix

_NAME = re.compile(r"[0-9a-f]{8,128}\.(kv|end)\.safetensors")
_LAYOUT = re.compile(r"[0-9a-f]{32}")
_LEFT_BEHIND = re.compile(r"\.\d+-\d+\.tmp")
_STALE_SECONDS = 3600
_LEFT_FREE = 0.9
"""Of the limit, what is left where files had to go."""


def made(root: Path) -> Path:
    """The folder, made for its owner alone if it isn't there. Raises ValueError where that can't be."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"kv_offload_path is {str(root)!r}; it must be a folder to write to: {error}"
        ) from error
    return root


class DiskFolder:
    """Files of one layout, and the limit for those of all. Methods but `__init__` may take long: for other threads.

    Args:
        root: the folder, made if it isn't there, for its owner alone.
        layout: of the prefixes.
        limit_bytes: of all files of all layouts below `root`, at most; None for half of what is free there now, and
            what such files take already.
        writers: ranks that write as much there at the same time.

    Raises ValueError where no file can be written there.
    """

    def __init__(self, root: Path, layout: Layout, limit_bytes: int | None, writers: int = 1) -> None:
        self._root, self._layout, self._writers = root, layout, writers
        self._folder = root / layout.digest
        made(root)
        try:
            self._folder.mkdir(0o700, exist_ok=True)
            if self._folder.is_symlink():
                raise ValueError(f"kv_offload_path is {str(root)!r}; {self._folder.name} in it is a link")
            probe = self._folder / f".{os.getpid()}-0.tmp"
            probe.write_bytes(b"")
            probe.unlink()
            self._total = sum(size for _, size, _ in self._files())
            free = shutil.disk_usage(root).free
        except OSError as error:
            raise ValueError(
                f"kv_offload_path is {str(root)!r}; it must be a folder to write to: {error.strerror}"
            ) from error
        self.limit_bytes = self._total + free // 2 if limit_bytes is None else limit_bytes
        self._counted = self._listed()
        """Of this layout what `_total` has in it; what others removed stays in there until room is made."""
        self._sweep()

    def names(self) -> set[str]:
        """Of all files of this layout. Where those that others wrote are too much for the limit, room is made."""
        names = self._listed()
        self._total += sum(self._size(name) for name in names - self._counted)
        self._counted = set(names)
        if self._total <= self.limit_bytes:
            return names
        with suppress(OSError):  # of a folder that is gone: who writes there says so
            self._trim(0)
        self._counted = self._listed()
        return set(self._counted)

    def write(self, name: str, prefix: Prefix) -> int:
        """Write a file, for which what was not asked for the longest makes room; bytes written, 0 for a file that is
        larger than the limit.

        For one thread. Raises OSError.
        """
        room = prefix_bytes(self._layout, prefix) * self._writers
        if room > self.limit_bytes:
            return 0
        if self._total + room > self.limit_bytes:
            self._trim(room)
        self._total += room
        self._counted.add(name)
        return write_prefix(self._folder / name, self._layout, prefix)

    def read(self, name: str, key: bytes) -> Prefix:
        """A file, which was asked for just now. Raises PrefixRefused where it is not what its name says."""
        path = self._folder / name
        prefix = read_prefix(path, self._layout)
        if prefix.key != key:
            raise PrefixRefused("misnamed", f"{path}: is of another prefix")
        with suppress(OSError):  # who may read need not be who may write
            os.utime(path)
        return prefix

    def remove(self, names: list[str]) -> None:
        """Nobody is to find these."""
        for name in names:
            with suppress(OSError):
                os.unlink(self._folder / name)

    def _listed(self) -> set[str]:
        with suppress(OSError), os.scandir(self._folder) as found:
            return {each.name for each in found if _NAME.fullmatch(each.name)}
        return set()

    def _size(self, name: str) -> int:
        with suppress(OSError):
            return (self._folder / name).stat(follow_symlinks=False).st_size
        return 0

    def _files(self) -> list[tuple[float, int, str]]:
        """When it was asked for last, bytes and path, of all files of all layouts."""
        found = []
        for folder in os.scandir(self._root):
            if not _LAYOUT.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for each in os.scandir(folder):
                if _NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        at = each.stat(follow_symlinks=False)
                        found.append((at.st_mtime, at.st_size, each.path))
        return found

    def _trim(self, room: int) -> None:
        """Remove files until there is room for so many bytes."""
        files = sorted(self._files())
        self._total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._total + room <= max(_LEFT_FREE * self.limit_bytes, room):
                return
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)  # who shares the folder may have made room as well
                self._total -= size

    def _sweep(self) -> None:
        """Remove what processes left behind that were killed while they wrote."""
        with os.scandir(self._folder) as found:
            for each in found:
                if _LEFT_BEHIND.fullmatch(each.name):
                    with suppress(OSError):
                        if time.time() - each.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                            os.unlink(each.path)
