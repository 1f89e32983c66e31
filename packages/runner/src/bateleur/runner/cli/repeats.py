"""Ids that come more than once in a file: found without holding them."""

from __future__ import annotations

import hashlib
import json

import numpy as np

_BYTES = 16
"""Of a hash: so many that two ids never share one."""


class Repeats:
    """Finds ids that come again, in two passes over them: `add` each, `sort`, and then ask for the `first` of each.

    It takes 16 bytes an id until `sort`, and then 24 for each that comes more than once.
    """

    def __init__(self) -> None:
        self._all = bytearray()
        self._shared = np.empty(0, f"S{_BYTES}")
        self._first = np.empty(0, np.int64)

    def add(self, ident: str | int) -> None:
        """Take note of an id."""
        self._all += _hash(ident)

    def sort(self) -> None:
        """All ids have been added."""
        if self._all:
            hashes = np.frombuffer(self._all, f"S{_BYTES}")
            hashes.sort()
            self._shared = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        self._all = bytearray()

    @property
    def any(self) -> bool:
        """Whether any id comes again."""
        return len(self._shared) > 0

    def again(self) -> None:
        """Ids will be asked for from the beginning."""
        self._first = np.zeros(len(self._shared), np.int64)

    def first(self, ident: str | int, line: int) -> int:
        """The line that has this id first, among those asked for since `again`; this one, if none had."""
        if not self.any:
            return line
        key = np.bytes_(_hash(ident))
        at = int(np.searchsorted(self._shared, key))
        if at == len(self._shared) or self._shared[at] != key:
            return line
        if not self._first[at]:
            self._first[at] = line
        return int(self._first[at])


def _hash(ident: str | int) -> bytes:
    return hashlib.blake2b(json.dumps(ident).encode(), digest_size=_BYTES).digest()
