"""Identifies the weights of an engine by a digest of their files."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Self

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.whole_file import opened_file, write_whole
from bateleur.runner.quantization.config import CONFIGURATIONS

_MAX_CACHED = 1 << 20
_THREADS = 8

Stat = tuple[int, int, int, int]  # size, inode, and times of the last change of contents and of metadata in ns


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a checkpoint folder, with their sizes, inodes and times when the model was loaded."""

    folder: Path
    stats: tuple[tuple[str, Stat], ...]  # status of each configuration and safetensors file, by name

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Record sizes, inodes and times of the files. Call it right after they were read."""
        return cls(folder, _stats(folder))

    def digest(self, cache_path: Path | None = None) -> str:
        """Return the digest, 32 hexadecimal digits. Reads all files, up to 8 at once, each at about 1 GB/s.

        cache_path: a file that caches the digest; valid while sizes, inodes and times are unchanged.
        Raises ValueError if the files have changed since they were loaded.
        """
        if cache_path is not None and (cached := _cached_digest(cache_path, self.stats)):
            return cached
        whole, unchanged = blake2b(digest_size=16), False
        with suppress(OSError), ThreadPoolExecutor(_THREADS) as threads:
            paths = [self.folder / name for name, _ in self.stats]
            for path, digest in zip(paths, threads.map(_digest, paths), strict=True):
                whole.update(path.name.encode() + b"\0" + digest)
            unchanged = _stats(self.folder) == self.stats
        if not unchanged:
            raise ValueError(f"{self.folder}: its files have changed since the model was loaded; restart the engine")
        if cache_path is not None:
            with suppress(OSError):  # the next start then reads all files again
                write_whole(cache_path, json.dumps([whole.hexdigest(), self.stats]).encode())
        return whole.hexdigest()


def _cached_digest(cache_path: Path, stats: tuple[tuple[str, Stat], ...]) -> str | None:
    try:
        with opened_file(cache_path, follow_symlinks=False) as (file, _):
            digest, cached = json.loads(file.read(_MAX_CACHED))
    except (PrefixRefused, ValueError, TypeError, RecursionError):
        return None
    same = cached == json.loads(json.dumps(stats))
    return digest if same and isinstance(digest, str) and len(digest) == 32 else None


def _stats(folder: Path) -> tuple[tuple[str, Stat], ...]:
    configurations = (folder / name for name in CONFIGURATIONS)
    paths = sorted((*filter(Path.is_file, configurations), *folder.glob("*.safetensors")))
    found = ((path.name, path.stat()) for path in paths)
    return tuple((name, (at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns)) for name, at in found)


def _digest(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as opened:
        return file_digest(opened, partial(blake2b, digest_size=16)).digest()
