"""The thread that alone calls an `LLM`, and those who read what it reports from their event loops."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from threading import Event, Lock, Thread, current_thread
from typing import TypeVar

from bateleur.runner.engine.admission_limit import AdmissionLimit
from bateleur.runner.errors import EngineDead
from bateleur.runner.llm import LLM
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.utils.device import make_current, of_this_thread

T = TypeVar("T")

MAX_FAILURES = 3
"""Steps that may fail one after the other, with no token in between, before the engine counts as dead."""
_LEAVING = 1.0
"""Seconds in which this thread ends by itself when another rank has failed."""
_log = logging.getLogger(__name__)


class Reader:
    """What one caller has asked for, in one event loop: the reports of some requests, as they come.

    Of a request that reports faster than it is read, reports are merged, so at most one of each waits here.
    """

    def __init__(self, requests: Iterable[RequestGroup]) -> None:
        """To be made in the event loop that reads it."""
        self.loop = asyncio.get_running_loop()
        self.unfinished = {request.request_id for request in requests}
        """Ids whose last report has not been read."""
        self._lock = Lock()
        self._arrived: dict[str, RequestOutput] = {}
        self._error: Exception | None = None
        self._told = False  # whether it is on the way to be woken, or awake
        self._wake = asyncio.Event()

    def take_in(self, output: RequestOutput) -> bool:
        """In the engine's thread: a report has come. Whether the reader is to be woken."""
        with self._lock:
            name = output.request_id
            if name in self._arrived:
                self._arrived[name].add(output)
            else:
                self._arrived[name] = output
            return self._tell()

    def fail(self, error: Exception) -> bool:
        """In the engine's thread: nothing more will come. Whether the reader is to be woken."""
        with self._lock:
            self._error = error
            return self._tell()

    def _tell(self) -> bool:
        asleep, self._told = not self._told, True
        return asleep

    def wake(self) -> None:
        """In the event loop: there is something to read."""
        self._wake.set()

    async def read(self) -> list[RequestOutput]:
        """The reports that have come since the last call, at least one; [] when all requests have ended.

        Raises EngineDead if no more will come.
        """
        if not self.unfinished:
            return []
        await self._wake.wait()
        with self._lock:
            self._wake.clear()
            self._told = False
            arrived, self._arrived = list(self._arrived.values()), {}
            error = self._error
            if error is not None:
                self._wake.set()
        if not arrived and error is not None:
            raise error
        self.unfinished -= {output.request_id for output in arrived if output.finished}
        return arrived


