"""The requests of an engine, what is reported of them, and what stands when something breaks off."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from bateleur.runner.engine.admission_limit import require_new
from bateleur.runner.engine.messages import (
    AbandonRequests,
    AbortRequest,
    AddRequests,
    SendMessage,
    send_to_nobody,
)
from bateleur.runner.engine.output_processor import NO_NUMBERS, OutputProcessor
from bateleur.runner.engine.request_times import RequestClock
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_group import RequestGroup, Told
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.stats import EngineStats
from bateleur.runner.utils.arguments import shown


class RequestRegistry:
    """Who is here, and what is reported of them: every request that was added ends in one report, or is forsaken.

    A step, or any other change, may break off wherever an error or an interrupt reaches it. It begins by `restore` and
    by setting `whole` to False, and ends by setting it to True. What broke off is put right by the next `restore`: a
    request then has the tokens that it had after a whole step, and is recomputed from these, since caches may be half
    written and tables half filled. Nothing is trusted for that but `requests` and their tokens. Steps in flight are
    lost with it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        emitter: OutputProcessor,
        stats: EngineStats,
        clock: RequestClock,
        renew: Callable[[], None],
    ) -> None:
        """`renew`: makes anew what else a step that broke off may have left half done."""
        self.requests: dict[str, RequestGroup] = {}
        """Those that wait or run."""
        self.whole = True
        self.tell: SendMessage = send_to_nobody
        """Everything that changes what steps do is told, and then done."""
        self.in_flight: tuple[StepInFlight, ...] = ()
        """Steps whose outcome is not known, the oldest first; none where nobody is here to whom it matters."""
        self.claimed: set[str] = set()
        """Requests whose reports somebody takes by id."""
        self.forsaken: set[str] = set()
        """Those of them that nobody waits for any more."""
        self._reports: dict[str, RequestGroup] = {}
        """Those of which there is something to tell."""
        self._told: dict[RequestGroup, tuple[Told, ...]] = {}
        """What was told of those that report what is new."""
        self._scheduler = scheduler
        self._emitter = emitter
        self._stats = stats
        self._clock = clock
        self._renew = renew

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is waiting, running, or reported and not taken."""
        self.restore()
        return request_id in self.requests or request_id in self._reports

    def add(self, *groups: RequestGroup) -> None:
        """Queue requests, all or none. ValueError for an id that is here already, or twice among them."""
        require_new((group.request_id for group in groups), self)
        with self.tell(AddRequests(groups)):
            self.whole = False
            for group in groups:
                for request in group.members:
                    self._scheduler.add(request)
            self.requests |= {group.request_id: group for group in groups}
            self.whole = True

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; what it emitted so far is in the result. ValueError for an unknown id."""
        self.restore()
        group = self.requests.get(request_id)
        if group is None:
            raise ValueError(f"request_id is {shown(request_id)}; no such request is waiting or running")
        with self.tell(AbortRequest(request_id)):
            self.whole = False
            self._abort(group)
            self.whole = True
        return self._take_one(request_id)

    def _abort(self, group: RequestGroup) -> None:
        for request in group.members:
            if request.finish_reason is None:
                request.finish_reason = "abort"
                self.report(request)

    # --- reports ------------------------------------------------------------------------------------------

    def report(self, request: Request) -> None:
        """Let it be told what became of a request. One that has ended frees what it holds."""
        group = self.requests[request.request_id]
        if request.finish_reason is not None:
            spoiled = request.finish_reason == "error" and request.stop_reason == NO_NUMBERS
            if spoiled and self._scheduler.prefixes is not None:
                self._scheduler.prefixes.forget(request)
            self._emitter.close(request)
            self._scheduler.remove(request)
        self._tell(group)

    def _tell(self, group: RequestGroup) -> None:
        """Let it be told as it stands. One of which all have ended is not here any more."""
        finished = group.finished
        if finished or group.kind is not RequestOutputKind.FINAL_ONLY:
            self._reports[group.request_id] = group
        if finished:
            del self.requests[group.request_id]
            if not self.requests:
                self.in_flight = ()
            for each in group.members:
                self._clock.ended(each)
                self._stats.num_cached_tokens += each.num_cached_tokens

    def take(self, request_ids: Container[str]) -> RequestOutput | None:
        """The oldest report of these requests, None if there is none. Of each the latest is kept until it is taken."""
        name = next((name for name in self._reports if name in request_ids), None)
        return None if name is None else self._take_one(name)

    def _take_one(self, name: str) -> RequestOutput:
        group = self._reports[name]
        report, told = group.output(self._told.get(group, ()))
        rest = (
            {each: self._told[each] for each in self._told if each is not group} if group.finished else None
        )
        # No call from here on: it is taken, and what it told is told.
        del self._reports[name]
        if rest is not None:
            self._told = rest
        elif told:
            self._told[group] = told
        return report

    def take_unclaimed(self) -> list[RequestOutput]:
        """All reports that nobody takes by id."""
        names = [name for name in self._reports if name not in self.claimed]
        if len(names) <= 1:
            return [self._take_one(name) for name in names]
        told, taken = dict(self._told), []
        for group in map(self._reports.__getitem__, names):
            report, now = group.output(told.pop(group, ()))
            taken.append(report)
            if now and not group.finished:
                told[group] = now
        left = {name: group for name, group in self._reports.items() if name in self.claimed}
        # No call from here on: they are taken, and what they told is told.
        self._reports, self._told = left, told
        return taken

    @property
    def has_unfinished(self) -> bool:
        """Whether requests wait or run, or reports that nobody takes by id are there."""
        return not self.requests.keys() <= self.forsaken or not self._reports.keys() <= self.claimed

    # --- what broke off -----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put right what broke off, if anything did; then forget who is forsaken."""
        if not self.whole:
            self._recover()
        if self.forsaken:
            gone = sorted(self.forsaken)  # what they hold is freed in an order that all ranks have
            with self.tell(AbandonRequests(tuple(gone))):
                self._forget(gone)

    def _forget(self, gone: Sequence[str]) -> None:
        self.whole = False
        for request_id in gone:
            if request_id in self.requests:
                self._abort(self.requests[request_id])
            self._reports.pop(request_id, None)
        self._told = {group: told for group, told in self._told.items() if group.request_id not in gone}
        self.claimed.difference_update(gone)
        self.forsaken = self.forsaken.difference(gone)
        self.whole = True

    def _recover(self) -> None:
        """May itself break off, and begins again then."""
        for flight in reversed(self.in_flight):
            flight.undo(self._scheduler.table)
        waiting: list[Request] = []
        for group in list(self.requests.values()):
            if any(each.finish_reason == "abort" for each in group.members):  # all of them, or none
                for each in group.members:
                    each.finish_reason = each.finish_reason or "abort"
            for each in group.members:
                each.leave()
                if each.finish_reason is None:
                    waiting.append(each)
                else:
                    self._emitter.close(each)
            if group.finished:
                self._tell(group)
        self._scheduler.restart(waiting)
        self._renew()
        self.in_flight = ()
        self.whole = True

    def settle(self) -> None:
        """The tokens of the oldest step stand, whatever breaks off from here on."""
        self.in_flight = self.in_flight[1:]
