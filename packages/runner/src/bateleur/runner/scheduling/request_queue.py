"""The queue of waiting requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from bateleur.runner.requests.request import Request


def service_order(request: Request) -> tuple[int, int]:
    """Return the sort key of a request: lower priority numbers first, then first come, first served."""
    return request.priority, request.arrival


class RequestQueue:
    """Waiting requests in service order. Each operation takes O(log N) amortised time for N requests.

    requests: all waiting requests, unordered.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        """requests: initial requests. Their `priority` and `arrival` must not change while they wait."""
        self.requests = set(requests)
        self._heap = [(*service_order(request), request) for request in self.requests]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in service order."""
        return iter(sorted(self.requests, key=service_order))

    def add(self, request: Request) -> None:
        """Insert a request in service order."""
        self.requests.add(request)
        heappush(self._heap, (*service_order(request), request))

    @property
    def first(self) -> Request:
        """The next request to serve. The queue must not be empty."""
        while (request := self._heap[0][-1]) not in self.requests:
            heappop(self._heap)
        return request

    def pop(self) -> Request:
        """Remove and return the next request to serve. The queue must not be empty."""
        request = self.first
        heappop(self._heap)
        self.requests.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request for good."""
        self.requests.remove(request)
        if len(self._heap) > 2 * len(self.requests) + 16:
            self._heap = [entry for entry in self._heap if entry[-1] in self.requests]
            heapify(self._heap)
