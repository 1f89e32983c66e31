"""The live requests of an engine, their undelivered outputs, and recovery after an interrupted step."""

from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from bateleur.runner.engine.messages import AbandonRequests, AbortRequest, AddRequests, Message, SendMessage
from bateleur.runner.engine.output_processor import NO_NUMBERS, OutputProcessor
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.lora.adapter_manager import AdapterManager
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_group import ReportedState, RequestGroup
from bateleur.runner.scheduling.scheduler import Scheduler, service_order
from bateleur.runner.utils.arguments import shown


def require_new(names: Iterable[str], used: Container[str]) -> None:
    """Raise ValueError if one of the new request ids is in use, or occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen or name in used:
            raise ValueError(f"request_id is {shown(name)}; a request of that id is already waiting or running")
        seen.add(name)


class RequestRegistry:
    """Tracks live requests and undelivered outputs.

    Every added request produces exactly one final output unless its caller abandons it.

    An error or signal can interrupt a step, or any other change, anywhere. Each change starts with `restore`, sets
    `consistent` to False, and sets it to True at its end. After an interruption, the next `restore` gives each request
    the tokens that it had after the last complete step, and queues it for recomputation, because caches may be partly
    written. Recovery relies on nothing but `requests` and their tokens. Steps in flight are lost.
    """

    def __init__(
        self, scheduler: Scheduler, outputs: OutputProcessor, reset: Callable[[], None], adapters: AdapterManager | None
    ) -> None:
        """reset: resets all other state that an interrupted step may have left half written."""
        self.requests: dict[str, RequestGroup] = {}
        self.consistent = True
        self.send: SendMessage | None = None
        """Sends each change to the other ranks before it is made; None for one rank."""
        self.in_flight: tuple[StepInFlight, ...] = ()
        """Steps whose outcome is unknown, oldest first; () without live requests."""
        self.fetched_by_caller: set[str] = set()
        """Requests whose outputs a caller takes by id."""
        self.abandoned: set[str] = set()
        """Requests whose caller is gone. Some may not have been queued."""
        self._undelivered: dict[str, RequestGroup] = {}
        """Requests with output that was not taken yet."""
        self._reported: dict[RequestGroup, tuple[ReportedState, ...]] = {}
        """How much of each DELTA request was taken."""
        self._scheduler, self._outputs, self._reset, self._adapters = scheduler, outputs, reset, adapters

    def __contains__(self, request_id: object) -> bool:
        self.restore()
        return request_id in self.requests or request_id in self._undelivered

    def add(self, *groups: RequestGroup) -> None:
        """Queue requests, all or none. Raises ValueError for an id that is in use, or twice among them, and for a LoRA
        adapter that cannot be read, see `AdapterManager.acquire`.
        """
        require_new((group.request_id for group in groups), self)
        with self.sending(AddRequests(groups)):
            refused = self.add_here(*groups)
        if refused is not None:
            raise refused

    def add_here(self, *groups: RequestGroup) -> ValueError | None:
        """Queue requests on this rank, see `add`. Returns the error if none was queued; it is the same on all ranks."""
        self.consistent = False
        refused = self._acquire_adapters(groups)
        if refused is None:
            for group in groups:
                for request in group.members:
                    self._scheduler.add(request)
            added = {group.request_id: group for group in groups}
            self._give_slots(added)
            # No call from here on: the requests are added.
            self.requests |= added
        self.consistent = True
        return refused

    def _acquire_adapters(self, groups: Sequence[RequestGroup]) -> ValueError | None:
        adapted = [(group, group.lora_request) for group in groups if group.lora_request is not None]
        if not adapted:
            return None
        assert self._adapters is not None, "the input processor refuses adapters"
        try:
            digests = self._adapters.acquire([adapter for _, adapter in adapted])
        except ValueError as error:
            return error
        for (group, _), digest in zip(adapted, digests, strict=True):
            for request in group.members:
                request.adapter_slot, request.prefix.root = -1, digest
        return None

    def _give_slots(self, added: dict[str, RequestGroup] | None = None) -> None:
        """Let requests run whose LoRA adapter now has a slot on the device. added: those not in `requests` yet."""
        if not self._scheduler.waiting_for_slot:
            return
        assert self._adapters is not None
        in_order = sorted(self._scheduler.waiting_for_slot, key=service_order)
        live = ChainMap(self.requests, added or {})
        groups = list(dict.fromkeys(live[each.request_id] for each in in_order))
        names = [group.lora_request.lora_name for group in groups if group.lora_request is not None]
        for group, slot in zip(groups, self._adapters.assign(names), strict=True):
            for request in group.members if slot else ():
                self._scheduler.give_slot(request, slot)

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; returns its output so far. Raises ValueError for an unknown id."""
        self.restore()
        group = self.requests.get(request_id)
        if group is None:
            raise ValueError(f"request_id is {shown(request_id)}; no such request is waiting or running")
        with self.sending(AbortRequest(request_id)):
            self.consistent = False
            self._abort(group)
            self.consistent = True
        return self._take_one(request_id)

    def _abort(self, group: RequestGroup) -> None:
        for request in group.members:
            if request.finish_reason is None:
                request.finish_reason = "abort"
                self.report(request)

    def sending(self, message: Message) -> AbstractContextManager[None]:
        """Return a context that sends a message to the other ranks; apply it to this rank inside the context."""
        return nullcontext() if self.send is None else self.send(message)

    def report(self, request: Request) -> None:
        """Queue the output of a request. If the request has ended, free its table row and blocks."""
        group = self.requests[request.request_id]
        if request.finish_reason is not None:
            invalid = request.finish_reason == "error" and request.output.stop_reason == NO_NUMBERS
            if invalid and self._scheduler.prefixes is not None:
                self._scheduler.prefixes.forget(request)
            self._outputs.close(request)
            self._scheduler.remove(request)
        self._queue_output(group)
        self._give_slots()

    def _queue_output(self, group: RequestGroup) -> None:
        """Queue the output of a prompt with its continuations. If all have ended, the group is not live any more."""
        finished = group.finished
        if finished or group.kind is not RequestOutputKind.FINAL_ONLY:
            self._undelivered[group.request_id] = group
        if finished:
            del self.requests[group.request_id]
            if self._adapters is not None and group.lora_request is not None:
                self._adapters.release(group.lora_request.lora_name, held=_has_slot(group))
            if not self.requests:
                self.in_flight = ()
            for each in group.members:
                self._outputs.record_end(each)

    def take(self, request_ids: Container[str]) -> RequestOutput | None:
        """Return the output of the request that was queued first among these requests; None if none is queued.
        A request is queued at most once. This call creates the output, so it includes tokens that the request got after
        it was queued.
        """
        name = next((name for name in self._undelivered if name in request_ids), None)
        return None if name is None else self._take_one(name)

    def _take_one(self, name: str) -> RequestOutput:
        group = self._undelivered[name]
        output, reported = group.output(self._reported.get(group, ()))
        others = None
        if group.finished:
            others = {each: state for each, state in self._reported.items() if each is not group}
        # No call from here on: the output is taken, and counts as reported.
        del self._undelivered[name]
        if others is not None:
            self._reported = others
        elif reported:
            self._reported[group] = reported
        return output

    def take_all(self) -> list[RequestOutput]:
        """Return all queued outputs, except those of requests in `fetched_by_caller`, which `take` returns."""
        names = [name for name in self._undelivered if name not in self.fetched_by_caller]
        if len(names) <= 1:
            return [self._take_one(name) for name in names]
        reported, outputs = dict(self._reported), []
        for group in map(self._undelivered.__getitem__, names):
            output, state = group.output(reported.pop(group, ()))
            outputs.append(output)
            if state and not group.finished:
                reported[group] = state
        left = {name: group for name, group in self._undelivered.items() if name in self.fetched_by_caller}
        # No call from here on: the outputs are taken, and count as reported.
        self._undelivered, self._reported = left, reported
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or `take_all` has an output to return."""
        return not self.requests.keys() <= self.abandoned or not self._undelivered.keys() <= self.fetched_by_caller

    def restore(self) -> None:
        """Recover from an interrupted change, if there was one. Then drop abandoned requests."""
        if not self.consistent:
            self._recover()
        if self.abandoned:
            gone = sorted(self.abandoned)  # all ranks free blocks in the same order
            with self.sending(AbandonRequests(tuple(gone))):
                self._forget(gone)

    def _forget(self, gone: Sequence[str]) -> None:
        self.consistent = False
        for request_id in gone:
            if request_id in self.requests:
                self._abort(self.requests[request_id])
            self._undelivered.pop(request_id, None)
        self._reported = {each: state for each, state in self._reported.items() if each.request_id not in gone}
        self.fetched_by_caller.difference_update(gone)
        self.abandoned = self.abandoned.difference(gone)
        self.consistent = True

    def _recover(self) -> None:
        """Recover from an interrupted change. If the recovery is interrupted itself, the next `restore` repeats it."""
        for step in reversed(self.in_flight):
            step.undo(self._scheduler.table)
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
                    self._outputs.close(each)
            if group.lora_request is not None and not _has_slot(group):
                for each in group.members:
                    each.adapter_slot = -1
            if group.finished:
                self._queue_output(group)
        if self._adapters is not None:
            live = ((group, group.lora_request) for group in self.requests.values())
            self._adapters.recount((lora.lora_name, _has_slot(group)) for group, lora in live if lora is not None)
        self._scheduler.restart(waiting)
        self._give_slots()
        self._reset()
        self.in_flight = ()
        self.consistent = True


def _has_slot(group: RequestGroup) -> bool:
    return all(each.adapter_slot > 0 for each in group.members)
