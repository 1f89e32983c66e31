"""The thread of the first rank that starts the other ranks, watches them, and finds out which rank has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from subprocess import TimeoutExpired
from threading import Event, Thread, get_ident
from typing import NamedTuple

from bateleur.runner.distributed.connections import (
    Exited,
    NoReply,
    RankError,
    RankProcess,
    RankStatus,
    Ready,
    Started,
    StatusRequest,
    status_of,
)
from bateleur.runner.errors import RankFailed

_POLL_SECONDS = 0.1
"""Between two checks of the time limit."""
_GATHER_SECONDS = 0.3
"""After a first failure, for failures of other ranks: a consequence can arrive before its cause."""
_REPLY_SECONDS = 2.0
"""For a rank to send its status."""
_EXIT_SECONDS = 5.0
"""For a rank to exit by itself."""
_NEVER = float("inf")

Sign = RankError | Exited | RankStatus | NoReply


class RankMonitor:
    """Watches the other ranks from start to end.

    At the first failure it sets `fault`, which has the failed rank and the cause, and kills all other ranks, so that
    nothing waits for them.
    """

    def __init__(self, start: Callable[[], Sequence[RankProcess]], abort: Callable[[], None]) -> None:
        """start: starts the other ranks, in the monitor's thread. abort: aborts collectives that this rank waits in."""
        self.fault: RankFailed | None = None
        self.on_fault: Callable[[RankFailed], None] | None = None
        """Called with the fault in the monitor's thread."""
        self._abort = abort
        self._worker, self._limit, self._since, self._num_messages = get_ident(), _NEVER, _NEVER, 0
        self._idle = False
        self._started, self._ready, self._over = Event(), Event(), Event()
        self._signs: dict[int, Sign] = {}
        self._wake, self._closing = Pipe(duplex=False)
        ranks: Future[Sequence[RankProcess]] = Future()
        self._thread = Thread(target=self._run, args=(start, ranks), name="bateleur-monitor", daemon=True)
        self._thread.start()
        self.ranks = ranks.result()
        """The other ranks."""

    # --- called by the thread that computes ---------------------------------------------------------------

    def begin(self, limit: float) -> None:
        """Record that all ranks start an operation that may take `limit` seconds."""
        self._worker, self._limit, self._idle = get_ident(), limit, False
        self._num_messages += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """Record that this rank has finished the operation."""
        self._since = _NEVER

    def wait_for_others(self) -> None:
        """Record that this rank has finished its part, and waits for the others."""
        self._idle = True

    def wait_started(self) -> None:
        """Wait until all other ranks have started. Raises RankFailed."""
        self._wait(self._started)

    def wait_ready(self) -> None:
        """Wait until all other ranks are loaded. Raises RankFailed."""
        self._wait(self._ready)

    def _wait(self, event: Event) -> None:
        event.wait()
        if self.fault is not None:
            raise self.fault

    def wait_over(self) -> RankFailed | None:
        """Wait briefly after an error on this rank. Return the failure of another rank, as its likely cause, if any."""
        self._over.wait(_GATHER_SECONDS)
        if self._signs:
            self._over.wait()
        return self.fault

    def close(self) -> None:
        """End the other ranks, and wait until their processes are gone."""
        self._closing.close()
        self._thread.join()

    # --- in the monitor's thread --------------------------------------------------------------------------

    def _run(self, start: Callable[[], Sequence[RankProcess]], started: Future[Sequence[RankProcess]]) -> None:
        try:
            ranks = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(ranks)
        if self._watch({each.connection.status: each for each in ranks}):
            self._kill(ranks)
        else:
            _end(ranks)
        for each in ranks:
            each.connection.close()
        for event in (self._started, self._ready, self._over):
            event.set()

    def _watch(self, ranks: dict[Connection, RankProcess]) -> bool:
        """Watch the ranks until `close` or a sign of failure; returns whether there is one."""
        starting = {each.rank for each in ranks.values()}
        loading = set(starting)
        while not self._signs and time.monotonic() - self._since <= self._limit:
            for found in wait([self._wake, *ranks], _POLL_SECONDS):
                if found is self._wake:
                    return False
                assert isinstance(found, Connection)
                rank = ranks[found].rank
                message = _read(ranks[found])
                if isinstance(message, Started):
                    starting.discard(rank)
                elif isinstance(message, Ready):
                    loading.discard(rank)
                elif isinstance(message, RankError | Exited):
                    self._signs[rank] = message
            if not starting:
                self._started.set()
            if not loading:
                self._ready.set()
        return True

    def _kill(self, ranks: Sequence[RankProcess]) -> None:
        """Collect the states of all ranks, find the rank that has failed, and kill all ranks but this one."""
        elapsed = time.monotonic() - self._since
        hangs, signs = not self._signs, self._signs
        deadline = time.monotonic() + (_REPLY_SECONDS if hangs else _GATHER_SECONDS)
        if hangs:
            signs[0] = status_of(self._worker, self._num_messages, idle=self._idle)
            for each in ranks:
                with suppress(OSError):
                    each.connection.status.send(StatusRequest())
        silent = {each.connection.status: each for each in ranks if each.rank not in signs}
        while silent and (left := deadline - time.monotonic()) > 0:
            for found in wait(list(silent), left):
                assert isinstance(found, Connection)
                message = _read(silent[found])
                if not isinstance(message, Started | Ready):
                    signs[silent.pop(found).rank] = message
        if hangs:
            signs |= {each.rank: NoReply() for each in silent.values()}
        rank, cause, trace = find_failure(signs, elapsed)
        self.fault = fault = RankFailed(rank, cause)
        if trace:
            fault.add_note(trace)
        for each in ranks:
            each.connection.close()
            if each.process is not None:
                each.process.kill()
                each.process.wait()
        self._abort()
        if self.on_fault is not None:
            self.on_fault(fault)


