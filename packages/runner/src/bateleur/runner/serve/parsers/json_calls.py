"""Parsers for tool calls that are JSON objects, {"name": ..., "arguments": {...}}, or a list of them.

Llama 3 writes them without tags. `NamedCall` and `ListedCalls` parse answers to a forced tool_choice.
"""

import re
from typing import NamedTuple

from bateleur.runner.serve.parsers.source import Parse, Source, skip_space
from bateleur.runner.serve.parsers.tool_format import NO_KEY, ArgumentsWriter, Calls, ToolFormat
from bateleur.runner.serve.parsers.values import literal_as_json, unescaped
from bateleur.runner.structured.formats import json_of

_ARGUMENTS = ("arguments", "parameters", "args", "input")
_NAMES = ("name", "function")
_MEMBERS = (*_NAMES, "type", "id", "index", *_ARGUMENTS)
"""Keys of a call. An object that begins with another key is not a call."""
_QUOTES = "\"'"
_PAIRS = {"[": "]", "{": "}", "(": ")"}
_PLAIN = re.compile(r"[^\"'\[\](){},<\ud800-\udfff]+")
"""Text of a value outside of strings and brackets, without tags and tag markers."""
_HEX = "[0-9a-fA-F]"
_HIGH = f"[dD][89abAB]{_HEX}{_HEX}"
"""Hex digits of a high surrogate."""
_ESCAPE = "|".join(
    (
        r"\\[^u]",
        rf"\\u{_HIGH}(?:\\u{_HEX}{{4}}|(?=[^\\]|\\[^u]|\\u{_HEX}{{0,3}}[^0-9a-fA-F]))",
        rf"\\u(?!{_HIGH}){_HEX}{{4}}",
        rf"\\u(?={_HEX}{{0,3}}[^0-9a-fA-F])",
    )
)
"""A complete escape sequence."""
_HIGH_ESCAPE = re.compile(rf"\\u{_HIGH}")
_IN_STRING = {quote: re.compile(rf"(?:[^{quote}\\]|{_ESCAPE})+", re.DOTALL) for quote in _QUOTES}
_IN_STRING |= {
    quote * 3: re.compile(rf"(?:[^{quote}\\]|{_ESCAPE}|{quote}{{1,2}}(?=[^{quote}]))+", re.DOTALL) for quote in _QUOTES
}
_TAG = re.compile("[<\ud800-\udfff]")
_ENDS_KEY, _ENDS_VALUE = re.compile(r"[:,}\])]"), re.compile(r"[,}\])]")
"""Characters that follow the closing quote of a string."""
_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")
MAY_KEYWORD = re.compile(r"[A-Za-z_]\w{0,200}\s*=?\s*$")
"""Text that may become the name of a keyword argument."""


def read_calls(source: Source, at: int, calls: Calls) -> Parse[bool]:
    """Consume JSON calls, or a list of them, at position `at`. If there are none, return False and consume nothing."""
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


def _read_call(source: Source, at: int, calls: Calls) -> Parse[bool]:
    """Consume the JSON object at position `at`. If it is not an allowed call, return False and consume nothing."""
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
            raise AssertionError("a parser waits for text after the end")
    return True


class _Member(NamedTuple):
    """A member of a JSON object, with positions in the text. If no member follows, the key is None."""

    key: str | None
    start: int
    """Position of the key; without a key, of the closing brace or of the end of the text."""
    end: int
    value: int
    """Position of the value; without a key, the position after the closing brace, or `start` if there is no brace."""


def _next_member(source: Source, at: int) -> Parse[_Member]:
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
    """Return the text of a string literal; empty for other values."""
    value = value.strip()
    return unescaped(value[1:-1]) if len(value) > 1 and value[0] in _QUOTES and value[-1] == value[0] else ""


def _as_object(value: str) -> str:
    """Return arguments, given as JSON object, string of JSON or null, as a JSON object; "" for other values."""
    value = value.strip()
    if value[:1] and value[0] in _QUOTES:
        value = _as_text(value).strip()
    if value in ("", "null", "None"):
        return "{}"
    return value if value.startswith("{") else ""


