"""Calls in Python's notation, as LFM2 and OLMo 3 write them: [weather(city="Oslo", days=3), time()]."""

from __future__ import annotations

import re

from bateleur.runner.serve.parsers.arguments import ArgumentsWriter, Calls
from bateleur.runner.serve.parsers.json_calls import read_calls, read_value
from bateleur.runner.serve.parsers.source import Reader, Source, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import ToolFormat

_CALL = re.compile(r"([A-Za-z_][\w.-]{0,200})\s*\(")
_MAY_CALL = re.compile(r"[A-Za-z_][\w.-]{0,200}\s*$")
_KEYWORD = re.compile(r"([A-Za-z_]\w{0,200})\s*=(?!=)\s*")
_MAY_KEYWORD = re.compile(r"[A-Za-z_]\w{0,200}\s*=?\s*$")


class Pythonic(ToolFormat):
    """Function calls with keyword arguments between tags, or JSON objects there."""

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`."""
        start = yield from skip_space(source, len(self.opener_of(source)))
        listed = source.text.startswith("[", start)
        at = (yield from skip_space(source, start + 1)) if listed else start
        if source.text.startswith("{", at):
            found = yield from read_calls(source, start, calls)
        else:
            found = yield from _read_functions(source, at, calls)
            if found and listed:
                yield from take_tags(source, ("]",))
        if found:
            yield from take_tags(source, self.closers)
        return found


class Lfm2(Pythonic):
    """<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>, as LFM2 writes it."""

    OPENERS = ("<|tool_call_start|>",)
    CLOSERS = ("<|tool_call_end|>",)


class Olmo3(Pythonic):
    """<function_calls>, a call on each line, and </function_calls>, as OLMo 3 writes it."""

    OPENERS = ("<function_calls>",)
    CLOSERS = ("</function_calls>",)


def _read_functions(source: Source, at: int, calls: Calls) -> Reader[bool]:
    """Take calls from a position on; False, and nothing taken, if the first is none."""
    found = False
    while True:
        named = _CALL.match(source.text, at)
        if named is None:
            if source.final or not _MAY_CALL.match(source.text, at):
                return found
            yield
            continue
        if not calls.knows(named[1]):
            return found
        found = True
        source.take(named.end())
        if not (yield from _read_keywords(source, calls.begin(named[1]))):
            return True
        at = yield from skip_space(source, 0)
        if source.text.startswith((",", ";"), at):
            at = yield from skip_space(source, at + 1)


def _read_keywords(source: Source, writer: ArgumentsWriter) -> Reader[bool]:
    """Take arguments up to their bracket. False if they were cut. An argument without a name has the next one's."""
    while True:
        at = yield from skip_space(source, 0)
        if at == len(source.text):
            break
        if source.text[at] in ")]":
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


def _read_keyword(source: Source, at: int, writer: ArgumentsWriter) -> Reader[tuple[str, int]]:
    """Name of an argument and the position of its value; no name if there is none left."""
    while not source.final and _MAY_KEYWORD.match(source.text, at):
        yield
    if found := _KEYWORD.match(source.text, at):
        return found[1], found.end()
    return next((key for key in writer.properties if key not in writer.keys), ""), at
