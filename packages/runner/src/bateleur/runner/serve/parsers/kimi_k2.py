"""Parser for calls as Kimi K2 and Kimi Linear write them:

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>
"""

import re

from bateleur.runner.serve.parsers.json_calls import read_object
from bateleur.runner.serve.parsers.source import Parse, Source, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import Calls, ToolFormat
from bateleur.runner.structured.formats import const, json_of, pattern, sequence

_SECTION, _CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
_ARGUMENTS, _END, _END_SECTION = ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")
_LONGEST = 300
"""Maximum characters of a call id."""
_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*")


class KimiK2(ToolFormat):
    """Tool calls of Kimi K2, with ids from the model such as functions.weather:0."""

    START_TAGS = (_SECTION, _CALL)
    END_TAGS = (_END, _END_SECTION)
    INNER_TAGS = (_ARGUMENTS,)
    CALL = (
        f"{_CALL}functions.{{name}}:",
        lambda schema: sequence(pattern("[0-9]{1,3}"), const(_ARGUMENTS), json_of(schema)),
        _END,
    )
    LIST = (_SECTION, "", _END_SECTION)

    def read(self, source: Source, calls: Calls) -> Parse[bool]:
        """Parse and consume the calls at the start of the text; see `ToolFormat.read`."""
        section, call, begin = (self.table.marker(tag) for tag in (_SECTION, _CALL, _ARGUMENTS))
        at, found = 0, False
        while True:
            for tag in (section, call):
                at = yield from skip_space(source, at)
                while not source.final and tag.startswith(source.text[at:]) and tag != source.text[at:]:
                    yield
                at += len(tag) * source.text.startswith(tag, at)
            if not source.text[:at].strip():
                return found
            while (
                not source.final and begin not in source.text[at : at + _LONGEST] and len(source.text) < at + _LONGEST
            ):
                yield
            head, tag, _ = source.text[at : at + _LONGEST].partition(begin)
            named = _ID.fullmatch(head)
            if not tag or named is None or not calls.may_call(named[2]):
                return found
            source.take(at + len(head) + len(begin))
            writer, found = calls.begin(named[2], named[1] if ":" in named[1] else ""), True
            source.take((yield from skip_space(source, 0)))
            if source.text.startswith("{"):
                yield from read_object(source, writer)
            elif not (source.final and source.cut):
                writer.close()
            yield from take_tags(source, self.end_tags)
            at = 0
