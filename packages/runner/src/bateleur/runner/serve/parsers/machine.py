"""Going through text that comes in pieces, from state to state, in time that grows with its length alone."""

from __future__ import annotations

import re
from collections.abc import Callable

from bateleur.runner.serve.parsers.events import Called, Event, merged

State = Callable[[str, int], int]
"""Takes a text and a place in it; returns the place up to which it took it. What it leaves comes again with more."""


class Tags:
    """Looks for one of several tags."""

    def __init__(self, *tags: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._starts = {tag[:n] for tag in tags for n in range(1, len(tag))}
        self._longest = max(map(len, tags)) - 1

    def search(self, text: str, at: int) -> tuple[int, str]:
        """Where the first tag from `at` on begins, and the tag; else where something begins that may become one."""
        if (found := self._pattern.search(text, at)) is not None:
            return found.start(), found[0]
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._starts:
                return start, ""
        return len(text), ""


class Machine:
    """A parser in states: each takes what it can, and names the next one.

    A state that takes nothing and stays waits for more; so it must leave no more than the beginning of a tag.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._held = ""
        """What the last state left."""
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; what is certain by now."""
        text, at = self._held + text, 0
        while at < len(text):
            state = self._state
            place = state(text, at)
            if place == at and state == self._state:
                break
            at = place
        self._held = text[at:]
        return self._taken()

    def finish(self) -> list[Event]:
        """Nothing more will come; the rest."""
        held, self._held = self._held, ""
        self._end(held)
        return self._taken()

    def _end(self, held: str) -> None:
        """The text ends with what was left."""
        raise NotImplementedError

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return [each for each in merged(events) if isinstance(each, Called) or each.text]