class EngineThread(Thread):
    """Makes an `LLM`, runs its steps while there are requests, and sleeps while there are none.

    OpenMP keeps a team of threads for each thread that computes, and more of them than cores wait for each other by way
    of the kernel: a step took twice as long where the model was made in another thread than it ran in (2 cores).

    What others want of the engine waits in an inbox, which is emptied between two steps. A step that raises costs its
    requests a recomputation; after `MAX_FAILURES` of them the thread ends, and `error` says why.
    """

    llm: LLM
    places: AdmissionLimit
    """Who is here, or will be when its prompt is tokenised."""

    def __init__(self, make: Callable[[], LLM], max_queued_requests: int) -> None:
        """`open` starts it, and no other method is called before."""
        super().__init__(name="bateleur-engine", daemon=True)
        self._make: Callable[[], LLM] | None = make
        self._device = of_this_thread()  # so that "cuda" means the caller's current GPU
        self._made: Future[None] = Future()
        self._max_queued_requests = max_queued_requests
        self.error: BaseException | None = None
        """What the engine died of."""
        self.ended: EngineDead | None = None
        """What is told to whoever comes too late."""
        self._readers: dict[str, Reader] = {}
        self._inbox: deque[tuple[Callable[[], None], Callable[[EngineDead], None]]] = deque()
        self._lock = Lock()  # between the last look into the inbox, and what is put there
        self._wake = Event()
        self._stopping = self._draining = False
        self._failures, self._tokens_before = 0, -1

    def open(self) -> None:
        """Start, and wait until there is an LLM; raises what making it raised."""
        self.start()
        try:
            self._made.result()
        except BaseException:
            self.stop()  # an interrupt: it ends as soon as the LLM is made
            if self._made.done():
                self.join()
            raise

    # --- from any thread ----------------------------------------------------------------------------------

    def add(self, requests: list[RequestGroup], reader: Reader) -> None:
        """Run these requests, whose ids nobody else has, and report to this reader."""
        names = tuple(reader.unfinished)
        self._post(partial(self._add, requests, names, reader), partial(self._refuse, names, reader))

    def release(self, names: Iterable[str]) -> None:
        """These requests will not come."""
        for name in names:
            self.places.release(name)
        self._wake.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End those of these requests that have not ended by themselves, before the next step."""
        self._post(partial(self._abort, tuple(request_ids)), lambda dead: None)

    def call(self, function: Callable[[LLM], T]) -> Future[T]:
        """What a function finds between two steps, or in an engine that has ended."""
        future: Future[T] = Future()
        settle = partial(_settle, future, function, self.llm)
        self._post(settle, lambda dead: settle())
        return future

    def stop(self, *, drain: bool = False) -> None:
        """End the thread before the next step; `drain`: when no request is left."""
        self._draining = True
        self._stopping = self._stopping or not drain
        self._wake.set()

    def stop_and_join(self) -> None:
        """The same at once, waiting for the end of the step that runs."""
        self.stop()
        if self is not current_thread() and self.is_alive():
            self.join()

    def _post(self, action: Callable[[], None], otherwise: Callable[[EngineDead], None]) -> None:
        with self._lock:
            if self.ended is None:
                self._inbox.append((action, otherwise))
                self._wake.set()
                return
        otherwise(self.ended)

    # --- in the thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it is stopped, or the engine is dead."""
        assert self._make is not None
        try:
            make_current(self._device)
            self.llm = self._make()
            running = self.llm.limits.max_num_seqs * self.llm.config.parallel.data_parallel_size
            self.places = AdmissionLimit(running, self._max_queued_requests)
        except BaseException as error:
            self._made.set_exception(error)
            return
        finally:
            self._make = None
        self.llm.on_fault(self._give_up)
        self._made.set_result(None)
        self._serve()

    def _serve(self) -> None:
        try:
            while not self._stopping and self._turn():
                pass
            self._abort(tuple(self._readers))
        except BaseException as error:
            self.error = error
            _log.exception("the engine has died")
        self._end()
        self.llm.close()

    def _give_up(self, fault: EngineDead) -> None:
        """In the thread that watches other ranks: no step will end any more. Nobody waits for this one if it hangs."""
        self.join(_LEAVING)
        if self.is_alive():
            self.error = fault
            self._end()

    def _turn(self) -> bool:
        """One round: what was asked for, then a step. Whether to go on."""
        while self._inbox:
            action, _ = self._inbox.popleft()
            action()
        if self.llm.has_unfinished_requests:
            self._deliver(self._step())
        elif self._draining and not self.places:
            return False
        else:
            self._wake.wait()
            self._wake.clear()
        return True

    def _step(self) -> list[RequestOutput]:
        try:
            return self.llm.step()
        except EngineDead:
            raise
        except Exception as error:
            tokens = self.llm.get_metrics().num_emitted_tokens
            self._failures = 1 + (self._failures if tokens == self._tokens_before else 0)
            self._tokens_before = tokens
            if self._failures >= MAX_FAILURES:
                raise
            _log.warning("a step failed; its requests are computed again: %s", _named(error), exc_info=True)
            return []

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Give reports to their readers, and wake each event loop once."""
        asleep: dict[asyncio.AbstractEventLoop, list[Reader]] = {}
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue
            if output.finished:
                self._forget(output.request_id)
            if reader.take_in(output):
                asleep.setdefault(reader.loop, []).append(reader)
        for loop, readers in asleep.items():
            if not _wake_all(loop, readers):
                self.abort(name for name, reader in self._readers.items() if reader.loop is loop)

    def _add(self, requests: list[RequestGroup], names: tuple[str, ...], reader: Reader) -> None:
        self._readers |= dict.fromkeys(names, reader)
        self.llm.enter(*requests)

    def _abort(self, names: tuple[str, ...]) -> None:
        self._deliver([self.llm.abort(name) for name in names if name in self._readers])

    def _forget(self, name: str) -> None:
        del self._readers[name]
        self.places.release(name)

    def _refuse(self, names: tuple[str, ...], reader: Reader, dead: EngineDead) -> None:
        self.release(names)
        if reader.fail(dead):
            _wake_all(reader.loop, [reader])

    def _end(self) -> None:
        """Tell everybody who waits, and whoever comes from here on; nobody hangs."""
        dead = EngineDead(
            "it was closed" if self.error is None else f"the engine died of {_named(self.error)}"
        )
        dead.__cause__ = self.error
        with self._lock:
            if self.ended is not None:
                return
            self.ended = dead
        for _, otherwise in tuple(self._inbox):
            otherwise(dead)
        for name, reader in tuple(self._readers.items()):
            self._refuse((name,), reader, dead)
        self._inbox.clear()
        self._readers.clear()


def _wake_all(loop: asyncio.AbstractEventLoop, readers: list[Reader]) -> bool:
    """Whether there was anybody to wake: an event loop may have been closed with requests under way."""
    try:
        loop.call_soon_threadsafe(_wake, readers)
    except RuntimeError:
        return False
    return True


def _wake(readers: list[Reader]) -> None:
    for reader in readers:
        reader.wake()


def _settle(future: Future[T], function: Callable[[LLM], T], llm: LLM) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(llm))
    except Exception as error:
        future.set_exception(error)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
