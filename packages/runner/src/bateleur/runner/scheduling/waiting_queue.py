"""Requests that wait for a row, in the order in which they get one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from bateleur.runner.requests.request import Request


def urgency(request: Request) -> tuple[int, int]:
    """Smaller goes first: by priority, and of one priority, first come, first served."""
    return request.priority, request.arrival


class WaitingQueue:
    """Requests by urgency. Each operation takes O(log of their number), on the average of many."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        """Their `priority` and `arrival` stay as they are while they wait."""
        self._waiting = set(requests)
        self._heap = [(*urgency(request), request) for request in self._waiting]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In their order."""
        return iter(sorted(self._waiting, key=urgency))

    def add(self, request: Request) -> None:
        """Let it wait, at its place."""
        self._waiting.add(request)
        heappush(self._heap, (*urgency(request), request))

    @property
    def first(self) -> Request:
        """The most urgent; there must be one."""
        while (request := self._heap[0][-1]) not in self._waiting:
            heappop(self._heap)
        return request

    def pop(self) -> Request:
        """Take the most urgent; there must be one."""
        request = self.first
        heappop(self._heap)
        self._waiting.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Forget one that waits, and does not come back."""
        self._waiting.remove(request)
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[-1] in self._waiting]
            heapify(self._heap)
