"""The data-parallel coordinator: distributes requests over ranks and collects their outputs."""

from collections.abc import Container, Iterable
from typing import NamedTuple

from bateleur.runner.engine import messages
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.request_registry import require_new
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.stats import EngineStats, combined
from bateleur.runner.utils.arguments import shown
from bateleur.runner.workers.leader import Leader


class RequestPlacement(NamedTuple):
    """The rank that runs a request, and its number of continuations."""

    rank: int
    num_members: int


class DataParallelCoordinator:
    """Has the interface of `RequestRegistry` and of the engine, for all data-parallel ranks together.

    A request goes to the rank with the fewest running and waiting continuations (of equal ranks, the lowest), and stays
    there. A method that needs the ranks sends each rank its part of a message, and returns when all have replied.
    """

    def __init__(self, engine: Engine, leader: Leader) -> None:
        self._engine, self._leader, size = engine, leader, leader.ranks.size
        self.requests: dict[str, RequestPlacement] = {}  # waiting and running requests by id
        self._undelivered: dict[str, RequestOutput] = {}
        self._stats: list[EngineStats] = [EngineStats() for _ in range(1, size)]
        self.loads = [0] * size  # live continuations of each rank
        self.fetched_by_caller: set[str] = set()  # see `RequestRegistry`, as for all other members
        self.abandoned: set[str] = set()

    def __contains__(self, request_id: object) -> bool:
        self.restore()
        return request_id in self.requests or request_id in self._undelivered

    def add(self, *groups: RequestGroup) -> None:
        """Queue requests, all or none. Raises ValueError for an id that is in use or occurs twice."""
        require_new((group.request_id for group in groups), self)
        loads, parts = list(self.loads), [list[RequestGroup]() for _ in self.loads]
        placements: dict[str, RequestPlacement] = {}
        for group in groups:
            rank = loads.index(min(loads))
            placements[group.request_id] = RequestPlacement(rank, len(group.members))
            loads[rank] += len(group.members)
            parts[rank].append(group)
        with self._leader.send_each([messages.AddRequests(tuple(part)) for part in parts]):
            self._engine.registry.add(*parts[0])
            self.requests |= placements
            self.loads = loads
            self._receive()

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; returns its output so far. Raises ValueError for an unknown id."""
        self.restore()
        placement = self.requests.get(request_id)
        if placement is None:
            raise ValueError(f"request_id is {shown(request_id)}; no such request is waiting or running")
        parts: list[messages.Message] = [messages.AbandonRequests(())] * len(self.loads)
        parts[placement.rank] = messages.AbortRequest(request_id)
        with self._leader.send_each(parts):
            if placement.rank == 0:
                self._queue([self._engine.registry.abort(request_id)])
            self._receive()
        return self._undelivered.pop(request_id)

    def restore(self) -> None:
        """Drop the requests that their callers have left (ids in `abandoned`), on all ranks."""
        if not self.abandoned:
            return
        gone = sorted(self.abandoned)
        own: list[list[str]] = [[] for _ in self.loads]
        for name in gone:
            if name in self.requests:
                own[self.requests[name].rank].append(name)
        with self._leader.send_each([messages.AbandonRequests(tuple(names)) for names in own]):
            self._engine.registry.abandoned.update(own[0])
            self._engine.registry.restore()
            self._receive()
            for name in gone:
                self._remove(name)
                self._undelivered.pop(name, None)
            self.fetched_by_caller.difference_update(gone)
            self.abandoned = self.abandoned.difference(gone)
        self._update_stats()

    def step(self) -> None:
        """Run one step on all ranks."""
        self.restore()
        with self._leader.send_each([messages.RunStep(0.0)] * len(self.loads)):
            self._engine.step()
            before = len(self.requests)
            self._receive()
        if before:
            self._update_stats()

    def _update_stats(self) -> None:
        if not self.requests:
            with self._leader.send_each([messages.ReportStats()] * len(self.loads)):
                self._receive()

    def _receive(self) -> None:
        self._queue(self._engine.registry.take_all())
        for index, reply in enumerate(self._leader.replies()):
            self._queue(reply.outputs)
            if reply.stats is not None:
                self._stats[index] = reply.stats

    def _queue(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            if (queued := self._undelivered.setdefault(name, output)) is not output:
                queued.add(output)
            if output.finished:
                self._remove(name)

    def _remove(self, name: str) -> None:
        if (placement := self.requests.pop(name, None)) is not None:
            self.loads[placement.rank] -= placement.num_members

    def take(self, request_ids: Container[str]) -> RequestOutput | None:
        """Return the oldest output of these requests; None if there is none."""
        name = next((name for name in self._undelivered if name in request_ids), None)
        return None if name is None else self._undelivered.pop(name)

    def take_all(self) -> list[RequestOutput]:
        """Return all queued outputs, except those of requests in `fetched_by_caller`, which `take` returns."""
        names = [name for name in self._undelivered if name not in self.fetched_by_caller]
        return [self._undelivered.pop(name) for name in names]

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or `take_all` has an output to return."""
        return not self.requests.keys() <= self.abandoned or not self._undelivered.keys() <= self.fetched_by_caller

    def metrics(self) -> EngineStats:
        """Return the counters of all ranks. Those of other ranks are as of their last reply with counters."""
        return combined([self._engine.metrics(), *self._stats])
