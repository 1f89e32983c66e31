"""Calls as Qwen3-Coder writes them, with values in the open:

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re

from bateleur.runner.openai.tools import Tools
from bateleur.runner.serve.parsers.machine import Tags
from bateleur.runner.serve.parsers.scanner import Scanner
from bateleur.runner.serve.parsers.values import as_json, types_of

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_IN_BODY = Tags(_PARAMETER, _END_FUNCTION, Scanner.CLOSING)
_BEHIND_VALUE = Tags(_END_PARAMETER, _PARAMETER, _END_FUNCTION)
_ENDS_KEY = re.compile(r"[>\n<]")
_SPACE = re.compile(r"\s*")


class Qwen3Coder(Scanner):
    """Finds such calls, also where the outer tags or the end of a parameter are missing.

    Values become JSON by the type that the tool's schema gives them. Text is told as it comes, one newline at each end
    left out; all else when it is whole, as text if it isn't what it should be. What doesn't begin with the name of a
    tool is content, and so is what stands between parameters.
    """

    OPENING = ("<tool_call>", _FUNCTION)

    def __init__(self, tools: Tools, most: int | None = None) -> None:
        super().__init__(most)
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self._name = ""
        self._key: list[str] = []
        self._num_keys = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._newline = ""
        """At the end of what there is of a text; it may be the last."""
        self._fresh = True

    def _opened(self, tag: str) -> None:
        self._name, self._num_keys = "", 0
        self._state = self._function if tag == _FUNCTION else self._before_function

    def _before_function(self, text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None, "it may be empty"
        place = found.end()
        if text.startswith(_FUNCTION, place):
            place += len(_FUNCTION)
            self._state = self._function
        elif _FUNCTION.startswith(text[place : place + len(_FUNCTION)]):
            pass  # it may become one
        else:
            self._raw.append(text[at:place])
            self._no_call()
            return place
        self._raw.append(text[at:place])
        return place

    def _function(self, text: str, at: int) -> int:
        """In the name, which is given up as soon as no tool's goes on like it."""
        place = at
        while place < len(text) and any(each.startswith(self._name + text[place]) for each in self._schemas):
            self._name += text[place]
            place += 1
        self._raw.append(text[at:place])
        if place == len(text):
            return place
        if text[place] == ">" and self._name in self._schemas:
            self._call(self._name)
            self._state = self._body
            return place + 1
        self._no_call()
        return place

    def _body(self, text: str, at: int) -> int:
        """Between parameters."""
        start, tag = _IN_BODY.search(text, at)
        self._say(text[at:start])
        if tag:
            self._tagged(tag)
        return start + len(tag)

    def _tagged(self, tag: str) -> None:
        """Behind a parameter, or before the first."""
        if tag == _PARAMETER:
            self._state, self._key = self._parameter, []
            return
        self._space = []
        if tag == _END_PARAMETER:
            self._state = self._body
        else:
            self._argue("}" if self._num_keys else "{}")
            self._state, self._behind_call = self._content, True
            if tag == self.CLOSING:
                self._closed()

    def _parameter(self, text: str, at: int) -> int:
        """In the name of one."""
        found = _ENDS_KEY.search(text, at)
        place = len(text) if found is None else found.start()
        self._key.append(text[at:place])
        if found is None:
            return place
        key = "".join(self._key)
        if found[0] != ">":
            self._say(_PARAMETER + key)
            self._state = self._body
            return place
        self._space = []
        self._types = types_of(self._schemas[self._name], key)
        self._argue((", " if self._num_keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_keys += 1
        self._argue('"' if self._is_text else "")
        self._value, self._newline, self._fresh = [], "", True
        self._state = self._in_value
        return place + 1

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _in_value(self, text: str, at: int) -> int:
        start, tag = _BEHIND_VALUE.search(text, at)
        self._add(text[at:start])
        if tag:
            self._argue('"' if self._is_text else as_json("".join(self._value), self._types))
            self._tagged(tag)
        return start + len(tag)

    def _add(self, text: str) -> None:
        """More of a value."""
        if self._fresh and text:
            self._fresh, text = False, text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._is_text:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_state(self, held: str) -> None:
        """A call that is told stays as it is; of what can't be told as JSON yet, as it was written."""
        if self._state == self._in_value:
            self._add(held)
            self._argue(json.dumps(self._newline)[1:-1] if self._is_text else "".join(self._value))
        elif self._state not in (self._body, self._parameter):
            super()._end_state(held)
