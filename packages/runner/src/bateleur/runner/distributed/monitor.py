"""In the first of several ranks: the thread that starts the others, minds them, and says why one has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from subprocess import TimeoutExpired
from threading import Event, Thread, get_ident

from bateleur.runner.distributed.connections import At, Failed, Gone, Here, Member, Ready, Silent, Where
from bateleur.runner.distributed.heartbeat import at
from bateleur.runner.distributed.verdict import Sign, verdict
from bateleur.runner.errors import RankFailed

_PACE = 0.1
"""Seconds between two looks at the clock."""
_SETTLING = 0.3
"""Seconds behind a first sign in which others may come: what follows from a fault may be heard of before it."""
_ANSWERING = 2.0
"""Seconds in which a rank says where it is."""
_ENDING = 5.0
"""Seconds in which a rank ends by itself."""
_NEVER = float("inf")


class RankMonitor:
    """Minds the other ranks from their start to their end.

    The first sign of a fault is the end of all: the others are killed, so that nothing waits for them any more, and
    `fault` says which rank it was, and why.
    """

    def __init__(self, start: Callable[[], Sequence[Member]], free: Callable[[], None]) -> None:
        """start: makes the others, in the thread that stays until they are gone. free: ends what this process waits
        for in a collective.
        """
        self.fault: RankFailed | None = None
        self.on_fault: Callable[[RankFailed], None] | None = None
        """Told of it, in the thread that watches."""
        self._free = free
        self._minded, self._limit, self._since, self._num_orders = get_ident(), _NEVER, _NEVER, 0
        self._resting = False
        self._here, self._ready, self._over = Event(), Event(), Event()
        self._heard: dict[int, Sign] = {}
        self._wake, self._bell = Pipe(duplex=False)
        started: Future[Sequence[Member]] = Future()
        self._thread = Thread(target=self._run, args=(start, started), name="bateleur-watch", daemon=True)
        self._thread.start()
        self.members = started.result()
        """The other ranks."""

    # --- from the thread that computes --------------------------------------------------------------------

    def begin(self, limit: float) -> None:
        """All ranks begin what takes no longer than so many seconds."""
        self._minded, self._limit, self._resting = get_ident(), limit, False
        self._num_orders += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """It has ended here."""
        self._since = _NEVER

    def rest(self) -> None:
        """It has ended here, and this rank waits for the others."""
        self._resting = True

    def wait_here(self) -> None:
        """Until all others can join. Raises what has failed."""
        self._wait(self._here)

    def wait_ready(self) -> None:
        """Until all others are loaded. Raises what has failed."""
        self._wait(self._ready)

    def _wait(self, event: Event) -> None:
        event.wait()
        if self.fault is not None:
            raise self.fault

    def wait_over(self) -> RankFailed | None:
        """What has failed if it was another rank; behind an error here, which may come before its cause is known."""
        self._over.wait(_SETTLING)
        if self._heard:
            self._over.wait()
        return self.fault

    def close(self) -> None:
        """End the others, and wait until they are gone."""
        self._bell.close()
        self._thread.join()

    # --- in the thread that watches -----------------------------------------------------------------------

    def _run(self, start: Callable[[], Sequence[Member]], started: Future[Sequence[Member]]) -> None:
        try:
            members = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(members)
        if self._mind({member.link.watch: member for member in members}):
            self._judge(members)
        else:
            _end(members)
        for member in members:
            member.link.close()
        for event in (self._here, self._ready, self._over):
            event.set()

    def _mind(self, members: dict[Connection, Member]) -> bool:
        """Until it is closed, or there is a sign of a fault; whether there is."""
        coming = {member.rank for member in members.values()}
        loading = set(coming)
        while not self._heard and time.monotonic() - self._since <= self._limit:
            for found in wait([self._wake, *members], _PACE):
                if found is self._wake:
                    return False
                assert isinstance(found, Connection)
                member = members[found]
                message = _read(member)
                if isinstance(message, Here):
                    coming.discard(member.rank)
                elif isinstance(message, Ready):
                    loading.discard(member.rank)
                elif isinstance(message, Failed | Gone):
                    self._heard[member.rank] = message
            if not coming:
                self._here.set()
            if not loading:
                self._ready.set()
        return True

    def _judge(self, members: Sequence[Member]) -> None:
        """Hear everybody, end them, and say who it was."""
        took = time.monotonic() - self._since
        hung, signs = not self._heard, self._heard
        deadline = time.monotonic() + (_ANSWERING if hung else _SETTLING)
        if hung:
            signs[0] = at(self._minded, self._num_orders, idle=self._resting)
            for member in members:
                with suppress(OSError):
                    member.link.watch.send(Where())
        open_ = {member.link.watch: member for member in members if member.rank not in signs}
        while open_ and (left := deadline - time.monotonic()) > 0:
            for found in wait(list(open_), left):
                assert isinstance(found, Connection)
                message = _read(open_[found])
                if not isinstance(message, Here | Ready):
                    signs[open_.pop(found).rank] = message
        if hung:
            signs |= {member.rank: Silent() for member in open_.values()}
        rank, cause, trace = verdict(signs, took)
        self.fault = fault = RankFailed(rank, cause)
        if trace:
            fault.add_note(trace)
        for member in members:
            member.link.close()
            if member.process is not None:
                member.process.kill()
                member.process.wait()
        self._free()
        if self.on_fault is not None:
            self.on_fault(fault)


def _read(member: Member) -> Here | Ready | Failed | At | Gone:
    try:
        message: Here | Ready | Failed | At = member.link.watch.recv()
    except (EOFError, OSError):
        return Gone(_how(member))
    return message


def _how(member: Member) -> str:
    """How a process has ended, whose sockets are closed."""
    if member.process is None:
        return "has left"
    try:
        code = member.process.wait(_ENDING)
    except TimeoutExpired:
        return "has closed its connections"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has left with exit code {code}"


def _end(members: Sequence[Member]) -> None:
    """Let them leave, and see that they do."""
    for member in members:
        member.link.close()
    deadline = time.monotonic() + _ENDING
    for member in members:
        if member.process is not None:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                member.process.kill()
                member.process.wait()
