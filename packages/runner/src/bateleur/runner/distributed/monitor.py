"""The thread of the first rank that starts the other ranks, watches them, and finds out which rank has failed."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from subprocess import Popen, TimeoutExpired
from threading import Event, Thread

from bateleur.runner.distributed.connections import Progress, RankFault, RankProcess, RankStatus, Sign, StartPhase
from bateleur.runner.errors import RankFailed

_POLL_SECONDS = 0.1  # between two checks of the time limit
_GATHER_SECONDS = 0.3  # after a first failure, for failures of other ranks: a consequence can arrive before its cause
_REPLY_SECONDS = 2.0  # for a rank to send its status
_EXIT_SECONDS = 5.0  # for a rank to exit by itself


class RankMonitor(Progress):
    """Watches the other ranks from start to end. At the first failure it sets `fault` and kills all other ranks."""

    def __init__(self, start: Callable[[], Sequence[RankProcess]], abort: Callable[[], None], limit: float) -> None:
        """Start the other ranks.

        start: starts them, in the monitor's thread. abort: aborts collectives that this rank waits in. limit: seconds
        until all ranks must have loaded the model; then `end` is called.
        """
        self.fault: RankFailed | None = None
        self.on_fault: Callable[[RankFailed], None] | None = None  # called with the fault in the monitor's thread
        super().__init__(time.monotonic(), limit)
        self._abort = abort
        self._phases, self._over = {phase: Event() for phase in StartPhase}, Event()
        self._signs: dict[int, RankFault | RankStatus] = {}
        self._wake, self._closing = Pipe(duplex=False)
        ranks: Future[Sequence[RankProcess]] = Future()
        self._thread = Thread(target=self._run, args=(start, ranks), name="bateleur-monitor", daemon=True)
        self._thread.start()
        self.ranks = ranks.result()  # the other ranks

    def wait(self, phase: StartPhase) -> None:
        """Wait until all other ranks have reached a phase. Raises RankFailed."""
        self._idle = True  # a rank that hangs in its start is to be named, not this one
        self._phases[phase].wait()
        self._idle = False
        if self.fault is not None:
            raise self.fault

    def wait_over(self) -> RankFailed | None:
        """Wait briefly after an error on this rank. Return the failure of another rank, its likely cause, or None."""
        self._over.wait(_GATHER_SECONDS)
        if self._signs:
            self._over.wait()
        return self.fault

    def close(self) -> None:
        """End the other ranks, and wait until their processes are gone."""
        self._closing.close()
        self._thread.join()

    def _run(self, start: Callable[[], Sequence[RankProcess]], started: Future[Sequence[RankProcess]]) -> None:
        try:
            ranks = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(ranks)
        failed = self._watch({each.connection.status: each for each in ranks})
        try:
            if failed:
                self._find_fault(ranks)
            for each in ranks:
                each.connection.close()
            _end(ranks, 0.0 if failed else _EXIT_SECONDS)
            if self.fault is not None:
                try:
                    self._abort()
                finally:
                    if self.on_fault is not None:
                        self.on_fault(self.fault)
        finally:  # the first rank waits for these events
            for event in (*self._phases.values(), self._over):
                event.set()

    def _watch(self, ranks: dict[Connection, RankProcess]) -> bool:
        """Watch the ranks. Return True at a sign of failure or after the time limit, False after `close`."""
        missing = {phase: {each.rank for each in ranks.values()} for phase in StartPhase}
        while not self._signs and time.monotonic() - self._since <= self._limit:
            for found in wait([self._wake, *ranks], _POLL_SECONDS):
                if found is self._wake:
                    return False
                assert isinstance(found, Connection)
                rank, message = ranks[found].rank, _read(ranks[found])
                if isinstance(message, StartPhase):
                    missing[message].discard(rank)
                elif isinstance(message, RankFault):
                    self._signs[rank] = message
            for phase, others in missing.items():
                if not others:
                    self._phases[phase].set()
        return True

    def _find_fault(self, ranks: Sequence[RankProcess]) -> None:
        """Collect the states of all ranks, and set `fault` to the failure of the rank that has failed."""
        elapsed = time.monotonic() - self._since
        hangs, signs = not self._signs, self._signs
        deadline = time.monotonic() + (_REPLY_SECONDS if hangs else _GATHER_SECONDS)
        if hangs:
            signs[0] = self.status()
            for each in ranks:
                with suppress(OSError):
                    each.connection.status.send(None)  # a status request
        silent = {each.connection.status: each for each in ranks if each.rank not in signs}
        while silent and (left := deadline - time.monotonic()) > 0:
            for found in wait(list(silent), left):
                assert isinstance(found, Connection)
                message = _read(silent[found])
                if not isinstance(message, StartPhase):
                    signs[silent.pop(found).rank] = message
        if hangs:
            text = f"does not answer, {elapsed:.3g} s after a step began"
            signs |= {each.rank: RankFault(Sign.SILENT, text) for each in silent.values()}
        rank, found_fault = find_failure(signs, elapsed)
        exited = found_fault.sign == Sign.EXITED
        process = next((each.process for each in ranks if each.rank == rank), None)
        self.fault = RankFailed(rank, _describe_exit(process) if exited else found_fault.cause)
        if found_fault.trace:
            self.fault.add_note(found_fault.trace)


def _read(rank: RankProcess) -> StartPhase | RankFault | RankStatus:
    """Read a status message. If the connection is closed, return that the rank has exited."""
    try:
        message: StartPhase | RankFault | RankStatus = rank.connection.status.recv()
        return message
    except (EOFError, OSError):
        return RankFault(Sign.EXITED, _describe_exit(None))


def _describe_exit(process: Popen[bytes] | None) -> str:
    """Return how a rank that has closed its connections has exited. Wait for its process, None if unknown, to do so."""
    if process is None:
        return "has left"
    try:
        code = process.wait(_EXIT_SECONDS)
    except TimeoutExpired:
        return "has closed its connections"
    if code >= 0:
        return f"has left with exit code {code}"
    named = {each.value: each.name for each in signal.Signals}
    return f"was ended by {named.get(-code, f'signal {-code}')}"


def _end(ranks: Sequence[RankProcess], seconds: float) -> None:
    """Wait up to `seconds` for the ranks to exit, then kill the others."""
    deadline = time.monotonic() + seconds
    for process in (each.process for each in ranks):
        if process is not None:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()


def find_failure(signs: Mapping[int, RankFault | RankStatus], seconds: float) -> tuple[int, RankFault]:
    """Return the rank that has most likely failed first, and how. signs: last message or state of each rank.

    seconds: time for which the ranks have made no progress, for the error message.
    A rank that has received fewer messages than others, or is outside of a collective, counts as stuck. If several
    ranks are stuck or all wait, the rank with the fewest messages is returned, because the others may wait for it: the
    first rank waits to send the next message to a rank that does not read. Of ranks with equally many messages, those
    that wait for the next one come last, and those in a collective before them.
    """
    most = max((each.num_messages for each in signs.values() if isinstance(each, RankStatus)), default=0)

    def fault(sign: RankFault | RankStatus) -> RankFault:
        if isinstance(sign, RankFault):
            return sign
        lags = sign.num_messages < most or not sign.in_collective
        where = "waiting for messages" if sign.idle else sign.frame
        kind = Sign.STUCK if lags and not sign.idle else Sign.WAITING
        return RankFault(kind, f"has stood still for {seconds:.3g} s {where}")

    def order(rank: int) -> tuple[int, ...]:
        sign = signs[rank]
        progress = (sign.num_messages, sign.idle, sign.in_collective) if isinstance(sign, RankStatus) else ()
        return found[rank].sign, *progress, rank

    found = {rank: fault(sign) for rank, sign in signs.items()}
    rank = min(found, key=order)
    return rank, found[rank]
