"""Interface of tool call formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from bateleur.runner.serve.openai.tools import Tools
from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.source import IncrementalParse, Source, TagTable
from bateleur.runner.structured.formats import Format


class Function(NamedTuple):
    """A function that the model may call, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


class ToolFormat:
    """Base class of tool call formats: parses the calls of an answer, and builds their grammar."""

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

    def __init__(self, tools: Tools, max_calls: int | None = None, table: TagTable | None = None) -> None:
        """max_calls: None for no limit. table: tags that are single tokens."""
        self.tools, self.max_calls = tools, max_calls
        self.table = TagTable() if table is None else table
        self.start_tags = tuple(map(self.table.marker, self.START_TAGS))
        self.end_tags = tuple(map(self.table.marker, self.END_TAGS))

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Return all tags of the format."""
        return (*cls.START_TAGS, *cls.END_TAGS, *cls.INNER_TAGS)

    def read(self, source: Source, calls: Calls) -> IncrementalParse[bool]:
        """Parse and consume the calls at the start of the text. Returns False, and consumes nothing, without calls."""
        raise NotImplementedError

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Return grammars of calls of these functions, each in the form of a structural tag's `tag`.

        Each begins with one of `triggers`, if there are any. once: allow only one call in an answer.
        """
        raise NotImplementedError

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Return the texts that start a call within free text."""
        return [*cls.START_TAGS[:1]]

    def start_tag_of(self, source: Source) -> str:
        """Return the start tag at the start of the text, or ""."""
        return next((tag for tag in self.start_tags if source.text.startswith(tag)), "")
