"""Tool calls found by a parser. Their arguments are written as valid JSON with the types of the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from bateleur.runner.serve.openai.tools import Tools
from bateleur.runner.serve.parsers.events import Arguments, Content, Event, ToolCall
from bateleur.runner.serve.parsers.source import Search, TagTable
from bateleur.runner.serve.parsers.values import as_json, as_string, literal_as_json, types_of

NO_KEY = re.compile("(?!)")
"""Matches nothing: keys follow commas."""


def new_call_id() -> str:
    """Create an id for a call without an id from the model."""
    return f"call_{uuid4().hex[:24]}"


class ArgumentsWriter:
    """Incremental writer of the arguments of one call, as a JSON object."""

    def __init__(self, write: Callable[[str], None], schema: Mapping[str, Any], end_tags: Search) -> None:
        """write: receives pieces of JSON text. schema: parameters of the tool. end_tags: tags that end the call."""
        self.write, self._schema = write, schema
        self.end_tags = end_tags
        """Tags that end a call."""
        self.keys: list[str] = []
        """Keys written so far."""
        self.next_key = NO_KEY
        """Pattern of a key that ends the value before it, without a comma."""

    @property
    def properties(self) -> list[str]:
        """Names of the parameters, in the order of the schema."""
        properties = self._schema.get("properties")
        return list(properties) if isinstance(properties, Mapping) else []

    def types(self, key: str) -> frozenset[str]:
        """Return the JSON types of the key's value; empty if the schema does not define them."""
        return types_of(self._schema, key)

    def key(self, key: str, *, before: str = "", colon: str = ": ") -> None:
        """Write a key. before: replaces the ", " or "{" before it. colon: text after it."""
        self.write(before or (", " if self.keys else "{"))
        self.write(as_string(key) + colon)
        self.keys.append(key)

    def begin_text(self) -> None:
        """Begin a string value, which `text` writes and `end_text` ends."""
        self.write('"')

    def text(self, text: str) -> None:
        """Write a part of a string value."""
        self.write(as_string(text)[1:-1])

    def end_text(self) -> None:
        """End a string value."""
        self.write('"')

    def bare(self, key: str, text: str) -> None:
        """Write a value from unquoted text, converted to the type of the key."""
        self.write(as_json(text, self.types(key) or frozenset(("string",))))

    def literal(self, key: str, text: str) -> None:
        """Write a value from a JSON or Python literal, converted to the type of the key."""
        self.write(literal_as_json(text, self.types(key)))

    def close(self, before: str = "") -> None:
        """End the object. before: white space before its closing brace."""
        self.write((before if self.keys else "{") + "}")


class Calls:
    """The available tools, and the calls found in one answer."""

    def __init__(
        self,
        tools: Tools,
        max_calls: int | None,
        table: TagTable,
        emit: Callable[[Event], None],
        make_id: Callable[[], str] = new_call_id,
        end_tags: Sequence[str] = (),
    ) -> None:
        """max_calls: None for no limit. emit: receives the events. end_tags: tags that end a call."""
        self._end_tags = Search(end_tags)
        functions = [tool["function"] for tool in tools]
        self._schemas: dict[str, Mapping[str, Any]] = {each["name"]: each.get("parameters") or {} for each in functions}
        self._max_calls, self._table, self._emit, self._make_id = max_calls, table, emit, make_id
        self.num_calls = 0

    @property
    def names(self) -> list[str]:
        """Names of the available tools."""
        return list(self._schemas)

    def may_call(self, name: str) -> bool:
        """Return whether the tool exists and the limit of calls is not reached."""
        return name in self._schemas and (self._max_calls is None or self.num_calls < self._max_calls)

    def begin(self, name: str, call_id: str = "") -> ArgumentsWriter:
        """Begin a call of a tool. Returns the writer of its arguments."""
        index = self.num_calls
        self.num_calls += 1
        self._emit(ToolCall(index, call_id or self._make_id(), name))

        def write(text: str) -> None:
            self._emit(Arguments(index, self._table.unmark(text)))

        return ArgumentsWriter(write, self._schemas[name], self._end_tags)

    def add_content(self, text: str) -> None:
        """Emit text between the parts of a call as content."""
        self._emit(Content(self._table.unmark(text)))
