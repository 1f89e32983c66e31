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
        self._total, self._counted, self._writes = 0, set[str](), False
        """Bytes of all files, and the paths of those: what others removed stays in both until room is made; and whether
        this process has written one."""
        made(root)
        try:
            self._folder.mkdir(0o700, exist_ok=True)
            if self._folder.is_symlink():
                raise ValueError(f"kv_offload_path is {str(root)!r}; {self._folder.name} in it is a link")
            probe = self._folder / f".{os.getpid()}-0.tmp"
            probe.write_bytes(b"")
            probe.unlink()
            self._recount()
            free = shutil.disk_usage(root).free
        except OSError as error:
            raise ValueError(
                f"kv_offload_path is {str(root)!r}; it must be a folder to write to: {error.strerror}"
            ) from error
        self.limit_bytes = self._total + free // 2 if limit_bytes is None else limit_bytes
        self._sweep()

    def names(self) -> set[str]:
        """Of all files of this layout. Who writes here makes room where what others wrote is too much."""
        names, paths = self._listed()
        self._total += sum(_size(path) for path in paths - self._counted)
        self._counted = paths
        if self._total <= self.limit_bytes or not self._writes:
            return names
        with suppress(OSError):  # of a folder that is gone: who writes there says so
            self._trim(0)
        own = f"{self._folder}{os.sep}"
        return {path[len(own) :] for path in self._counted if path.startswith(own)}

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
        self._writes = True
        self._total += room
        self._counted.add(str(self._folder / name))
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

    def _listed(self) -> tuple[set[str], set[str]]:
        """Names of this layout's files, and paths of those of all layouts."""
        names, paths = set[str](), set[str]()
        with suppress(OSError):
            for folder in self._folders():
                with suppress(OSError), os.scandir(folder) as found:
                    found_here = {each.name: each.path for each in found if _NAME.fullmatch(each.name)}
                    paths.update(found_here.values())
                    names = set(found_here) if folder.name == self._folder.name else names
        return names, paths

    def _folders(self) -> list[os.DirEntry[str]]:
        """Of all layouts."""
        with os.scandir(self._root) as found:
            return [
                each for each in found if _LAYOUT.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            ]

    def _recount(self) -> list[tuple[float, int, str]]:
        """When it was asked for last, bytes and path, of all files of all layouts: what counts from here on."""
        found = []
        for folder in self._folders():
            for each in os.scandir(folder):
                if _NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        at = each.stat(follow_symlinks=False)
                        found.append((at.st_mtime, at.st_size, each.path))
        self._total = sum(size for _, size, _ in found)
        self._counted = {path for _, _, path in found}
        return found

    def _trim(self, room: int) -> None:
        """Remove files until there is room for so many bytes, if there is not."""
        files = sorted(self._recount())
        if self._total + room <= self.limit_bytes:
            return
        for _, size, path in files:
            if self._total + room <= max(_LEFT_FREE * self.limit_bytes, room):
                return
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)  # who shares the folder may have made room as well
                self._total -= size
                self._counted.discard(path)

    def _sweep(self) -> None:
        """Remove what processes left behind that were killed while they wrote."""
        with os.scandir(self._folder) as found:
            for each in found:
                if _LEFT_BEHIND.fullmatch(each.name):
                    with suppress(OSError):
                        if time.time() - each.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                            os.unlink(each.path)


def _size(path: str) -> int:
    """Bytes of a file; none of one that is gone."""
    with suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_size
    return 0
