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

    OPENERS: ClassVar[tuple[str, ...]] = ()
    """Tags that may begin a call."""
    CLOSERS: ClassVar[tuple[str, ...]] = ()
    """Tags that stand behind a call; repeated ones count as one."""
    INNER: ClassVar[tuple[str, ...]] = ()
    """Other tags within a call."""
    BARE: ClassVar[str] = ""
    """Characters with which a call may begin the answer, without a tag."""

    SEPARATOR: ClassVar[str] = "\n"
    """Text between two calls, as the model writes it."""

    def __init__(self, tools: Tools, most: int | None = None, table: TagTable | None = None) -> None:
        """`most`: calls that are looked for, None for any number; `table`: which tags are tokens."""
        self.tools, self.most = tools, most
        self.table = TagTable() if table is None else table
        self.openers = tuple(map(self.table.of, self.OPENERS))
        self.closers = tuple(map(self.table.of, self.CLOSERS))

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Every tag of the notation."""
        return (*cls.OPENERS, *cls.CLOSERS, *cls.INNER)

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """Read the calls that the text begins with, and take them. False, and nothing taken, if there are none."""
        raise NotImplementedError

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Calls of these functions as tags of a grammar, each of which begins with a trigger if there are any.

        once: one call at most.
        """
        raise NotImplementedError

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Texts that begin calls of these functions in free text."""
        return [*cls.OPENERS[:1]]

    def opener_of(self, source: Source) -> str:
        """The tag that the text begins with; empty if it is none that may begin a call."""
        return next((tag for tag in self.openers if source.text.startswith(tag)), "")
