"""Stored responses, which later requests can continue."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bateleur.runner.serve.json_text import dumps
from bateleur.runner.serve.responses.body import Item


@dataclass(slots=True)
class StoredResponse:
    """A stored response, its input items, and all items of its conversation."""

    response: Item
    inputs: list[Item]
    """Input items of this response, without those of previous responses."""
    items: list[Item]
    """All items of the conversation, including the output once the response has ended."""
    num_bytes: int
    """Size as JSON, including previous responses."""


class ResponseStore:
    """Least-recently-used cache of responses by id, limited in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.outputs: dict[str, Item] = {}
        """Output items of the stored responses, by id."""

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response with this id, or None."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._stored.move_to_end(response_id)
        return stored

    def put(self, response: Item, inputs: list[Item], previous: StoredResponse | None) -> None:
        """Store a response that has started or ended."""
        self.drop(response["id"])
        output: list[Item] = response["output"]
        items = [*(previous.items if previous else ()), *inputs, *output]
        size = len(dumps((response, inputs))) + (previous.num_bytes if previous else 0)
        self._stored[response["id"]] = StoredResponse(response, inputs, items, size)
        self._num_bytes += size
        self.outputs |= {each["id"]: each for each in output}
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._stored)))

    def drop(self, response_id: str) -> bool:
        """Remove a response. Returns whether it existed."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
            for each in stored.response["output"]:
                self.outputs.pop(each["id"], None)
        return stored is not None
