"""Calls as Llama 3 writes them: JSON objects that are all of the answer, or stand behind <|python_tag|>.

{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time", "parameters": {}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import Reader, Source
from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.structured.formats import Format, json_of, tagged


class Llama3Json(ToolFormat):
    """JSON objects, separated by semicolons."""

    OPENERS = ("<|python_tag|>",)
    BARE = "{["
    SEPARATOR = "; "

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`."""
        return (yield from read_calls(source, len(self.opener_of(source)), calls))

    @classmethod
    def call_tags(cls, functions: Sequence[Function], *, once: bool) -> list[Format]:
        """See `ToolFormat`. None of them has an opener."""
        return [
            tagged(f'{{"name": {json.dumps(each.name)}, "parameters": ', json_of(each.schema), "}")
            for each in functions
        ]
