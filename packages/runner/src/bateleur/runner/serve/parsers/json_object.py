"""Reading one JSON object that comes in pieces, as forgiving as models need it."""

from __future__ import annotations

import json
import re

_SPACE = re.compile(r"[ \t\n\r]*")
_OF_STRING = re.compile(r'[^"\\\x00-\x1f]+|\\.', re.DOTALL)
_OF_CONTAINER = re.compile(r'[^"{}\[\]]+')
_OF_SCALAR = re.compile(r"[^\s,{}\[\]\":]+")
_CLOSES = {"{": "}", "[": "]"}


class JsonObject:
    """The members of an object: `key` is the last key, and values come piece by piece.

    Control characters within strings, which JSON forbids and models write, come escaped. Brackets are matched; what
    stands between those of a value is not looked at.
    """

    def __init__(self) -> None:
        self.key = ""
        self.done = False
        self.broken = False
        """No JSON can go on like this; nothing after it was taken."""
        self.pieces: list[str] = []
        """Of the value of `key`, those not taken away yet."""
        self.value_ended = False
        """With the text that was taken last, the value of `key` is whole."""
        self._expected = "{"
        self._open: list[str] = []
        """Brackets of the value that are open, as what closes them."""
        self._in_string = False
        self._scalar = False
        self._key_parts: list[str] = []

    def feed(self, text: str, at: int) -> int:
        """Take text from `at` on, at most to the end of a key's value; returns up to where."""
        self.value_ended = False
        if self._in_string or self._open or self._scalar:
            return self._inside(text, at)
        return self._between(text, at)

    def _between(self, text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None, "it may be empty"
        at = found.end()
        return at if at == len(text) else self._token(text, at)

    def _token(self, text: str, at: int) -> int:
        char = text[at]
        match self._expected:
            case "{" if char == "{":
                self._expected = "key or }"
            case "key or }" | "key" if char == '"':
                self._expected, self._in_string, self._key_parts = "key", True, []
            case ":" if char == ":":
                self._expected = "value"
            case ", or }" if char == ",":
                self._expected = "key"
            case ", or }" | "key or }" if char == "}":
                self.done = True
            case "value":
                return self._value(text, at)
            case _:
                self.broken = True
                return at
        return at + 1

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _CLOSES:
            self._open.append(_CLOSES[char])
        elif char == '"':
            self._in_string = True
        elif _OF_SCALAR.match(char):
            self._scalar = True
            return self._inside(text, at)
        else:
            self.broken = True
            return at
        self.pieces.append(char)
        return at + 1

    def _inside(self, text: str, at: int) -> int:
        """Within a string, a scalar, or a container."""
        if self._in_string:
            return self._string(text, at)
        if self._scalar:
            if found := _OF_SCALAR.match(text, at):
                self.pieces.append(found[0])
                return found.end()
            self._scalar = False
            self._ends()
            return self._between(text, at)
        if found := _OF_CONTAINER.match(text, at):
            self.pieces.append(found[0])
            return found.end()
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in _CLOSES:
            self._open.append(_CLOSES[char])
        elif self._open[-1] == char:
            self._open.pop()
        else:
            self.broken = True
            return at
        self.pieces.append(char)
        if not self._open and not self._in_string:
            self._ends()
        return at + 1

    def _string(self, text: str, at: int) -> int:
        parts = self._key_parts if self._expected == "key" else self.pieces
        if found := _OF_STRING.match(text, at):
            parts.append(found[0])
            return found.end()
        char = text[at]
        if char == "\\":  # what it escapes is to come
            return at
        if char != '"':
            parts.append(json.dumps(char)[1:-1])
            return at + 1
        self._in_string = False
        if self._expected == "key":
            return self._keyed(at)
        parts.append(char)
        if not self._open:
            self._ends()
        return at + 1

    def _keyed(self, at: int) -> int:
        try:
            self.key, self._expected = str(json.loads(f'"{"".join(self._key_parts)}"')), ":"
        except ValueError:
            self.broken = True
        return at + 1

    def _ends(self) -> None:
        self._expected, self.value_ended = ", or }", True
