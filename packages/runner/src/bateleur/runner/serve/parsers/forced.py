"""Calls that a body forced: the grammar of the text is then ours, whatever the model would write by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.openai.tools import Named
from bateleur.runner.serve.parsers.events import Argued, Called, Event, Tools
from bateleur.runner.serve.parsers.hermes import Hermes


def schema_of(choice: Named | str, tools: Tools, *, parallel: bool = True) -> dict[str, Any]:
    """What the text must be: the arguments of the tool that is named, or a list of calls."""
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Named):
        return next(_arguments(each) for each in functions if each["name"] == choice.name)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": _arguments(each)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if parallel else {"maxItems": 1})


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object", "properties": {}})


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
