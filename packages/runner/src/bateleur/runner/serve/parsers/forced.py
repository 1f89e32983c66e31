"""Calls that a body forced: the text then follows a schema of ours, whatever the model would write by itself."""

from __future__ import annotations

from bateleur.runner.openai.tools import Tools
from bateleur.runner.serve.parsers.events import Argued, Called, Event
from bateleur.runner.serve.parsers.hermes import Hermes


class NamedCall:
    """All of the text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; what is certain by now."""
        if not text:
            return []
        events: list[Event] = [Argued(text)] if self._begun else [Called(self._name), Argued(text)]
        self._begun = True
        return events

    def finish(self) -> list[Event]:
        """Nothing more will come."""
        return []


class ListedCalls(Hermes):
    """The text is a JSON list of calls, objects as those of `Hermes`."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._state = self._content

    def _content(self, text: str, at: int) -> int:
        """Between objects."""
        if text[at] == "{":
            self._opened("{")
            return at
        if text[at] not in "[,] \t\r\n":
            self._say(text[at])
        return at + 1
