"""Parsers for calls between <tool_call> and </tool_call>: JSON objects, or functions in Qwen3-Coder's notation.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>

Hermes models, Qwen 2.5 and 3, Granite 4 and Falcon-H1 write JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.functions import FUNCTION, read_functions
from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import IncrementalParse, Source, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.structured.formats import Format, json_of, listed, tagged


class Hermes(ToolFormat):
    """Tool calls of Hermes: JSON objects or functions between <tool_call> tags."""

    START_TAGS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    END_TAGS = ("</tool_call>",)

    def read(self, source: Source, calls: Calls) -> IncrementalParse[bool]:
        """Parse and consume the calls at the start of the text; see `ToolFormat.read`."""
        start_tag = self.start_tag_of(source)
        bare = start_tag == FUNCTION
        at = 0 if bare else (yield from skip_space(source, len(start_tag)))
        if source.text.startswith(("[", "{"), at):
            found = yield from read_calls(source, at, calls)
        else:
            found = yield from read_functions(source, at, calls, self.table, bare=bare)
        if found:
            yield from take_tags(source, self.end_tags)
        return found

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Build the grammars of calls of these functions; see `ToolFormat.call_tags`."""
        return [
            tagged(
                f'<tool_call>\n{{"name": {json.dumps(each.name)}, "arguments": ',
                json_of(each.schema),
                "}\n</tool_call>",
            )
            for each in functions
        ]


class Qwen3Coder(Hermes):
    """Tool calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: as `Hermes`, and functions without <tool_call> tags."""

    START_TAGS = ("<tool_call>", FUNCTION)

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Build the grammars of calls of these functions; see `ToolFormat.call_tags`."""
        bare = [
            tagged(
                f"{FUNCTION}{each.name}>\n", {"type": "qwen_xml_parameter", "json_schema": each.schema}, "</function>"
            )
            for each in functions
        ]
        begin, end = "<tool_call>\n", "\n</tool_call>"
        return [tagged(begin + each["begin"], each["content"], each["end"] + end) for each in bare] + bare

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Return texts that start a call in free text.

        Each <function=...> has the name of an available function, so that text may contain other tags of this form.
        """
        return ["<tool_call>", *(f"{FUNCTION}{each.name}>" for each in functions)]


class Granite(Hermes):
    """Tool calls of Granite: as `Hermes`, or a list of JSON objects after <|tool_call|> (Granite 3)."""

    START_TAGS = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Build the grammars of calls of these functions; see `ToolFormat.call_tags`."""
        calls = [
            tagged(f'{{"name": {json.dumps(each.name)}, "arguments": ', json_of(each.schema), "}") for each in functions
        ]
        return [tagged("<|tool_call|>[", listed(calls, ", ", once=once), "]")]
