"""Calls that are JSON objects: {"name": ..., "arguments": {...}}, or a list of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from bateleur.runner.serve.parsers.arguments import ArgumentsWriter, Calls
from bateleur.runner.serve.parsers.source import Reader, Source, skip_space
from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.serve.parsers.values import unescaped
from bateleur.runner.structured.formats import Format, json_of, tagged

_ARGUMENTS = ("arguments", "parameters", "args", "input")
_NAMES = ("name", "function")
_MEMBERS = (*_NAMES, "type", "id", "index", *_ARGUMENTS)
"""Members of a call. An object that begins with another one is no call."""
_QUOTES = "\"'"
_PAIRS = {"[": "]", "{": "}", "(": ")"}
_PLAIN = re.compile(r"[^\"'\[\](){},<\ud800-\udfff]+")
"""What a value holds outside of strings and brackets: no tag, and no character that stands for one."""
_HEX = "[0-9a-fA-F]"
_HIGH = f"[dD][89abAB]{_HEX}{_HEX}"
"""Digits of the first half of a surrogate pair."""
_ESCAPE = "|".join(
    (
        r"\\[^u]",
        rf"\\u{_HIGH}(?:\\u{_HEX}{{4}}|(?=[^\\]|\\[^u]))",
        rf"\\u(?!{_HIGH}){_HEX}{{4}}",
        rf"\\u(?={_HEX}{{0,3}}[^0-9a-fA-F])",
    )
)
"""An escape that is whole, whatever follows."""
_IN_STRING = {quote: re.compile(rf"(?:[^{quote}\\]|{_ESCAPE})+", re.DOTALL) for quote in _QUOTES}
_IN_STRING |= {
    quote * 3: re.compile(rf"(?:[^{quote}\\]|{_ESCAPE}|{quote}{{1,2}}(?=[^{quote}]))+", re.DOTALL)
    for quote in _QUOTES
}
_TAG = re.compile("[<\ud800-\udfff]")
_ENDS_KEY, _ENDS_VALUE = re.compile(r"[:,}\])]"), re.compile(r"[,}\])]")
"""What follows a quote that ends a string."""
_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")


def read_calls(source: Source, at: int, calls: Calls) -> Reader[bool]:
    """Read an object with a call, several of them, or a list of them, from a position on.

    They are taken. If the first is no call, nothing is taken and the result is False.
    """
    found = False
    at = yield from skip_space(source, at)
    listed = source.text[at : at + 1] == "["
    if listed:
        at = yield from skip_space(source, at + 1)
    while source.text[at : at + 1] == "{":
        if not (yield from _read_call(source, at, calls)):
            return found
        found = True
        at = yield from skip_space(source, 0)
        if source.text[at : at + 1] in (",", ";"):
            at = yield from skip_space(source, at + 1)
    if listed and found and source.text[at : at + 1] == "]":
        source.take(at + 1)
    return found


def _read_call(source: Source, at: int, calls: Calls) -> Reader[bool]:
    """Take one call; False, and nothing taken, if it is none."""
    name, arguments = "", ""
    member = yield from _next_member(source, at + 1)
    while member.key is not None:
        key, at = member.key, member.value
        if not name and key not in _MEMBERS:
            return False
        if name and key in _ARGUMENTS and source.text.startswith("{", at):
            source.take(at)
            yield from read_object(source, calls.begin(name))
            yield from _skip_members(source)
            return True
        end = yield from value_end(source, at)
        if key in _NAMES:
            name = _as_text(source.text[at:end])
            if not calls.may_call(name):
                return False
        elif key in _ARGUMENTS:
            arguments = source.text[at:end]
        member = yield from _next_member(source, end)
    whole = _as_object(arguments)
    if not name or not whole:
        return False
    ended = member.value > member.start
    source.take(member.value)
    writer = calls.begin(name)
    if ended or arguments or not source.cut:
        for _ in read_object(Source(whole, final=True), writer):
            raise AssertionError("a reader waits although nothing more will come")
    return True


class _Member(NamedTuple):
    """A member of an object; without a key the place where the members end."""

    key: str | None
    start: int
    """Position of the key, of what ends the object, or of the end of the text."""
    end: int
    """Position behind the key."""
    value: int
    """Position of the value, or behind the brace that ends the object."""


def _next_member(source: Source, at: int) -> Reader[_Member]:
    """The member that stands at a position, behind white space and commas."""
    at = yield from skip_space(source, at)
    while source.text.startswith(",", at):
        at = yield from skip_space(source, at + 1)
    key, end = yield from _read_key(source, at)
    if key is None:
        return _Member(None, at, at, at + source.text.startswith("}", at))
    colon = yield from skip_space(source, end)
    value = (yield from skip_space(source, colon + 1)) if source.text.startswith((":", "="), colon) else colon
    last = len(source.text)
    if value >= last:
        return _Member(None, last, last, last)
    return _Member(key, at, end, value) if value > colon else _Member(None, at, at, at)


def _as_text(value: str) -> str:
    """The text that a value is; empty for everything else."""
    value = value.strip()
    return unescaped(value[1:-1]) if len(value) > 1 and value[0] in _QUOTES and value[-1] == value[0] else ""


def _as_object(value: str) -> str:
    """Arguments as an object: one, one that was written as a string, or none; empty for everything else."""
    value = value.strip()
    if value[:1] and value[0] in _QUOTES:
        value = _as_text(value).strip()
    if value in ("", "null", "None"):
        return "{}"
    return value if value.startswith("{") else ""


def _skip_members(source: Source) -> Reader[None]:
    """Take the rest of an object behind its arguments: other members, and its brace."""
    while True:
        at = yield from skip_space(source, 0)
        first = source.text[at : at + 1]
        if first == "}":
            source.take(at + 1)
            return
        if first != ",":
            return
        at = yield from value_end(source, at + 1)
        if source.text[at : at + 1] not in ("}", ","):
            return
        source.take(at)


def read_object(source: Source, writer: ArgumentsWriter) -> Reader[None]:
    """Take an object, which the text begins with, and write it as the arguments of a call.

    An object that the model left open is closed. One that was cut stays as it is.
    """
    before = source.take(1)
    while True:
        member = yield from _next_member(source, 0)
        if member.key is None:
            break
        lead = before + source.text[: member.start]
        colon = source.text[member.end : member.value].replace("=", ":")
        source.take(member.value)
        usual = lead.strip() == ("," if writer.keys else "{")
        writer.key(member.key, before=lead if usual else "", colon=colon)
        before = ""
        if not (yield from read_value(source, writer, member.key)):
            return
    if member.value > member.start:
        writer.close(source.text[: member.start].replace(",", ""))
        source.take(member.value)
        return
    if not (source.cut and source.final):
        writer.close()
    if member.start == len(source.text):
        source.take(member.start)


def _read_key(source: Source, at: int) -> Reader[tuple[str | None, int]]:
    """A key with or without quotes, and where it ends; None if there is none."""
    first = source.text[at : at + 1]
    if first and first in _QUOTES:
        end = yield from _string_end(source, at + 1, first, _ENDS_KEY)
        return unescaped(source.text[at + 1 : end]), end + 1
    while (found := _KEY.match(source.text, at)) is not None:
        if found.end() < len(source.text) or source.final:
            return found[0], found.end()
        yield
    return None, at


def read_value(source: Source, writer: ArgumentsWriter, key: str) -> Reader[bool]:
    """Take the value of a key, which the text begins with. False if it was cut."""
    first, types = source.text[0], writer.types(key)
    if first in _QUOTES and (not types or "string" in types):
        return (yield from _read_string(source, writer))
    end = yield from value_end(source, 0)
    if end == len(source.text) and source.cut:
        source.take(end)
        return False
    writer.literal(key, source.take(end).strip())
    return True


def _read_string(source: Source, writer: ArgumentsWriter) -> Reader[bool]:
    """Take a string in quotes, and write it as it comes. False if it was cut.

    A quote ends the string only if a comma, a bracket, or the end of the call or of the text follows. Without such a
    quote the end of the call ends it, if nothing else follows.
    """
    quote = source.take(1)
    while source.text in ("", quote) and not source.final:
        yield
    if source.text.startswith(quote * 2):  # three quotes of Python
        quote += source.take(2)
    writer.begin_text()
    while True:
        start, tag = writer.end_tags.first(source)
        if found := _IN_STRING[quote].match(source.text, 0, start):
            writer.text(unescaped(source.take(found.end())))
        elif source.text.startswith(quote):
            at = yield from skip_space(source, len(quote))
            behind = yield from skip_end_tags(source, at, writer)
            if behind == len(source.text) or (_ENDS_VALUE if at == behind else _TAG).match(
                source.text, behind
            ):
                source.take(len(quote))
                writer.end_text()
                return True
            writer.text(source.take(len(quote)))
        elif tag and not start:
            if (yield from skip_end_tags(source, 0, writer)) == len(source.text):
                writer.end_text()
                return True
            writer.text(source.take(len(tag)))
        elif source.final:
            rest = source.take(len(source.text))
            if source.cut:
                return False
            writer.text(rest.removesuffix("\\"))
            writer.end_text()
            return True
        elif 0 < start < len(source.text):
            writer.text(source.take(1))
        else:
            yield


def skip_end_tags(source: Source, at: int, writer: ArgumentsWriter) -> Reader[int]:
    """Position behind the tags that stand at a position and end a call."""
    while at < len(source.text):
        start, tag = writer.end_tags.first(source, at)
        if start > at or (not tag and source.final):
            break
        if tag:
            at = yield from skip_space(source, at + len(tag))
        else:
            yield
    return at


def _string_end(source: Source, at: int, quote: str, follows: re.Pattern[str]) -> Reader[int]:
    """Position of the quote that ends a string; the end of the text if none comes."""
    while True:
        if found := _IN_STRING[quote].match(source.text, at):
            at = found.end()
        if source.text.startswith(quote, at):
            behind = yield from skip_space(source, at + 1)
            if behind == len(source.text) or follows.match(source.text, behind):
                return at
            at += 1
        elif source.final:
            return len(source.text)
        else:
            yield


def value_end(source: Source, at: int) -> Reader[int]:
    """Position of the comma or bracket behind a value in the notation of JSON or Python, or the end of the text."""
    opened: list[str] = []
    while True:
        if found := _PLAIN.match(source.text, at):
            at = found.end()
        char = source.text[at : at + 1]
        if not char:
            if source.final:
                return at
            yield
        elif char in _QUOTES:
            at = yield from _string_end(source, at + 1, char, _ENDS_KEY)
            at = min(at + 1, len(source.text))
        elif char in _PAIRS:
            opened.append(_PAIRS[char])
            at += 1
        elif char == ",":
            if not opened:
                return at
            at += 1
        elif char in opened:
            while opened.pop() != char:
                pass
            at += 1
        else:
            return at


class Llama3Json(ToolFormat):
    """JSON objects, separated by semicolons."""

    START_TAGS = ("<|python_tag|>",)
    BARE_STARTS = "{["
    SEPARATOR = "; "

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`."""
        return (yield from read_calls(source, len(self.start_tag_of(source)), calls))

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """See `ToolFormat`. None of them has an start_tag."""
        return [
            tagged(f'{{"name": {json.dumps(each.name)}, "parameters": ', json_of(each.schema), "}")
            for each in functions
        ]


_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)$')


class NamedCall(ToolFormat):
    """All of the answer is the arguments of the only tool."""

    BARE_STARTS = "{"

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`."""
        (name,) = calls.names
        writer = calls.begin(name)
        while True:
            writer.write(source.take(len(source.text)))
            if source.final:
                return True
            yield


class ListedCalls(ToolFormat):
    """All of the answer is a JSON list of calls."""

    BARE_STARTS = "["

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`. An answer that is cut in a name is a call if only one tool's name begins so."""
        yield from read_calls(source, 0, calls)
        while not source.final:
            yield
        if begun := _BEGUN.search(source.text):
            names = [name for name in calls.names if name.startswith(begun[1])]
            if len(names) == 1:
                calls.begin(names[0])
        source.take(len(source.text))
        return True
