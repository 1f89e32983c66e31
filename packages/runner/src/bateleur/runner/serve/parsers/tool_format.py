"""What every notation of tool calls has: the tags that begin and end a call, and a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from bateleur.runner.serve.openai.tools import Tools
from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.source import Reader, Source, TagTable
from bateleur.runner.structured.formats import Format


class Function(NamedTuple):
    """A tool that may be called, and what its arguments must be."""

    name: str
    schema: Mapping[str, Any]


class ToolFormat:
    """Reads the calls of one answer in one notation."""

    START_TAGS: ClassVar[tuple[str, ...]] = ()
    """Tags that may begin a call."""
    END_TAGS: ClassVar[tuple[str, ...]] = ()
    """Tags that stand behind a call; repeated ones count as one."""
    INNER_TAGS: ClassVar[tuple[str, ...]] = ()
    """Other tags within a call."""
    BARE_STARTS: ClassVar[str] = ""
    """Characters with which a call may begin the answer, without a tag."""

    SEPARATOR: ClassVar[str] = "\n"
    """Text between two calls, as the model writes it."""

    def __init__(self, tools: Tools, max_calls: int | None = None, table: TagTable | None = None) -> None:
        """`max_calls`: calls that are looked for, None for any number; `table`: which tags are tokens."""
        self.tools, self.max_calls = tools, max_calls
        self.table = TagTable() if table is None else table
        self.start_tags = tuple(map(self.table.marker, self.START_TAGS))
        self.end_tags = tuple(map(self.table.marker, self.END_TAGS))

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Every tag of the notation."""
        return (*cls.START_TAGS, *cls.END_TAGS, *cls.INNER_TAGS)

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """Read the calls that the text begins with, and take them. False, and nothing taken, if there are none."""
        raise NotImplementedError

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Calls of these functions as tags of a grammar, each of which begins with a trigger if there are any.

        once: one call at max_calls.
        """
        raise NotImplementedError

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Texts that begin calls of these functions in free text."""
        return [*cls.START_TAGS[:1]]

    def start_tag_of(self, source: Source) -> str:
        """The tag that the text begins with; empty if it is none that may begin a call."""
        return next((tag for tag in self.start_tags if source.text.startswith(tag)), "")
