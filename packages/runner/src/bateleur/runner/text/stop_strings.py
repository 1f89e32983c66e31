"""Search for stop strings in growing text."""

from array import array
from collections.abc import Sequence
from functools import lru_cache

_BITS = 21
"""Bits of a character's code point."""


class StopStrings:
    """Finds the first complete one of several strings (Aho and Corasick, 1975).

    The time per character does not depend on number and length of the strings; memory is about 120 bytes per character
    of the strings. A state is a number that stands for the longest prefix of a string that the text ends with; 0 before
    any text. Immutable.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: the strings, none of them empty."""
        self._next: dict[int, int] = {}  # (state, character) -> state that extends the prefix
        self._shorter = array("l", [0])  # by state: the longest shorter prefix that its prefix ends with
        self._length = array("l", [0])
        self._extends = bytearray(1)
        self._found: dict[int, str] = {}  # by state: the longest string that its prefix ends with
        for stop in stops:
            self._found[self._grow(stop)] = stop
        self._link()

    def _grow(self, stop: str) -> int:
        state = 0
        for char in stop:
            key = state << _BITS | ord(char)
            if key not in self._next:
                self._next[key] = len(self._length)
                self._extends[state] = 1
                self._length.append(self._length[state] + 1)
                self._shorter.append(0)
                self._extends.append(0)
            state = self._next[key]
        return state

    def _link(self) -> None:
        """Set the failure links (`_shorter`) of all states, short prefixes first, because longer ones need them."""
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
        """Read text from a state on. Returns the new state, the number of characters read, and the first stop string.

        Reading ends at the stop string; None if there is none. Of several strings that end at the same character, the
        longest is returned.
        """
        step, found = self._step, self._found
        for count, char in enumerate(text, 1):
            state = step(state, char)
            if state in found:
                return state, count, found[state]
        return state, len(text), None

    def pass_by(self, state: int, text: str) -> int:
        """Return the state after a text, ignoring stop strings in it."""
        for char in text:
            state = self._step(state, char)
        return state

    def num_open(self, state: int) -> int:
        """Return how many of the last characters may be the start of a stop string."""
        while state and not self._extends[state]:
            state = self._shorter[state]
        return self._length[state]


@lru_cache(maxsize=16)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the search for these strings, which requests with the same strings share."""
    return StopStrings(stops)
