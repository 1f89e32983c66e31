"""A folder of prefix files that several processes share without locks.

Files appear complete. Their names identify their tokens: `LAYOUT/KEY.kv.safetensors` has a full segment of KV blocks,
`LAYOUT/KEY.end.safetensors` the end of a prefix, see `spans`. LAYOUT is `RowLayout.digest`, KEY the prefix-cache key.
Two processes that write the same file write the same bytes. Other files in the folder are not touched.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.prefix_file import Prefix, encode_prefix, read_prefix
from bateleur.runner.offload.rows import RowLayout
from bateleur.runner.offload.whole_file import write_whole
from bateleur.runner.utils.arguments import refuse

_NAME = re.compile(r"[0-9a-f]{8,128}\.(kv|end)\.safetensors")
_LAYOUT = re.compile(r"[0-9a-f]{32}")
_TEMPORARY = re.compile(r"\.\d+-\d+\.tmp")
_STALE_SECONDS = 3600
_TRIM_TO = 0.9  # share of the limit that remains when files are removed


def make_folder(root: Path) -> Path:
    """Make the folder, readable by its owner only, if it does not exist. Raises ValueError if it can't be made."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"kv_offload_path is {str(root)!r}; it must be a writable folder: {error}") from error
    return root


class DiskFolder:
    """Prefix files of one layout (`RowLayout`), in a folder that may also have files of other layouts.

    root: the folder, see `make_folder`. layout: this engine's; its files are in the subfolder `layout.digest`.
    limit_bytes: maximum size of the files of all layouts; None: half of the free space now, plus their size now.
    writers: number of ranks that write at the same time. Room is made for all of them.

    The constructor raises ValueError if the folder is not writable. Other methods may take long: call them in threads.
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
            self._sweep()
            free = shutil.disk_usage(root).free
        except OSError as error:
            rule = f"it must be a writable folder: {error.strerror}"
            raise ValueError(f"kv_offload_path is {str(root)!r}; {rule}") from error
        self.limit_bytes = self._total + free // 2 if limit_bytes is None else limit_bytes

    def names(self) -> set[str]:
        """Return the names of the files that this engine can read: those of its layout (`RowLayout`).

        Also remove least recently used files of any layout above `limit_bytes`, but only if this object wrote a file.
        """
        paths = set[str]()
        with suppress(OSError):
            for each in self._files():
                paths.add(each.path)
                if each.path not in self._counted:
                    with suppress(OSError):
                        self._total += each.stat(follow_symlinks=False).st_size
        self._counted = paths
        if self._total > self.limit_bytes and self._writes:
            with suppress(OSError):  # the folder is gone: the next write raises
                self._trim(0)
        own = f"{self._folder}{os.sep}"
        return {path[len(own) :] for path in self._counted if path.startswith(own)}

    def write(self, name: str, prefix: Prefix) -> int:
        """Write a file; first remove least recently used ones if needed. Returns its bytes.

        Raises ValueError if the file is too large for the limit, and OSError if it can't be written.
        """
        data = encode_prefix(self._layout, prefix)
        room = len(data) * self._writers
        if room > self.limit_bytes:
            rule = f"at least {room}: a file has {len(data)} bytes on each of {self._writers} ranks"
            refuse("kv_offload_disk_bytes", self.limit_bytes, rule)
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
        """Remove files of this engine by name; missing ones are ignored."""
        for name in names:
            with suppress(OSError):
                os.unlink(self._folder / name)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the prefix files of all layouts (`RowLayout`) in the folder."""
        with os.scandir(self._root) as found:
            folders = [each for each in found if _LAYOUT.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
        for folder in folders:
            with suppress(OSError), os.scandir(folder) as files:
                yield from (each for each in files if _NAME.fullmatch(each.name))

    def _recount(self) -> list[tuple[float, int, str]]:
        """Count the files of all layouts (`RowLayout`) again. Returns time of last use, bytes and path of each."""
        found = []
        for each in self._files():
            with suppress(OSError):
                at = each.stat(follow_symlinks=False)
                if stat.S_ISREG(at.st_mode):
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