def _skip_members(source: Source) -> Parse[None]:
    """Consume the members of a call after its arguments, and the closing brace of the call."""
    at = yield from skip_space(source, 0)
    while source.text[at : at + 1] == ",":
        at = yield from value_end(source, at + 1)
        if source.text[at : at + 1] not in ("}", ","):
            return
        source.take(at)
        at = yield from skip_space(source, 0)
    if source.text[at : at + 1] == "}":
        source.take(at + 1)


def read_object(source: Source, writer: ArgumentsWriter) -> Parse[None]:
    """Consume an object, and write it as a call's arguments. A missing "}" is added unless the answer was truncated."""
    before = source.take(1)
    while True:
        member = yield from _next_member(source, 0)
        if member.key is None:
            break
        lead = before + source.text[: member.start]
        colon = source.text[member.end : member.value].replace("=", ":")
        source.take(member.value)
        before = lead if lead.strip() == ("," if writer.keys else "{") else ""
        writer.key(member.key, before=before, colon=colon)
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


def _read_key(source: Source, at: int) -> Parse[tuple[str | None, int]]:
    """Parse a key with or without quotes. Returns the key, or None if there is none, and the position after the key."""
    first = source.text[at : at + 1]
    if first and first in _QUOTES:
        end = yield from _string_end(source, at + 1, first, _ENDS_KEY)
        return unescaped(source.text[at + 1 : end]), end + 1
    while (found := _KEY.match(source.text, at)) is not None:
        if found.end() < len(source.text) or source.final:
            return found[0], found.end()
        yield
    return None, at


def read_value(source: Source, writer: ArgumentsWriter, key: str) -> Parse[bool]:
    """Consume and write the value of `key` at the start of the text. Returns False if it was truncated."""
    first, types = source.text[0], writer.types(key)
    if first in _QUOTES and (not types or "string" in types):
        return (yield from _read_string(source, writer))
    end = yield from value_end(source, 0, writer.next_key)
    if end == len(source.text) and source.cut:
        source.take(end)
        return False
    writer.write(literal_as_json(source.take(end).strip(), types))
    return True


def _read_string(source: Source, writer: ArgumentsWriter) -> Parse[bool]:
    """Consume a quoted string, and write it incrementally. Returns False if it was truncated.

    A quote ends the string only before a comma, a closing bracket, the next key, or the end of the call or text. Other
    quotes are part of the string. If the last quote is missing, the string ends at the end of the text, or at the
    call's end tags before it. End tags with other text after them are part of the string.
    """
    quote = source.take(1)
    while source.text in ("", quote) and not source.final:
        yield
    if source.text.startswith(quote * 2):  # Python's triple quotes
        quote += source.take(2)
    writer.write('"')
    while True:
        start, tag = writer.end_tags.first(source)
        if found := _IN_STRING[quote].match(source.text, 0, start):
            writer.text(unescaped(source.take(found.end())))
        elif source.text.startswith(quote):
            at = yield from skip_space(source, len(quote))
            after = yield from skip_end_tags(source, at, writer)
            ends = after == len(source.text) or (_ENDS_VALUE if at == after else _TAG).match(source.text, after)
            if ends or (yield from _begins_key(source, after, writer.next_key)):
                source.take(len(quote))
                writer.write('"')
                return True
            writer.text(source.take(len(quote)))
        elif tag and not start:
            if (yield from skip_end_tags(source, 0, writer)) == len(source.text):
                writer.write('"')
                return True
            writer.text(source.take(len(tag)))
        elif source.final:
            rest = source.take(len(source.text))
            if source.cut:
                return False
            writer.text(rest.removesuffix("\\"))
            writer.write('"')
            return True
        elif 0 < start < len(source.text):  # a tag may follow an escape, such as \ud83d
            writer.text(unescaped(source.take(6 if _HIGH_ESCAPE.match(source.text, 0, start) else 1)))
        else:
            yield


