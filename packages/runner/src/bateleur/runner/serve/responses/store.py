"""Stored responses, which later requests continue: a bounded number of bytes in the memory of the server."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bateleur.runner.serve.json_text import dumps
from bateleur.runner.serve.responses.body import Item


@dataclass(slots=True)
class StoredResponse:
    """A response and the conversation that it ends."""

    response: Item
    inputs: list[Item]
    """Items of its input, without those of earlier responses."""
    items: list[Item]
    """All items of the conversation, its output included once it has ended."""
    num_bytes: int
    """Of all of this as JSON."""


class ResponseStore:
    """Responses by id. The one that was used least recently is dropped when there are too many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def get(self, response_id: str) -> StoredResponse | None:
        """The response with this id; None if there is none."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._stored.move_to_end(response_id)
        return stored

    def put(self, response: Item, inputs: list[Item], earlier: StoredResponse | None) -> None:
        """Keep a response that has begun or ended, under its id."""
        self.drop(response["id"])
        output: list[Item] = response["output"]
        items = [*(earlier.items if earlier else ()), *inputs, *output]
        size = len(dumps((response, inputs))) + (earlier.num_bytes if earlier else 0)
        self._stored[response["id"]] = StoredResponse(response, inputs, items, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._stored)))

    def drop(self, response_id: str) -> bool:
        """Forget a response; whether it was there."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
        return stored is not None
