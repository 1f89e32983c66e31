"""Calls that a request forces: the answer follows a schema of ours, whatever the model would write by itself."""

from __future__ import annotations

import re

from bateleur.runner.serve.parsers.arguments import Calls
from bateleur.runner.serve.parsers.json_calls import read_calls
from bateleur.runner.serve.parsers.source import Reader, Source
from bateleur.runner.serve.parsers.tool_format import ToolFormat

_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)$')


class NamedCall(ToolFormat):
    """All of the answer is the arguments of the only tool."""

    BARE = "{"

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

    BARE = "["

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
