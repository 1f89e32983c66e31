"""Reasoning between <think> and </think>, at the beginning of a text."""

from __future__ import annotations

from bateleur.runner.serve.parsers.events import Said, Thought
from bateleur.runner.serve.parsers.machine import Machine, State, Tags

_BEGIN, _END = "<think>", "</think>"
_TAGS = Tags(_END)


class Think(Machine):
    """Tells reasoning from content; white space around the tags is told by neither.

    opened: the prompt ended with the first tag, so that the text begins within. Where the second one never comes all
    is reasoning.
    """

    TAG = _BEGIN

    def __init__(self, *, opened: bool = False) -> None:
        super().__init__(self._first)
        self._opened = opened
        self._space: list[str] = []

    def _first(self, text: str, at: int) -> int:
        """Before anything but white space."""
        place = len(text) - len(text[at:].lstrip())
        self._space.append(text[at:place])
        if text.startswith(_BEGIN, place):
            self._space, self._state = [], self._begun
            return place + len(_BEGIN)
        if not _BEGIN.startswith(text[place : place + len(_BEGIN)]):
            if self._opened:
                self._state = self._thinking
            else:
                self._events.append(Said("".join(self._space)))
                self._state = self._content
            self._space = []
        return place

    def _begun(self, text: str, at: int) -> int:
        """Behind the first tag."""
        return self._skip(text, at, self._thinking)

    def _thinking(self, text: str, at: int) -> int:
        start, tag = _TAGS.search(text, at)
        body = text[at:start].rstrip()
        if body:
            self._events.append(Thought("".join(self._space) + body))
            self._space = []
        self._space.append(text[at + len(body) : start])
        if tag:
            self._space, self._state = [], self._behind
        return start + len(tag)

    def _behind(self, text: str, at: int) -> int:
        """Behind the reasoning, and before what is said."""
        return self._skip(text, at, self._content)

    def _skip(self, text: str, at: int, state: State) -> int:
        """White space goes; then comes `state`."""
        place = len(text) - len(text[at:].lstrip())
        if place < len(text):
            self._state = state
        return place

    def _content(self, text: str, at: int) -> int:
        self._events.append(Said(text[at:]))
        return len(text)

    def _end(self, held: str) -> None:
        rest = "".join(self._space) + held
        within = self._state == self._thinking or (self._state == self._first and self._opened)
        self._events.append(Thought(rest) if within else Said(rest))
