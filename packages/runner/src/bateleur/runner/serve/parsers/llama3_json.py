"""Calls as Llama 3 writes them: JSON objects that are all of the answer, or stand behind <|python_tag|>.

{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time", "parameters": {}}
"""

from __future__ import annotations

from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import Reader, Source
from bateleur.runner.serve.parsers.tool_format import ToolFormat


class Llama3Json(ToolFormat):
    """JSON objects, separated by semicolons."""

    OPENERS = ("<|python_tag|>",)
    BARE = "{["

    def read(self, source: Source, calls: Calls) -> Reader[bool]:
        """See `ToolFormat`."""
        return (yield from read_calls(source, len(self.opener_of(source)), calls))
