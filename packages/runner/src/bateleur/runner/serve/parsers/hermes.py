"""Parsers for calls between tags: {"name": "weather", "arguments": {"city": "Oslo"}}, or as Qwen3-Coder writes them.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>

Hermes models, Qwen 2.5 and 3, Granite 4 and Falcon-H1 write JSON. Models omit tags of functions, repeat them, add
spaces to them, and write values that contain the same tags. So an end tag ends a value only before another parameter,
more end tags, another call, or the end of the text.
"""

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import Parse, Source, TagTable, skip_space, take_tags
from bateleur.runner.serve.parsers.tool_format import ArgumentsWriter, Calls, Function, ToolFormat
from bateleur.runner.serve.parsers.values import as_json, is_complete
from bateleur.runner.structured.formats import Format, json_of, tagged

FUNCTION, _PARAMETER = "<function=", "<parameter="
_BEGIN_FUNCTION = r"<\s{0,4}function\s{0,4}=\s{0,4}[^<>\n]{0,200}>"
_BEGIN_PARAMETER = r"<\s{0,4}parameter\s{0,4}=\s{0,4}[^<>\n]{0,200}>"
_END_FUNCTION = r"<\s{0,4}/\s{0,4}function\s{0,4}>"
_END_PARAMETER = r"<\s{0,4}/\s{0,4}parameter\s{0,4}>"
_LONGEST = 240
"""Maximum characters of a tag."""
_REPEATED_END = re.compile(rf"(\s*{_END_PARAMETER})+\s*$")


class _Value:
    """The value of one parameter. Strings are written incrementally."""

    def __init__(self, writer: ArgumentsWriter, key: str, *, own_line: bool) -> None:
        """own_line: whether the value starts on its own line; its end tag is then expected on its own line."""
        self._writer, self._key, self.own_line = writer, key, own_line
        self._is_text = (writer.types(key) or {"string"}) == {"string"}
        self._parts: list[str] = []
        self.empty = self.blank = True
        self.holds_call = False
        writer.key(key)
        if self._is_text:
            writer.write('"')

    def may_precede(self, key: str) -> bool:
        """Return whether the start tag of parameter `key` may end this value in place of an end tag."""
        known = self._writer.properties
        return not self.holds_call and key not in self._writer.keys and (key in known or not known)

    def is_complete(self, text: str) -> bool:
        """Return whether this text completes the value; False for strings, because tags end them."""
        return not self._is_text and is_complete("".join(self._parts) + text)

    def add(self, text: str) -> None:
        self.empty = self.empty and not text
        self.blank = self.blank and not text.strip()
        if self._is_text:
            self._writer.text(text)
        else:
            self._parts.append(text)

    def cut(self, text: str) -> None:
        """End a truncated value with its last `text`. Newlines at its end are dropped, because they may belong to an
        incomplete end tag.
        """
        self.add(text.removesuffix("\n").removesuffix("\n"))

    def end(self, text: str, *, lacks_tag: bool = False) -> None:
        """End the value with `text`. Drops the newline before its end tag, or two newlines if the tag is missing."""
        self.add(text.removesuffix("\n").removesuffix("\n" if lacks_tag else ""))
        if self._is_text:
            self._writer.write('"')
        else:
            text = _REPEATED_END.sub("", "".join(self._parts))
            self._writer.write(as_json(text, self._writer.types(self._key) or frozenset(("string",))))