def skip_end_tags(source: Source, at: int, writer: ArgumentsWriter) -> Parse[int]:
    """Return the position after the end tags (`writer.end_tags`) at position `at`; `at` itself if there are none."""
    while at < len(source.text):
        start, tag = writer.end_tags.first(source, at)
        if start > at or (not tag and source.final):
            break
        if tag:
            at = yield from skip_space(source, at + len(tag))
        else:
            yield
    return at


def _begins_key(source: Source, at: int, next_key: re.Pattern[str]) -> Parse[bool]:
    """Return whether `next_key` (a parameter's name and "=") matches at a position."""
    while next_key is not NO_KEY and not source.final and MAY_KEYWORD.match(source.text, at):
        yield
    return next_key.match(source.text, at) is not None


def _string_end(
    source: Source, at: int, quote: str, follows: re.Pattern[str], next_key: re.Pattern[str] = NO_KEY
) -> Parse[int]:
    """Return the position of a closing quote with `follows` or `next_key` after it, or the end of the text."""
    while True:
        if found := _IN_STRING[quote].match(source.text, at):
            at = found.end()
        if source.text.startswith(quote, at):
            after = yield from skip_space(source, at + 1)
            ends = after == len(source.text) or follows.match(source.text, after)
            if ends or (yield from _begins_key(source, after, next_key)):
                return at
            at += 1
        elif source.final:
            return len(source.text)
        else:
            yield


def _key_in_plain_text(source: Source, at: int, next_key: re.Pattern[str]) -> Parse[re.Match[str] | None]:
    """Return the match of `next_key` before the first quote, bracket, comma or tag, or None."""
    while True:
        found = _PLAIN.match(source.text, at)
        if found is None or found.end() < len(source.text) or source.final:
            return None if found is None else next_key.search(source.text, at, found.end())
        yield


def value_end(source: Source, at: int, next_key: re.Pattern[str] = NO_KEY) -> Parse[int]:
    """Return the position of the comma, bracket or key after a JSON or Python value, or the end of the text.

    next_key: pattern of a key that ends the value without a comma.
    """
    opened: list[str] = []
    while True:
        if not opened and (key := (yield from _key_in_plain_text(source, at, next_key))):
            return key.start()
        if found := _PLAIN.match(source.text, at):
            at = found.end()
        char = source.text[at : at + 1]
        if not char:
            if source.final:
                return at
            yield
        elif char in _QUOTES:
            at = yield from _string_end(source, at + 1, char, _ENDS_KEY, next_key)
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
    """Tool calls of Llama 3: JSON objects separated by semicolons, bare or after <|python_tag|>."""

    START_TAGS = ("<|python_tag|>",)
    BARE_STARTS = "{["
    SEPARATOR = "; "
    CALL = ('{"name": "{name}", "parameters": ', json_of, "}")

    def read(self, source: Source, calls: Calls) -> Parse[bool]:
        """Parse and consume the calls at the start of the text; see `ToolFormat.read`."""
        return (yield from read_calls(source, len(self.start_tag_of(source)), calls))


_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)$')


class NamedCall(ToolFormat):
    """An answer to a tool_choice that names a tool: the whole answer is the arguments of this tool."""

    BARE_STARTS = "{"

    def read(self, source: Source, calls: Calls) -> Parse[bool]:
        """Parse and consume the arguments of the tool; see `ToolFormat.read`."""
        (name,) = calls.names
        writer = calls.begin(name)
        while True:
            writer.write(source.take(len(source.text)))
            if source.final:
                return True
            yield


class ListedCalls(ToolFormat):
    """An answer to tool_choice required: the whole answer is a JSON list of calls."""

    BARE_STARTS = "["

    def read(self, source: Source, calls: Calls) -> Parse[bool]:
        """Consume the list of calls. A truncated tool name is completed if only one name begins like it."""
        yield from read_calls(source, 0, calls)
        while not source.final:
            yield
        if begun := _BEGUN.search(source.text):
            names = [name for name in calls.names if name.startswith(begun[1])]
            if len(names) == 1:
                calls.begin(names[0])
        source.take(len(source.text))
        return True
