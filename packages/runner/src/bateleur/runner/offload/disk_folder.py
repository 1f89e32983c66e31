"""A folder of prefix files that several processes share without locks.

Files appear complete, under names made from their tokens: `LAYOUT/KEY.kv.safetensors`. Two processes that write the
same file write the same bytes. Other files in the folder are not touched.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.prefix_file import Prefix, encode_prefix, read_prefix
from bateleur.runner.offload.rows import RowLayout
from bateleur.runner.offload.whole_file import write_whole

_NAME = re.compile(r"[0-9a-f]{8,128}\.(kv|end)\.safetensors")
_LAYOUT = re.compile(r"[0-9a-f]{32}")
_TEMPORARY = re.compile(r"\.\d+-\d+\.tmp")
_STALE_SECONDS = 3600
_TRIM_TO = 0.9
"""Share of the limit that remains when files are removed."""


def make_folder(root: Path) -> Path:
    """Make the folder, readable by its owner only, if it does not exist. Raises ValueError if it can't be made."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"kv_offload_path is {str(root)!r}; it must be a writable folder: {error}") from error
    return root


class DiskFolder:
    """Prefix files of one layout in a folder, and the size limit of the files of all layouts.

    root: the folder; made, readable by its owner only, if it does not exist.
    layout: layout of the prefixes.
    limit_bytes: maximum size of the files of all layouts below `root`; None: half of the free space now, plus their
    size now.
    writers: number of ranks that write at the same time. Room is made for files of all of them.

    The constructor raises ValueError if the folder is not writable. Other methods may take long, so call them in
    threads.
    """

    def __init__(self, root: Path, layout: RowLayout, limit_bytes: int | None, writers: int = 1) -> None:
        self._root, self._layout, self._writers = root, layout, writers
        self._folder = root / layout.digest
        self._total, self._counted, self._writes = 0, set[str](), False
        """Size and paths of all files, which may include files that other processes removed, and whether this process
        wrote one."""
        make_folder(root)
        try:
            self._folder.mkdir(0o700, exist_ok=True)
            if self._folder.is_symlink():
                raise ValueError(f"kv_offload_path is {str(root)!r}; {self._folder.name} in it must not be a link")
            probe = self._folder / f".{os.getpid()}-0.tmp"
            probe.write_bytes(b"")
            probe.unlink()
            self._recount()
            free = shutil.disk_usage(root).free
        except OSError as error:
            rule = f"it must be a writable folder: {error.strerror}"
            raise ValueError(f"kv_offload_path is {str(root)!r}; {rule}") from error
        self.limit_bytes = self._total + free // 2 if limit_bytes is None else limit_bytes
        self._sweep()

    def names(self) -> set[str]:
        """Return the names of all files of this layout. In a process that writes, also remove files over the limit."""
        names, paths = self._listed()
        self._total += sum(_size(path) for path in paths - self._counted)
        self._counted = paths
        if self._total <= self.limit_bytes or not self._writes:
            return names
        with suppress(OSError):  # the folder is gone: the next write raises
            self._trim(0)
        own = f"{self._folder}{os.sep}"
        return {path[len(own) :] for path in self._counted if path.startswith(own)}

    def write(self, name: str, prefix: Prefix) -> int:
        """Write a file and return its size; return 0, and write nothing, if it is larger than the limit.

        Removes least recently used files if needed.
        """
        data = encode_prefix(self._layout, prefix)
        room = len(data) * self._writers
        if room > self.limit_bytes:
            return 0
        if self._total + room > self.limit_bytes:
            self._trim(room)
        self._writes = True
        self._total += room
        self._counted.add(str(self._folder / name))
        return write_whole(self._folder / name, data)

    def read(self, name: str, key: bytes) -> Prefix:
        """Read a file and mark it as used. Raises PrefixRefused if it is invalid or has another `key`."""
        path = self._folder / name
        prefix = read_prefix(path, self._layout)
        if prefix.key != key:
            raise PrefixRefused("misnamed", f"{path}: is of another prefix")
        with suppress(OSError):  # readers may lack the right to write
            os.utime(path)
        return prefix

    def remove(self, names: list[str]) -> None:
        """Remove files of this layout by name."""
        for name in names:
            with suppress(OSError):
                os.unlink(self._folder / name)

    def _listed(self) -> tuple[set[str], set[str]]:
        """Return the names of this layout's files, and the paths of the files of all layouts."""
        names, paths = set[str](), set[str]()
        with suppress(OSError):
            for folder in self._folders():
                with suppress(OSError), os.scandir(folder) as found:
                    found_here = {each.name: each.path for each in found if _NAME.fullmatch(each.name)}
                    paths.update(found_here.values())
                    names = set(found_here) if folder.name == self._folder.name else names
        return names, paths

    def _folders(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._root) as found:
            return [each for each in found if _LAYOUT.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]

    def _recount(self) -> list[tuple[float, int, str]]:
        """Scan the files of all layouts again. Returns time of last use, size and path of each."""
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
        """Remove least recently used files if less than `room` bytes are left below the limit."""
        files = sorted(self._recount())
        if self._total + room <= self.limit_bytes:
            return
        for _, size, path in files:
            if self._total + room <= max(_TRIM_TO * self.limit_bytes, room):
                return
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)  # another process may have removed it
                self._total -= size
                self._counted.discard(path)

    def _sweep(self) -> None:
        """Remove temporary files of processes that were killed while writing."""
        with os.scandir(self._folder) as found:
            for each in found:
                if _TEMPORARY.fullmatch(each.name):
                    with suppress(OSError):
                        if time.time() - each.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                            os.unlink(each.path)


def _size(path: str) -> int:
    """Return the size of a file; 0 if it does not exist."""
    with suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_size
    return 0
