"""Finding calls of tools in text: what all forms of them share."""

from __future__ import annotations

from bateleur.runner.serve.parsers.events import Argued, Called, Said
from bateleur.runner.serve.parsers.machine import Machine, Tags


class Scanner(Machine):
    """A parser of calls among other text. What derives from it is the states of a call.

    White space before a call, and after one at the end, is part of the wrapping. most: that many calls are looked for.
    """

    OPENING: tuple[str, ...] = ()
    """Tags that may begin a call."""
    CLOSING = "</tool_call>"
    """What stands after a call."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__(self._content)
        self._space: list[str] = []
        """At the end of the content; said with what follows."""
        self._raw: list[str] = []
        """Of a call that has not been told: all that it may turn out to be content instead."""
        self._left = most
        self._behind_call = self._open = False
        """Nothing was said since a call; its closing tag has not come."""
        self._tags = Tags(*self.OPENING, self.CLOSING)

    def _end(self, held: str) -> None:
        self._end_state(held)
        if not self._behind_call:
            self._events.append(Said("".join(self._space)))
        self._space = []

    def _end_state(self, held: str) -> None:
        """The text ends with `held`, in the midst of whatever."""
        self._say("".join(self._raw) + held)
        self._raw = []

    def _content(self, text: str, at: int) -> int:
        """Not within a call."""
        if self._left == 0 and not self._open:
            self._say(text[at:])
            return len(text)
        start, tag = self._tags.search(text, at)
        self._say(text[at:start])
        if tag == self.CLOSING and self._open:
            self._closed()
        elif tag in self.OPENING and self._left != 0:
            self._raw = [tag]
            self._opened(tag)
        else:
            self._say(tag)
        return start + len(tag)

    def _opened(self, tag: str) -> None:
        """A call may begin here."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        """Content; white space at its end waits for what comes next."""
        body = text.rstrip()
        if body:
            self._events.append(Said("".join(self._space) + body))
            self._space, self._behind_call = [], False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _closed(self) -> None:
        """The tag that stands after a call; what is left of white space before it belongs to it."""
        self._open = False
        if self._behind_call:
            self._space = []

    def _call(self, name: str) -> None:
        """A call it is."""
        self._events.append(Called(name))
        self._space, self._raw, self._behind_call, self._open = [], [], True, True
        if self._left is not None:
            self._left -= 1

    def _argue(self, text: str) -> None:
        self._events.append(Argued(text))

    def _no_call(self) -> None:
        """It was content all the while."""
        self._say("".join(self._raw))
        self._raw, self._state = [], self._content