class FunctionParser:
    """Parser of one XML-like function call. bare: whether the call has no <tool_call> before it."""

    def __init__(self, source: Source, calls: Calls, table: TagTable, *, bare: bool) -> None:
        self._source, self._calls, self._bare = source, calls, bare
        begin, end = table.marker("<tool_call>"), table.marker("</tool_call>")
        self._tags = (FUNCTION, _PARAMETER, "</function>", "</parameter>", begin, end)
        self._tag = re.compile(
            rf"(?P<parameter>{_BEGIN_PARAMETER})|(?P<call>{_BEGIN_FUNCTION}|{re.escape(begin)})"
            rf"|(?P<end>{_END_PARAMETER}|{_END_FUNCTION}|{re.escape(end)})"
        )
        self._ends = re.compile(
            rf"(?P<parameter>{_END_PARAMETER}\s*)?(?P<function>(?:{_END_FUNCTION}\s*)*)(?P<call>(?:{re.escape(end)}\s*)*)"
        )

    def read(self, at: int) -> Parse[bool]:
        """Parse and consume the call at position `at`. Returns False, and consumes nothing, if there is none."""
        source = self._source
        found = yield from self._tag_at(at)
        name = _name(found[0]) if found is not None and found[0].lstrip("< ").startswith("function") else ""
        if found is None or not self._calls.may_call(name):
            return False
        source.take(found.end())
        writer = self._calls.begin(name)
        while True:
            yield from self._say()
            found = yield from self._tag_at(0)
            if found is None:
                break
            if found["parameter"]:
                source.take(found.end())
                if not (yield from self._value(writer, _name(found[0]))):
                    return True
            elif found["end"] and "parameter" in found[0]:
                source.take(found.end())
            else:
                yield from self._take_ends()
                writer.close()
                return True
        if not source.cut:
            writer.close()
        return True

    def _say(self) -> Parse[None]:
        """Consume the text before the next tag, and emit it as content without leading white space."""
        source, begun = self._source, False
        while True:
            found = self._tag.search(source.text)
            text = source.take(self._num_outside(source.text) if found is None else found.start())
            if text := text if begun else text.lstrip():
                begun = True
                self._calls.add_content(text)
            if found is None and source.final:
                source.take(len(source.text))  # a truncated tag
            if found is not None or source.final:
                return
            yield

    def _tag_at(self, at: int) -> Parse[re.Match[str] | None]:
        while True:
            found = self._tag.match(self._source.text, at)
            if found is not None or self._num_certain() > at or self._source.final:
                return found
            yield

    def _num_certain(self) -> int:
        """Return the length of the received text before an incomplete tag; its full length if no more text follows."""
        text = self._source.text
        return len(text) if self._source.final else self._num_outside(text)

    def _num_outside(self, text: str) -> int:
        """Return the length of a text without an incomplete tag at its end."""
        at = text.rfind("<", max(0, len(text) - _LONGEST))
        if at < 0:
            return len(text)
        end = "".join(text[at:].split())
        opens = any(tag.startswith(end) or (tag.endswith("=") and end.startswith(tag)) for tag in self._tags)
        return at if opens and ">" not in end else len(text)

    def _take_ends(self) -> Parse[None]:
        while (found := (yield from self._tag_at(0))) is not None and found["end"] and "function" in found[0]:
            self._source.take(found.end())
            at = yield from skip_space(self._source, 0)
            if not (following := (yield from self._tag_at(at))) or "function" not in following[0]:
                return
            self._source.take(at)

    def _value(self, writer: ArgumentsWriter, key: str) -> Parse[bool]:
        """Consume and write the value of a parameter. Returns False if it was truncated."""
        source = self._source
        while not source.text and not source.final:
            yield
        own_line = source.text.startswith("\n")
        source.take(int(own_line))
        value = _Value(writer, key, own_line=own_line)
        at, possible_end, ended = 0, -1, False
        while True:
            found = self._tag.search(source.text, at)
            if found is None:
                if source.final:
                    break
                at = self._num_certain()
                if possible_end < 0:  # two newlines may belong to the end tag
                    value.add(source.take(len(source.text[:at].removesuffix("\n").removesuffix("\n"))))
                    at = 0
                yield
                continue
            verdict = yield from self._verdict(found, value)
            if verdict == "end":
                possible_end, ended = found.start(), True
                break
            at = found.end()
            if verdict == "possible end" and possible_end < 0:
                possible_end = found.start()
            elif possible_end < 0:
                value.add(source.take(at))
                at = 0
        if source.cut and not ended:
            rest = source.take(len(source.text))
            value.cut(rest[:possible_end] if possible_end >= 0 else rest[: self._num_outside(rest)])
            return False
        text = source.take(possible_end if possible_end >= 0 else len(source.text))
        ends = self._ends.match(source.text) if possible_end >= 0 else None
        value.end(text, lacks_tag=ends is not None and not ends["parameter"])
        return True

    def _verdict(self, found: re.Match[str], value: _Value) -> Parse[Literal["end", "possible end", "text"]]:
        source, start = self._source, found.start()
        at_line_start = source.text[start - 1] == "\n" if start else value.empty
        on_line = at_line_start or not value.own_line
        if value.is_complete(source.text[:start]):
            return "end"
        if found["call"]:
            value.holds_call = value.holds_call or "function" in found[0]
            return "text"
        if found["parameter"]:
            while found.end() == len(source.text) and not source.final:
                yield
            whole_line = not value.own_line or (on_line and source.text.startswith("\n", found.end()))
            blank = value.blank and not source.text[:start].strip()
            return "end" if whole_line and not blank and value.may_precede(_name(found[0])) else "text"
        ends, following = yield from self._ends_at(start)
        parameter, function, call = (bool(ends[name]) for name in ("parameter", "function", "call"))
        if source.final and not source.text[ends.end() : self._num_outside(source.text)].strip():
            return "possible end" if source.cut else "end"
        if following is not None and following["end"]:
            return "text"
        fits = on_line or source.text[ends.end() - 1] == "\n"
        if following is not None and following["parameter"]:
            return "end" if parameter and not function and not call and fits else "text"
        if following is not None and fits and (yield from self._is_call(ends.end())):
            return "end"
        if parameter and (call or (function and self._bare)) and on_line and not value.holds_call:
            return "end"
        return "possible end" if function and (parameter or call) else "text"

    def _is_call(self, at: int) -> Parse[bool]:
        found = yield from self._tag_at(at)
        if found is not None and found["call"] and "function" not in found[0]:
            after = yield from skip_space(self._source, found.end())
            if self._source.text.startswith("{", after) or after == len(self._source.text):
                return True
            found = yield from self._tag_at(after)
        return found is not None and found["call"] is not None and self._calls.may_call(_name(found[0]))

    def _ends_at(self, at: int) -> Parse[tuple[re.Match[str], re.Match[str] | None]]:
        """Return the match of all adjacent end tags at a position, and the match of the tag after them, if any."""
        while True:
            ends = self._ends.match(self._source.text, at)
            assert ends is not None, "the pattern matches the empty text"
            following = yield from self._tag_at(ends.end())
            if ends.end() < len(self._source.text) or self._source.final:
                again = self._ends.match(self._source.text, at)
                if again is not None and again.end() == ends.end():
                    return ends, following
            else:
                yield


