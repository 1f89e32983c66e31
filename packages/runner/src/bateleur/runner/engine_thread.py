"""The thread that calls an `LLM`, and the readers that pass its outputs to event loops."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event, Lock, Thread, current_thread
from typing import TypeVar

from bateleur.runner.engine.request_registry import require_new
from bateleur.runner.errors import EngineDead, QueueFull
from bateleur.runner.llm import LLM
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.utils.device import current_device, make_current

T = TypeVar("T")

MAX_FAILURES = 3
"""Number of consecutive failed steps, with no token in between, after which the engine is dead."""
_EXIT_SECONDS = 1.0
"""Time in which this thread may end by itself after another rank has failed."""
_log = logging.getLogger(__name__)


class AdmissionLimit:
    """Limits the number of live requests, and reserves their ids from before tokenization until they end."""

    def __init__(self, running: int, waiting: int) -> None:
        self._running, self._waiting = running, waiting
        self._taken: dict[str, int] = {}
        self._lock = Lock()
        self._names = map("request-{}".format, count(1))  # a signal in the frame of a generator would end it

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, names: Sequence[str | None], size: int, *, continued: bool = False) -> list[str]:
        """Admit requests, all or none, and return their ids. Requests without an id get one.
        Each counts as `size` sequences. continued: whether they continue requests that were admitted, so that a full
        queue does not refuse them. Raises QueueFull if there is no room now, and ValueError if there never will be, or
        for an id that is in use.
        """
        wanted, room = size * len(names), self._running + self._waiting
        if wanted > room:
            raise ValueError(
                f"{wanted} sequences are asked for at once; max_num_seqs and max_queued_requests leave room for {room}"
            )
        with self._lock:
            if not continued and sum(self._taken.values()) + wanted > room:
                raise QueueFull(f"{self._waiting} requests are waiting already, which is max_queued_requests")
            given = [name for name in names if name is not None]
            require_new(given, self._taken)
            free = (name for name in self._names if name not in self._taken and name not in given)
            taken = [next(free) if name is None else name for name in names]
            self._taken |= dict.fromkeys(taken, size)
        return taken

    def release(self, name: str) -> None:
        """Free the id of a request that has ended or was refused."""
        with self._lock:
            self._taken.pop(name, None)


class OutputReader:
    """Outputs of one caller's requests, passed to its event loop.
    If a request produces outputs faster than they are read, they are merged, so that at most one per request is queued.
    """

    def __init__(self, requests: Iterable[RequestGroup]) -> None:
        """Must be called in the event loop that reads the outputs."""
        self.loop = asyncio.get_running_loop()
        self.unfinished = {request.request_id for request in requests}
        """Ids of requests whose last output was not read yet."""
        self.queued = Future[None]()
        """Ends when the requests are queued, or with the error for which they can't be."""
        self._lock = Lock()
        self._arrived: dict[str, RequestOutput] = {}
        self._error: Exception | None = None
        self._woken = False  # whether `wake` is scheduled or done
        self._wake = asyncio.Event()

    def deliver(self, output: RequestOutput) -> bool:
        """Add an output, in the engine thread. Returns whether the caller must schedule `wake` in the reader's loop."""
        with self._lock:
            queued = self._arrived.setdefault(output.request_id, output)
            if queued is not output:
                queued.add(output)
            return self._needs_wake()

    def fail(self, error: Exception) -> bool:
        """End with an error (engine thread). Returns whether `wake` must be scheduled in the reader's event loop."""
        with suppress(InvalidStateError):  # they were queued, or the caller has gone
            self.queued.set_exception(error)
        with self._lock:
            self._error = error
            return self._needs_wake()

    def _needs_wake(self) -> bool:
        asleep, self._woken = not self._woken, True
        return asleep

    def wake(self) -> None:
        """Let `read` return; called in the event loop."""
        self._wake.set()

    async def read(self) -> list[RequestOutput]:
        """Return the outputs since the last call, at least one; [] if all requests have ended.
        Raises EngineDead if the engine has ended, and the ValueError of requests that can't be queued.
        """
        if not self.unfinished:
            return []
        await self._wake.wait()
        with self._lock:
            self._wake.clear()
            self._woken = False
            arrived, self._arrived = list(self._arrived.values()), {}
            error = self._error
            if error is not None:
                self._wake.set()
        if not arrived and error is not None:
            raise error
        self.unfinished -= {output.request_id for output in arrived if output.finished}
        return arrived


