"""Parsers for calls in Python's notation, as LFM2 and OLMo 3 write them: [weather(city="Oslo", days=3), time()]."""

import re

from bateleur.runner.serve.parsers.json_calls import MAY_KEYWORD, read_calls, read_value, skip_end_tags
from bateleur.runner.serve.parsers.source import Parse, Source, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import ArgumentsWriter, Calls, ToolFormat

_CALL = re.compile(r"([A-Za-z_][\w.-]{0,200})\s*\(")
_MAY_CALL = re.compile(r"[A-Za-z_][\w.-]{0,200}\s*$")
_KEYWORD = re.compile(r"([A-Za-z_]\w{0,200})\s*=(?!=)\s*")


class Pythonic(ToolFormat):
    """Tool calls as Python calls with keyword arguments, or as JSON objects, between tags."""

    CALL = ("{name}(", lambda schema: {"type": "python_arguments", "json_schema": schema}, ")")

    def read(self, source: Source, calls: Calls) -> Parse[bool]:
        """Parse and consume the calls at the start of the text; see `ToolFormat.read`."""
        start = yield from skip_space(source, len(self.start_tag_of(source)))
        in_list = source.text.startswith("[", start)
        at = (yield from skip_space(source, start + 1)) if in_list else start
        if source.text.startswith("{", at):
            found = yield from read_calls(source, start, calls)
        else:
            found = yield from _read_functions(source, at, calls)
            if found and in_list:
                yield from take_tags(source, ("]",))
        if found:
            yield from take_tags(source, self.end_tags)
        return found


class Lfm2(Pythonic):
    """Tool calls of LFM2: <|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>."""

    START_TAGS = ("<|tool_call_start|>",)
    END_TAGS = ("<|tool_call_end|>",)
    LIST = ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")


class Olmo3(Pythonic):
    """Tool calls of OLMo 3: <function_calls>, a call on each line, and </function_calls>."""

    START_TAGS = ("<function_calls>",)
    END_TAGS = ("</function_calls>",)
    LIST = ("<function_calls>\n", "\n", "\n</function_calls>")


def _read_functions(source: Source, at: int, calls: Calls) -> Parse[bool]:
    """Consume calls from a position on. If no allowed call begins there, return False and consume nothing."""
    found = False
    while True:
        named = _CALL.match(source.text, at)
        if named is None:
            if source.final or not _MAY_CALL.match(source.text, at):
                return found
            yield
            continue
        if not calls.may_call(named[1]):
            return found
        found = True
        source.take(named.end())
        if not (yield from _read_keywords(source, calls.begin(named[1]))):
            return True
        at = yield from skip_space(source, 0)
        if source.text.startswith((",", ";"), at):
            at = yield from skip_space(source, at + 1)


def _read_keywords(source: Source, writer: ArgumentsWriter) -> Parse[bool]:
    """Consume arguments up to `)`; commas and names may be missing. Returns False if they were truncated."""
    if names := "|".join(map(re.escape, writer.properties)):
        writer.next_key = re.compile(rf"(?<!\w)(?:{names})\s*=(?!=)")
    while True:
        at = yield from skip_space(source, 0)
        if at == len(source.text):
            break
        if source.text[at] in ")]" or (yield from skip_end_tags(source, at, writer)) > at:
            source.take(at + (source.text[at] == ")"))
            writer.close()
            return True
        if source.text[at] == ",":
            source.take(at + 1)
            continue
        key, value = yield from _read_keyword(source, at, writer)
        if not key or value == len(source.text):
            break
        source.take(value)
        writer.key(key)
        if not (yield from read_value(source, writer, key)):
            return False
    if source.final:
        source.take(len(source.text))
    if not (source.final and source.cut):
        writer.close()
    return not source.final


def _read_keyword(source: Source, at: int, writer: ArgumentsWriter) -> Parse[tuple[str, int]]:
    """Return an argument's name and the position of its value.

    A value without a name gets the name of the first parameter of the schema that has no value yet. The name is empty
    if all parameters have values, or if the text ends within a name.
    """
    while MAY_KEYWORD.match(source.text, at):
        if source.final:  # truncated
            return "", at
        yield
    if found := _KEYWORD.match(source.text, at):
        return found[1], found.end()
    return next((key for key in writer.properties if key not in writer.keys), ""), at
