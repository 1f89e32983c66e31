"""Requests of data-parallel ranks: the first hands them out, and hears what becomes of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from bateleur.runner.engine.admission_limit import require_new
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.messages import (
    AbandonRequests,
    AbortRequest,
    AddAdmittedRequests,
    ReportStats,
    RunStep,
    WireMessage,
)
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.admitted_request import AdmittedRequest
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.stats import EngineStats, combined
from bateleur.runner.utils.arguments import shown
from bateleur.runner.workers.leader import Leader


@dataclass(frozen=True, slots=True)
class RequestPlacement:
    """Where a request runs."""

    rank: int
    num_members: int


class DataParallelCoordinator:
    """To whoever has requests it is the `RequestRegistry` of all ranks, and the engine that runs their steps.

    A request goes to the rank that has the fewest, continuations counted one by one, of equal ones to the lowest; it
    stays there to its end. Every order is told to all ranks, each its own part, and is over when all have replied: so
    what is reported here is all that is known anywhere, and nothing breaks off in between.
    """

    def __init__(self, engine: Engine, leader: Leader) -> None:
        self._engine, self._leader, size = engine, leader, leader.ranks.size
        self._homes: dict[str, RequestPlacement] = {}
        self._reports: dict[str, RequestOutput] = {}
        self._stats: list[EngineStats] = [EngineStats() for _ in range(1, size)]
        self.loads = [0] * size
        """Continuations that each rank has."""
        self.claimed: set[str] = set()
        """See `RequestRegistry`, as for all else here."""
        self.forsaken: set[str] = set()

    @property
    def requests(self) -> Mapping[str, RequestPlacement]:
        """Those that wait or run, by id."""
        return self._homes

    def __contains__(self, request_id: object) -> bool:
        self.restore()
        return request_id in self._homes or request_id in self._reports

    # --- orders -------------------------------------------------------------------------------------------

    def add(self, *groups: RequestGroup) -> None:
        """Queue requests, all or none. ValueError for an id that is here already, or twice among them."""
        require_new((group.request_id for group in groups), self)
        loads, parts = list(self.loads), [list[RequestGroup]() for _ in self.loads]
        homes: dict[str, RequestPlacement] = {}
        for group in groups:
            rank = loads.index(min(loads))
            homes[group.request_id] = RequestPlacement(rank, len(group.members))
            loads[rank] += len(group.members)
            parts[rank].append(group)
        orders = [AddAdmittedRequests(tuple(map(AdmittedRequest.of, part))) for part in parts]
        with self._leader.tell_each(orders):
            self._engine.ledger.add(*parts[0])
            self._homes |= homes
            self.loads = loads
            self._hear()

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; what it emitted so far is in the result. ValueError for an unknown id."""
        self.restore()
        home = self._homes.get(request_id)
        if home is None:
            raise ValueError(f"request_id is {shown(request_id)}; no such request is waiting or running")
        orders: list[WireMessage] = [AbandonRequests(())] * len(self.loads)
        orders[home.rank] = AbortRequest(request_id)
        with self._leader.tell_each(orders):
            if home.rank == 0:
                self._file([self._engine.ledger.abort(request_id)])
            self._hear()
        return self._reports.pop(request_id)

    def restore(self) -> None:
        """Forget who is forsaken."""
        if not self.forsaken:
            return
        gone = sorted(self.forsaken)
        own = [[name for name in gone if name in self._homes and self._homes[name].rank == rank]
               for rank in range(len(self.loads))]  # fmt: skip
        with self._leader.tell_each([AbandonRequests(tuple(names)) for names in own]):
            self._engine.ledger.forsaken.update(own[0])
            self._engine.ledger.restore()
            self._hear()
            for name in gone:
                self._left(name)
                self._reports.pop(name, None)
            self.claimed.difference_update(gone)
            self.forsaken = self.forsaken.difference(gone)
        self._tally()

    def step(self) -> None:
        """One step of all ranks."""
        self.restore()
        with self._leader.tell_each([RunStep(0.0)] * len(self.loads)):
            self._engine.step()
            before = len(self._homes)
            self._hear()
        if before:
            self._tally()

    def _tally(self) -> None:
        """Behind the last request, hear the counters of all."""
        if not self._homes:
            with self._leader.tell_each([ReportStats()] * len(self.loads)):
                self._hear()

    # --- reports ------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """What all ranks have to report of the order that they were given."""
        self._file(self._engine.ledger.take_unclaimed())
        for index, reply in enumerate(self._leader.replies()):
            self._file(reply.outputs)
            if reply.stats is not None:
                self._stats[index] = reply.stats

    def _file(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            if (filed := self._reports.get(name)) is None:
                self._reports[name] = output
            else:
                filed.add(output)
            if output.finished:
                self._left(name)

    def _left(self, name: str) -> None:
        if (home := self._homes.pop(name, None)) is not None:
            self.loads[home.rank] -= home.num_members

    def take(self, request_ids: Container[str]) -> RequestOutput | None:
        """The oldest report of these requests, None if there is none."""
        name = next((name for name in self._reports if name in request_ids), None)
        return None if name is None else self._reports.pop(name)

    def take_unclaimed(self) -> list[RequestOutput]:
        """All reports that nobody takes by id."""
        names = [name for name in self._reports if name not in self.claimed]
        return [self._reports.pop(name) for name in names]

    @property
    def has_unfinished(self) -> bool:
        """Whether requests wait or run, or reports that nobody takes by id are there."""
        return not self._homes.keys() <= self.forsaken or not self._reports.keys() <= self.claimed

    def metrics(self) -> EngineStats:
        """The sums of all ranks; those of the others a moment ago, or when the last request had ended."""
        return combined([self._engine.metrics(), *self._stats])
