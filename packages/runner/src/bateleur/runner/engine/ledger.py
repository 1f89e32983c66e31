"""The requests of an engine, what is reported of them, and what stands when something breaks off."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.arguments import shown
from bateleur.runner.engine.output_processor import NO_NUMBERS, OutputProcessor
from bateleur.runner.engine.request_clock import RequestClock
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request import Request
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.stats import EngineStats

_Emitting: TypeAlias = tuple[Sequence[Request], NDArray[np.int32], NDArray[np.int32]]
_NOBODY: _Emitting = ((), np.empty(0, np.int32), np.empty(0, np.int32))


class Ledger:
    """Who is here, and what is reported of them: every request that was added ends in one report, or is forsaken.

    A step, or any other change, may break off wherever an error or an interrupt reaches it. It begins by `restore` and
    by setting `whole` to False, and ends by setting it to True. What broke off is put right by the next `restore`: a
    request then has the tokens that it had after a whole step, and is recomputed from these, since caches may be half
    written and tables half filled. Nothing is trusted for that but `requests` and their tokens.
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
        self.requests: dict[str, Request] = {}
        """Those that wait or run."""
        self.whole = True
        self.emitting = _NOBODY
        """Requests that are being given tokens, and how many tokens and drafts they had before, (S,) each."""
        self.claimed: set[str] = set()
        """Requests whose reports somebody takes by id."""
        self.forsaken: set[str] = set()
        """Those of them that nobody waits for any more."""
        self._reports: dict[str, RequestOutput] = {}
        self._scheduler = scheduler
        self._emitter = emitter
        self._stats = stats
        self._clock = clock
        self._renew = renew

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is waiting, running, or reported and not taken."""
        self.restore()
        return request_id in self.requests or request_id in self._reports

    def add(self, *requests: Request) -> None:
        """Queue requests, all or none. ValueError for an id that is here already."""
        for request in requests:
            if request.request_id in self:
                raise ValueError(
                    f"request_id is {shown(request.request_id)}; a request of that id is already waiting or running"
                )
        self.whole = False
        for request in requests:
            self._scheduler.add(request)
        self.requests |= {request.request_id: request for request in requests}
        self.whole = True

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; what it emitted so far is in the result. ValueError for an unknown id."""
        self.restore()
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id is {shown(request_id)}; no such request is waiting or running")
        self.whole = False
        request.finish_reason = "abort"
        self.report(request)
        report = self._reports.pop(request_id)
        self.whole = True
        return report

    # --- reports ------------------------------------------------------------------------------------------

    def report(self, request: Request) -> None:
        """Let its report be taken. One that has ended frees what it holds."""
        if request.finish_reason is None:
            self._reports[request.request_id] = request.output()
            return
        spoiled = request.finish_reason == "error" and request.stop_reason == NO_NUMBERS
        if spoiled and self._scheduler.prefixes is not None:
            self._scheduler.prefixes.forget(request)
        self._close(request)
        self._scheduler.remove(request)
        self._drop(request)

    def take(self, request_ids: Container[str]) -> RequestOutput | None:
        """The oldest report of these requests, None if there is none. Of each the latest is kept until it is taken."""
        found = next((name for name in self._reports if name in request_ids), None)
        return None if found is None else self._reports.pop(found)

    def take_unclaimed(self) -> list[RequestOutput]:
        """All reports that nobody takes by id."""
        taken = [report for name, report in self._reports.items() if name not in self.claimed]
        self._reports = {name: report for name, report in self._reports.items() if name in self.claimed}
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
            self.whole = False
            gone = self.forsaken
            for request_id in gone:
                request = self.requests.get(request_id)
                if request is not None:
                    request.finish_reason = "abort"
                    self.report(request)
                self._reports.pop(request_id, None)
            self.claimed -= gone
            self.forsaken = self.forsaken - gone
            self.whole = True

    def _recover(self) -> None:
        """May itself break off, and begins again then."""
        for request, num_tokens, num_drafts in zip(*self.emitting, strict=True):
            request.rewind(int(num_tokens) - len(request.prompt_token_ids))
            if request.row >= 0:
                self._scheduler.table.num_drafts[request.row] = num_drafts
        for request in list(self.requests.values()):
            if request.finish_reason is not None:
                self._close(request)
                self._drop(request)
        self._scheduler.restart(self.requests.values())
        self._renew()
        self.emitting = _NOBODY
        self.whole = True

    def settle(self) -> None:
        """The tokens that were given stand, whatever breaks off from here on."""
        self.emitting = _NOBODY

    def _close(self, request: Request) -> None:
        self._emitter.close(request)
        self._reports[request.request_id] = request.output()

    def _drop(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._clock.ended(request)
        self._stats.num_cached_tokens += request.num_cached_tokens
