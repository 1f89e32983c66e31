"""Which weights an engine runs: a digest of all bytes of their files."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.whole_file import opened_file, write_whole

_MOST_REMEMBERED = 1 << 20
_PIECE = 1 << 22
_THREADS = 8

Stat = tuple[int, int, int, int]
"""Size, inode, and the times of the last change to contents and to anything, in ns: what changes with a file."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a checkpoint's folder as they were when it was loaded."""

    folder: Path
    stats: tuple[tuple[str, Stat], ...]
    """By name, of `config.json` and every safetensors file."""

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """To be asked as soon as they have been read."""
        return cls(folder, _stats(folder))

    def digest(self, known: Path | None = None) -> str:
        """32 hexadecimal digits; reads all of them, about 1 GB/s for each of up to 8 files at once.

        known: a file that remembers it, of files that have not changed since by what the system says of them; what it
        can't tell is found out again.

        Raises ValueError if they are no longer those that were loaded.
        """
        if known is not None and (said := _remembered(known, self.stats)):
            return said
        digest = self._digest()
        if known is not None:
            with suppress(OSError):  # then the next start reads them again
                write_whole(known, [memoryview(json.dumps([digest, self.stats]).encode())])
        return digest

    def _digest(self) -> str:
        names = [name for name, _ in self.stats]
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                digests = list(threads.map(_digest, [self.folder / name for name in names]))
            unchanged = _stats(self.folder) == self.stats
        except OSError:
            unchanged = False
        if not unchanged:
            raise ValueError(
                f"{self.folder}: its files have changed since the model was loaded, so nobody knows of which weights "
                "its prefixes are"
            )
        whole = blake2b(digest_size=16)
        for name, digest in zip(names, digests, strict=True):
            whole.update(name.encode() + b"\0" + digest)
        return whole.hexdigest()


def _remembered(known: Path, stats: tuple[tuple[str, Stat], ...]) -> str | None:
    try:
        with opened_file(known, follow=False) as opened:
            digest, of = json.loads(opened.read(min(opened.size, _MOST_REMEMBERED)).tobytes())
    except (PrefixRefused, ValueError, TypeError, RecursionError):
        return None
    same = of == json.loads(json.dumps(stats))
    return digest if same and isinstance(digest, str) and len(digest) == 32 else None


def _stats(folder: Path) -> tuple[tuple[str, Stat], ...]:
    found = []
    for path in sorted((*folder.glob("config.json"), *folder.glob("*.safetensors"))):
        at = os.stat(path)
        found.append((path.name, (at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns)))
    return tuple(found)


def _digest(path: Path) -> bytes:
    digest, piece = blake2b(digest_size=16), bytearray(_PIECE)
    with open(path, "rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.digest()