def _read(rank: RankProcess) -> Started | Ready | RankError | RankStatus | Exited:
    try:
        message: Started | Ready | RankError | RankStatus = rank.connection.status.recv()
    except (EOFError, OSError):
        return Exited(_how_exited(rank))
    return message


def _how_exited(rank: RankProcess) -> str:
    """Return a description of how a process whose connections are closed has exited."""
    if rank.process is None:
        return "has left"
    try:
        code = rank.process.wait(_EXIT_SECONDS)
    except TimeoutExpired:
        return "has closed its connections"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has left with exit code {code}"


def _end(ranks: Sequence[RankProcess]) -> None:
    """Let the ranks exit by themselves, and kill those that do not."""
    for each in ranks:
        each.connection.close()
    deadline = time.monotonic() + _EXIT_SECONDS
    for each in ranks:
        if each.process is not None:
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                each.process.kill()
                each.process.wait()


class Failure(NamedTuple):
    """The rank that failed first. cause: text such as "raised ValueError: ..."."""

    rank: int
    cause: str
    trace: str = ""


def find_failure(signs: Mapping[int, Sign], seconds: float) -> Failure:
    """Return the most likely first failure. signs: last message or state of each rank.

    From most to least likely: a rank raised an error outside of a collective, exited, does not reply, has received
    fewer messages than others or is outside of a collective. seconds: time since the current message was sent.
    """
    found = min((_weigh(sign, rank, signs, seconds) for rank, sign in signs.items()), key=lambda each: each[0])
    return found[1]


def _weigh(sign: Sign, rank: int, signs: Mapping[int, Sign], seconds: float) -> tuple[tuple[int, int], Failure]:
    match sign:
        case RankError(error, trace, in_collective):
            return (4 if in_collective else 0, rank), Failure(rank, f"raised {error}", trace)
        case Exited(how):
            return (1, rank), Failure(rank, how)
        case NoReply():
            return (2, rank), Failure(rank, f"does not answer, {seconds:.3g} s after a step began")
        case RankStatus(num_messages, idle, in_collective, frame):
            where = "waiting for messages" if idle else frame
            stuck = Failure(rank, f"has stood still for {seconds:.3g} s {where}")
            others = [other for other in signs.values() if isinstance(other, RankStatus)]
            lags = num_messages < max(other.num_messages for other in others) or not in_collective
            return (3 if lags and not idle else 5, rank), stuck