def _name(tag: str) -> str:
    """Return the name in a tag such as <function=name>."""
    return tag.partition("=")[2].removesuffix(">").strip(" \t\"'")


class Hermes(ToolFormat):
    """Tool calls of Hermes: JSON objects or <function=NAME> elements between <tool_call> tags."""

    START_TAGS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    END_TAGS = ("</tool_call>",)
    CALL = ('<tool_call>\n{"name": "{name}", "arguments": ', json_of, "}\n</tool_call>")

    def read(self, source: Source, calls: Calls) -> Parse[bool]:
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
    """Tool calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: as `Hermes`, and <function=NAME> without <tool_call> tags."""

    START_TAGS = ("<tool_call>", FUNCTION)
    CALL = (
        f"{FUNCTION}{{name}}>\n",
        lambda schema: {"type": "qwen_xml_parameter", "json_schema": schema},
        "</function>",
    )

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """Return two grammars per function, with and without <tool_call> tags; see `ToolFormat.call_tags`."""
        bare = super().call_tags(functions, once=once)
        begin, end = "<tool_call>\n", "\n</tool_call>"
        return [tagged(begin + each["begin"], each["content"], each["end"] + end) for each in bare] + bare

    @classmethod
    def triggers(cls, functions: Sequence[Function]) -> list[str]:
        """Return the texts that start a call: <tool_call>, and <function=NAME> for each name in `functions`."""
        return ["<tool_call>", *(f"{FUNCTION}{each.name}>" for each in functions)]


class Granite(Hermes):
    """Tool calls of Granite: as `Hermes`, or a list of JSON objects after <|tool_call|> (Granite 3)."""

    START_TAGS = ("<|tool_call|>", "<tool_call>")
    CALL = ('{"name": "{name}", "arguments": ', json_of, "}")
    LIST = ("<|tool_call|>[", ", ", "]")
