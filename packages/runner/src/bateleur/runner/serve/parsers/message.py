"""The text of a model as the message of a chat, at once or as deltas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bateleur.runner.serve.parsers.events import Argued, Called, Event, Parser, Said, Thought


class Message:
    """Reads the text of one choice, and tells it in OpenAI's form.

    reasoning: takes what the model thinks out of the text; calls: takes calls out of what is left. make_id: names for
    calls.
    """

    def __init__(
        self, *, reasoning: Parser | None = None, calls: Parser | None = None, make_id: Callable[[], str]
    ) -> None:
        self._reasoning, self._calls, self._make_id = reasoning, calls, make_id
        self.num_calls = 0

    def feed(self, text: str) -> dict[str, Any]:
        """What a further piece of text adds to the message, as the `delta` of a chunk; empty if nothing yet."""
        found: list[Event] = [Said(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._delta(self._called(found))

    def end(self, text: str = "") -> dict[str, Any]:
        """What the last piece adds, and the end of the text."""
        found: list[Event] = [Said(text)] if self._reasoning is None else self._reasoning.feed(text)
        found = self._called(found + ([] if self._reasoning is None else self._reasoning.finish()))
        return self._delta(found + ([] if self._calls is None else self._calls.finish()))

    def whole(self, text: str) -> dict[str, Any]:
        """All of a message, but for its role; this reads one text."""
        delta = self.end(text)
        message = {"content": None if "tool_calls" in delta else "", **delta}
        for call in message.get("tool_calls", ()):
            del call["index"]
        return message

    def _called(self, events: list[Event]) -> list[Event]:
        """The same, with the calls in what is said."""
        if self._calls is None:
            return events
        found: list[Event] = []
        for each in events:
            found += self._calls.feed(each.text) if isinstance(each, Said) else [each]
        return found

    def _delta(self, events: list[Event]) -> dict[str, Any]:
        said: list[str] = []
        thought: list[str] = []
        calls: list[dict[str, Any]] = []
        for each in events:
            match each:
                case Said(text):
                    said.append(text)
                case Thought(text):
                    thought.append(text)
                case Called(name):
                    function: dict[str, Any] = {"name": name, "arguments": ""}
                    named = {"id": self._make_id(), "type": "function", "function": function}
                    calls.append({"index": self.num_calls, **named})
                    self.num_calls += 1
                case Argued(text):
                    if not calls:
                        calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        delta: dict[str, Any] = {}
        if reasoning := "".join(thought):
            delta = {"reasoning": reasoning, "reasoning_content": reasoning}  # both names are in use
        if content := "".join(said):
            delta["content"] = content
        return delta | ({"tool_calls": calls} if calls else {})
