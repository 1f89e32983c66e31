"""Tool call formats, and the calls that a parser finds in an answer."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

from bateleur.runner.serve.openai.tools import Tools
from bateleur.runner.serve.parsers.events import Arguments, Content, Event, ToolCall
from bateleur.runner.serve.parsers.source import Parse, Search, Source, TagTable
from bateleur.runner.serve.parsers.values import as_string, types_of
from bateleur.runner.structured.formats import Format, listed, tagged

NO_KEY = re.compile("(?!)")
"""Matches nothing: keys follow commas."""


class Function(NamedTuple):
    """A function that the model may call, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


class ToolFormat:
    """Base class of tool call formats. Parses the calls of an answer, and builds their grammar.

    START_TAGS, END_TAGS, INNER_TAGS: tags that can start a call, that end it, and other tags inside of it.
    BARE_STARTS: characters that start a call without a tag, at the start of the answer. SEPARATOR: text between two
    calls. CALL: grammar of one call: (text before the arguments, function from their schema to their grammar, text
    after the arguments); {name} in the first text stands for the tool's name. LIST: (text before, between, after)
    several calls, if one pair of tags encloses them; else None.
    """

    START_TAGS: ClassVar[tuple[str, ...]] = ()
    """Tags that can start a call."""
    END_TAGS: ClassVar[tuple[str, ...]] = ()
    """Tags that end a call; repetitions are ignored."""
    INNER_TAGS: ClassVar[tuple[str, ...]] = ()
    """Other tags inside of a call."""
    BARE_STARTS: ClassVar[str] = ""
    """Characters that start a call without a tag, at the start of the answer."""
    SEPARATOR: ClassVar[str] = "\n"
    """Text between two calls."""
    CALL: ClassVar[tuple[str, Callable[[Mapping[str, Any]], Format], str]]
    """Grammar of a call: text with {name} before the arguments, format of the arguments by their schema, text after."""
    LIST: ClassVar[tuple[str, str, str] | None] = None
    """Text before, between and after calls, if one pair of tags encloses several calls."""

    def __init__(self, tools: Tools, max_calls: int | None = None, table: TagTable | None = None) -> None:
        """tools: of the request. max_calls: maximum per answer; None: no limit. table: tags that are single tokens."""
        self.tools, self.max_calls = tools, max_calls
        self.table = TagTable() if table is None else table
        self.start_tags = tuple(map(self.table.marker, self.START_TAGS))
        self.end_tags = tuple(map(self.table.marker, self.END_TAGS))

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Return all tags of the format."""
        return (*cls.START_TAGS, *cls.END_TAGS, *cls.INNER_TAGS)

    def read(self, source: Source, calls: "Calls") -> Parse[bool]:
        """Parse and consume the calls at the start of the text. If there are none, return False and consume nothing."""
        raise NotImplementedError

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Return grammars (`tagged`) for calls of these functions. once: allow only one call in an answer.

        Each grammar starts with one of `triggers`, unless the format has BARE_STARTS.
        """
        begin, arguments, end = cls.CALL
        calls = [tagged(_with_name(begin, each.name), arguments(each.schema), end) for each in functions]
        if cls.LIST is None:
            return calls
        before, between, after = cls.LIST
        return [tagged(before, listed(calls, between, once=once), after)]

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Return the texts that start a call within free text."""
        return [*cls.START_TAGS[:1]]

    def start_tag_of(self, source: Source) -> str:
        """Return the start tag at the start of the text, or ""."""
        return next((tag for tag in self.start_tags if source.text.startswith(tag)), "")


def _with_name(begin: str, name: str) -> str:
    """Return the text with the name in place of {name}, and as JSON in place of "{name}"."""
    if '"{name}"' in begin:
        return begin.replace('"{name}"', json.dumps(name))
    return begin.replace("{name}", name)


class Calls:
    """The available tools, and the calls found in one answer."""

    def __init__(
        self, tool_format: ToolFormat, emit: Callable[[Event], None], make_id: Callable[[], str] | None = None
    ) -> None:
        """emit: receives the events. make_id: creates ids for calls without an id from the model."""
        functions = [tool["function"] for tool in tool_format.tools]
        self._schemas: dict[str, Mapping[str, Any]] = {each["name"]: each.get("parameters") or {} for each in functions}
        self._max_calls, self._table = tool_format.max_calls, tool_format.table
        self._end_tags = Search(tool_format.end_tags)
        self._emit, self._make_id = emit, make_id or (lambda: f"call_{uuid4().hex[:24]}")
        self._num_calls = 0

    @property
    def names(self) -> list[str]:
        """Names of the available tools."""
        return list(self._schemas)

    def may_call(self, name: str) -> bool:
        """Return whether the tool exists and the limit of calls is not reached."""
        return name in self._schemas and (self._max_calls is None or self._num_calls < self._max_calls)

    def begin(self, name: str, call_id: str = "") -> "ArgumentsWriter":
        """Begin a call of a tool. Returns the writer of its arguments."""
        index = self._num_calls
        self._num_calls += 1
        self._emit(ToolCall(index, call_id or self._make_id(), name))

        def write(text: str) -> None:
            self._emit(Arguments(index, self._table.unmark(text)))

        return ArgumentsWriter(write, self._schemas[name], self._end_tags)

    def add_content(self, text: str) -> None:
        """Emit text inside a call, but outside of its parameters, as content."""
        self._emit(Content(self._table.unmark(text)))


class ArgumentsWriter:
    """Incremental writer of the arguments of one call, as JSON.

    `write` adds JSON text. `end_tags` searches for the tags that end the call.
    """

    def __init__(self, write: Callable[[str], None], schema: Mapping[str, Any], end_tags: Search) -> None:
        self.write, self._schema, self.end_tags = write, schema, end_tags
        self.keys: list[str] = []
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

    def text(self, text: str) -> None:
        """Write a part of a string value, without quotes around it."""
        self.write(as_string(text)[1:-1])

    def close(self, before: str = "") -> None:
        """End the JSON object. before: white space before its closing brace."""
        self.write((before if self.keys else "{") + "}")
