"""Calls as Hermes models and many after them write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json

from bateleur.runner.openai.tools import Tools
from bateleur.runner.serve.parsers.json_object import JsonObject
from bateleur.runner.serve.parsers.scanner import Scanner


class Hermes(Scanner):
    """Finds such calls.

    Arguments are told as they come, where the name stands before them. What is no object with the name of a tool, and
    an object of arguments if it has any, is content. Where one breaks off after its name was told, the rest is. Members
    of other names are passed over.
    """

    OPENING = ("<tool_call>",)

    def __init__(self, tools: Tools, most: int | None = None) -> None:
        super().__init__(most)
        self._names = {tool["function"]["name"] for tool in tools}
        self._object = JsonObject()
        self._name = self._arguments = ""
        self._begun = self._streams = False

    def _opened(self, tag: str) -> None:
        self._object = JsonObject()
        self._name = self._arguments = ""
        self._begun = self._streams = False
        self._state = self._member

    def _member(self, text: str, at: int) -> int:
        """Within the object."""
        read = self._object
        place = read.feed(text, at)
        if not self._begun:
            self._raw.append(text[at:place])
            if self._name and read.key == "arguments" and read.pieces[:1] == ["{"]:
                self._begin()
        if self._streams:
            self._argue("".join(read.pieces))
            read.pieces.clear()
            self._streams = not read.value_ended
        elif read.value_ended:
            self._value(read.key, "".join(read.pieces))
            read.pieces.clear()
        if self._state == self._member:
            self._object_ends(read)
        return place

    def _begin(self) -> None:
        self._call(self._name)
        self._begun = self._streams = True

    def _value(self, key: str, value: str) -> None:
        """A member is whole."""
        if self._begun or key not in ("name", "arguments"):
            return
        if key == "name":
            self._name = _name(value)
            if self._name not in self._names:
                self._no_call()
        else:
            self._arguments = _arguments(value)
            if not self._arguments:
                self._no_call()

    def _object_ends(self, read: JsonObject) -> None:
        if read.done and not self._begun and self._name:
            self._call(self._name)
            self._argue(self._arguments or "{}")
            self._state = self._content
        elif read.done or read.broken:
            if self._begun:
                self._state = self._content
            else:
                self._no_call()

    def _end_state(self, held: str) -> None:
        if self._state == self._member and self._begun:
            self._argue(held if self._streams else "")
        else:
            super()._end_state(held)


def _name(value: str) -> str:
    """The text that a value is; empty for all else."""
    read = _read(value)
    return read if isinstance(read, str) else ""


def _arguments(value: str) -> str:
    """Arguments as JSON: an object, one that was written as text, or none; empty for all else."""
    read = _read(value)
    if isinstance(read, str):
        value, read = read, _read(read)
    if read is None and value == "null":
        return "{}"
    return value if isinstance(read, dict) else ""


def _read(value: str) -> object:
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
