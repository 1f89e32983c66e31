"""Parsers for calls between <tool_call> and </tool_call>: JSON objects, or functions in Qwen3-Coder's notation.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>

Hermes models, Qwen 2.5 and 3, Granite 4 and Falcon-H1 write JSON.
"""

from collections.abc import Sequence
from typing import ClassVar

from bateleur.runner.serve.parsers.functions import FUNCTION, FunctionParser
from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import IncrementalParse, Source, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import Calls, Function, ToolFormat
from bateleur.runner.structured.formats import Format, json_of, tagged


class Hermes(ToolFormat):
    """Tool calls of Hermes: JSON objects or functions between <tool_call> tags."""

    START_TAGS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    END_TAGS = ("</tool_call>",)
    CALL = ('<tool_call>\n{"name": "{name}", "arguments": ', json_of, "}\n</tool_call>")

    def read(self, source: Source, calls: Calls) -> IncrementalParse[bool]:
        """Parse and consume the calls at the start of the text; see `ToolFormat.read`."""
        start_tag = self.start_tag_of(source)
        bare = start_tag == FUNCTION
        at = 0 if bare else (yield from skip_space(source, len(start_tag)))
        if source.text.startswith(("[", "{"), at):
            found = yield from read_calls(source, at, calls)
        else:
            found = yield from FunctionParser(source, calls, self.table, bare=bare).read(at)
        if found:
            yield from take_tags(source, self.end_tags)
        return found


class Qwen3Coder(Hermes):
    """Tool calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: as `Hermes`, and functions without <tool_call> tags."""

    START_TAGS = ("<tool_call>", FUNCTION)
    CALL = (
        f"{FUNCTION}{{name}}>\n",
        lambda schema: {"type": "qwen_xml_parameter", "json_schema": schema},
        "</function>",
    )

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Return grammars of calls, each between <tool_call> tags and without them; see `ToolFormat.call_tags`."""
        bare = super().call_tags(functions, once=once)
        begin, end = "<tool_call>\n", "\n</tool_call>"
        return [tagged(begin + each["begin"], each["content"], each["end"] + end) for each in bare] + bare

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Return the texts that start a call. Text may contain <function=...> with other names."""
        return ["<tool_call>", *(f"{FUNCTION}{each.name}>" for each in functions)]


class Granite(Hermes):
    """Tool calls of Granite: as `Hermes`, or a list of JSON objects after <|tool_call|> (Granite 3)."""

    START_TAGS = ("<|tool_call|>", "<tool_call>")
    CALL = ('{"name": "{name}", "arguments": ', json_of, "}")
    LIST = ("<|tool_call|>[", ", ", "]")
