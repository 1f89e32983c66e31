"""Strings that end a text, found while it grows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_BITS = 21
"""Of a character's number."""


class StopStrings:
    """Finds the first of some strings that is complete (Aho and Corasick, 1975).

    The time that a character takes depends neither on how many they are nor on how long; memory is about 120 bytes for
    each of their characters. A state is a number, 0 before any text: the longest beginning of a string that the text
    so far ends in. Immutable once made.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._next: dict[int, int] = {}  # (state, character) -> state, where that lengthens a beginning
        self._shorter = array("l", [0])  # by state: the longest beginning that this one ends in
        self._length = array("l", [0])
        self._goes_on = bytearray(1)
        self._found: dict[int, str] = {}  # by state: the longest string that it ends in
        for stop in stops:
            self._found[self._grow(stop)] = stop
        self._link()

    def _grow(self, stop: str) -> int:
        state = 0
        for char in stop:
            key = state << _BITS | ord(char)
            if key not in self._next:
                self._next[key] = len(self._length)
                self._goes_on[state] = 1
                self._length.append(self._length[state] + 1)
                self._shorter.append(0)
                self._goes_on.append(0)
            state = self._next[key]
        return state

    def _link(self) -> None:
        """Short beginnings first, since those of a length lean on shorter ones."""
        by_length = sorted(self._next.items(), key=lambda edge: self._length[edge[1]])
        for key, state in by_length:
            before, char = key >> _BITS, chr(key & (1 << _BITS) - 1)
            shorter = self._step(self._shorter[before], char) if before else 0
            self._shorter[state] = shorter
            if state not in self._found and shorter in self._found:
                self._found[state] = self._found[shorter]

    def _step(self, state: int, char: str) -> int:
        following, number = self._next, ord(char)
        while (found := following.get(state << _BITS | number)) is None and state:
            state = self._shorter[state]
        return found or 0

    def read(self, state: int, text: str) -> tuple[int, int, str | None]:
        """The state behind a text, or behind the first string in it; how many characters were read; that string.

        Of several that end at once it is the longest.
        """
        step, found = self._step, self._found
        for count, char in enumerate(text, 1):
            state = step(state, char)
            if state in found:
                return state, count, found[state]
        return state, len(text), None

    def pass_by(self, state: int, text: str) -> int:
        """The state behind a text whose strings count for nothing."""
        for char in text:
            state = self._step(state, char)
        return state

    def num_open(self, state: int) -> int:
        """How many of the last characters may be the beginning of a string that is not complete."""
        while state and not self._goes_on[state]:
            state = self._shorter[state]
        return self._length[state]


@lru_cache(maxsize=16)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The same for requests that ask for the same."""
    return StopStrings(stops)