class EngineThread(Thread):
    """Creates an `LLM` in this thread and runs its steps while there are requests.
    The model is created in the thread that runs it: OpenMP has a team of threads for each thread that computes, and two
    teams compete for cores (a step took twice as long on 2 cores).
    Other threads post actions to an inbox, which is processed between two steps. If a step raises, its requests are
    recomputed. After `MAX_FAILURES` failed steps in a row the thread ends and `error` has the cause.
    """

    llm: LLM
    admission_limit: AdmissionLimit
    """Ids of all requests, including those being tokenised."""

    def __init__(self, make: Callable[[], LLM], max_queued_requests: int) -> None:
        super().__init__(name="bateleur-engine", daemon=True)
        self._make: Callable[[], LLM] | None = make
        self._device = current_device()  # so that "cuda" means the caller's current GPU
        self._made: Future[None] = Future()
        self._max_queued_requests = max_queued_requests
        self.error: BaseException | None = None
        """The exception that ended the engine."""
        self.ended: EngineDead | None = None
        """The error for requests after the end; None before."""
        self._readers: dict[str, OutputReader] = {}
        self._inbox: deque[tuple[Callable[[], None], Callable[[EngineDead], None]]] = deque()
        self._lock = Lock()  # makes checking `ended` and posting to the inbox one operation
        self._wake = Event()
        self._stopping = self._draining = False
        self._failures, self._tokens_before = 0, -1

    def open(self) -> None:
        """Start the thread and wait for the `LLM`. Raises the errors of the constructor."""
        self.start()
        try:
            self._made.result()
        except BaseException:
            self.stop()  # an interrupt: it ends as soon as the LLM is made
            if self._made.done():
                self.join()
            raise

    def add(self, requests: list[RequestGroup], reader: OutputReader) -> None:
        """Run these requests and report to this reader. No other request may have their ids.
        `reader.queued` ends when they are queued, or with the error for which they can't be.
        """
        names = tuple(reader.unfinished)
        self._post(partial(self._add, requests, names, reader), partial(self._refuse, names, reader))

    def release(self, names: Iterable[str]) -> None:
        """Free the request ids `names` for other requests, because their own requests will not be added."""
        for name in names:
            self.admission_limit.release(name)
        self._wake.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests before the next step; readers get their outputs so far. Ignores requests that have ended."""
        self._post(partial(self._abort, tuple(request_ids)), lambda dead: None)

    def call(self, function: Callable[[LLM], T]) -> Future[T]:
        """Call `function(llm)` between two steps, or at once if the engine has ended; return its future result."""
        future: Future[T] = Future()
        settle = partial(_settle, future, partial(function, self.llm))
        self._post(settle, lambda dead: settle())
        return future

    def stop(self, *, drain: bool = False) -> None:
        """End the thread before the next step, or with `drain` when no request is left."""
        self._draining = True
        self._stopping = self._stopping or not drain
        self._wake.set()

    def stop_and_join(self) -> None:
        """End the thread before the next step and wait for its end."""
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

    # Called in this thread.

    def run(self) -> None:
        """Create the `LLM` and run steps until the thread is stopped or the engine is dead."""
        assert self._make is not None
        try:
            make_current(self._device)
            self.llm = self._make()
            running = self.llm.limits.max_num_seqs * self.llm.config.parallel.data_parallel_size
            self.admission_limit = AdmissionLimit(running, self._max_queued_requests)
        except BaseException as error:
            self._made.set_exception(error)
            return
        finally:
            self._make = None
        self.llm.on_fault(self._on_rank_fault)
        self._made.set_result(None)
        try:
            while not self._stopping and self._run_once():
                pass
            self._abort(tuple(self._readers))
        except BaseException as error:
            self.error = error
            _log.exception("the engine has died")
        self._end()
        self.llm.close()

    def _on_rank_fault(self, fault: EngineDead) -> None:
        """End the engine. Called by the thread that monitors ranks, because the engine thread may hang in a step."""
        self.join(_EXIT_SECONDS)
        if self.is_alive():
            self.error = fault
            self._end()

    def _run_once(self) -> bool:
        while self._inbox:
            action, _ = self._inbox.popleft()
            action()
        if self.llm.has_unfinished_requests:
            self._deliver(self._step())
        elif self._draining and not self.admission_limit:
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
        asleep: dict[asyncio.AbstractEventLoop, list[OutputReader]] = {}
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue
            if output.finished:
                self._forget(output.request_id)
            if reader.deliver(output):
                asleep.setdefault(reader.loop, []).append(reader)
        for loop, readers in asleep.items():
            if not _wake_all(loop, readers):
                self.abort(name for name, reader in self._readers.items() if reader.loop is loop)

    def _add(self, requests: list[RequestGroup], names: tuple[str, ...], reader: OutputReader) -> None:
        self._readers |= dict.fromkeys(names, reader)
        try:
            self.llm.add_prepared(*requests)
        except ValueError as error:  # an adapter, or parameters that can't be sent to other ranks
            for name in names:
                self._forget(name)
            if reader.fail(error):
                _wake_all(reader.loop, [reader])
            return
        with suppress(InvalidStateError):  # the caller has gone, or another rank has failed
            reader.queued.set_result(None)

    def _abort(self, names: tuple[str, ...]) -> None:
        outputs = []
        for name in names:
            if name in self._readers:
                with suppress(ValueError):  # it ended in a step that raised; the next one returns its output
                    outputs.append(self.llm.abort(name))
        self._deliver(outputs)

    def _forget(self, name: str) -> None:
        del self._readers[name]
        self.admission_limit.release(name)

    def _refuse(self, names: tuple[str, ...], reader: OutputReader, dead: EngineDead) -> None:
        self.release(names)
        if reader.fail(dead):
            _wake_all(reader.loop, [reader])

    def _end(self) -> None:
        """Fail all readers, the actions queued by `_post`, and later calls, so that no caller waits forever."""
        dead = EngineDead("it was closed" if self.error is None else f"the engine died of {_named(self.error)}")
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


def _wake_all(loop: asyncio.AbstractEventLoop, readers: list[OutputReader]) -> bool:
    """Schedule `OutputReader.wake` of all readers in their event loop. Returns False if the loop was closed."""
    try:
        loop.call_soon_threadsafe(_wake, readers)
    except RuntimeError:
        return False
    return True


def _wake(readers: list[OutputReader]) -> None:
    for reader in readers:
        reader.wake()


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """End a future with the result of a function, or its error, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
