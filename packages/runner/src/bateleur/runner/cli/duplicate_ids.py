"""Finds ids that occur more than once in a file, without keeping the ids in memory."""

from __future__ import annotations

import hashlib
import json

import numpy as np

_HASH_BYTES = 16
"""Enough that two different ids never share a hash."""


class DuplicateIds:
    """Finds repeated ids in two passes: `add` all ids and call `finish`, then call `first_line` for each."""

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._repeated = np.empty(0, f"S{_HASH_BYTES}")
        self._first_lines = np.empty(0, np.int64)

    def add(self, ident: str | int) -> None:
        """Add an id in the first pass."""
        self._hashes += _hash(ident)

    def finish(self) -> None:
        """End the first pass."""
        if self._hashes:
            hashes = np.frombuffer(self._hashes, f"S{_HASH_BYTES}")
            hashes.sort()
            self._repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        self._hashes = bytearray()

    @property
    def any(self) -> bool:
        """Whether any id is repeated."""
        return len(self._repeated) > 0

    def restart(self) -> None:
        """Begin another pass from the first line."""
        self._first_lines = np.zeros(len(self._repeated), np.int64)

    def first_line(self, ident: str | int, line: int) -> int:
        """Return the first line with this id since `restart`; `line` itself if there was none."""
        if not self.any:
            return line
        key = np.bytes_(_hash(ident))
        at = int(np.searchsorted(self._repeated, key))
        if at == len(self._repeated) or self._repeated[at] != key:
            return line
        if not self._first_lines[at]:
            self._first_lines[at] = line
        return int(self._first_lines[at])


def _hash(ident: str | int) -> bytes:
    return hashlib.blake2b(json.dumps(ident).encode(), digest_size=_HASH_BYTES).digest()
