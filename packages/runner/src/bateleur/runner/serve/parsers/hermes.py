"""Calls between <tool_call> and </tool_call>: JSON objects, or functions as `qwen3_coder` has them.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>

Hermes models, Qwen 2.5 and 3, Granite 4 and Falcon-H1 write JSON.
"""

from __future__ import annotations

from typing import ClassVar

from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.functions import FUNCTION, read_functions
from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import Reader, Source, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import ToolFormat


class Hermes(ToolFormat):
    """JSON objects, or functions, between tags."""

    OPENERS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    CLOSERS = ("</tool_call>",)

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`."""
        opener = self.opener_of(source)
        bare = opener == FUNCTION
        at = 0 if bare else (yield from skip_space(source, len(opener)))
        if source.text.startswith(("[", "{"), at):
            found = yield from read_calls(source, at, calls)
        else:
            found = yield from read_functions(source, at, calls, self.table, bare=bare)
        if found:
            yield from take_tags(source, self.closers)
        return found


class Qwen3Coder(Hermes):
    """The same, and functions without the tags around them."""

    OPENERS = ("<tool_call>", FUNCTION)


class Granite(Hermes):
    """The same, or a list of JSON objects behind <|tool_call|>, as Granite 3 writes it."""

    OPENERS = ("<|tool_call|>", "<tool_call>")
