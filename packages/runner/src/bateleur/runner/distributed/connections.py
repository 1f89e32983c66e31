"""Connections between the first rank and another one, status messages, and the thread that answers the monitor."""

import math
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from multiprocessing.connection import Connection
from subprocess import Popen
from threading import Event, Lock, Thread, get_ident

from torch.cuda import streams

from bateleur.runner.distributed import process_group
from bateleur.runner.distributed import ranks as collectives
from bateleur.runner.errors import CollectiveBroken, RankFailed

_CLOSING_SECONDS = 5.0  # for the worker to see the end of messages after the end of the status connection
_NUM_FRAMES = 4  # innermost frames in a status
_WAITING_FILES = {collectives.__file__, process_group.__file__, streams.__file__}
"""Files with functions that wait for all ranks. With NCCL, the host waits for a CUDA event after a collective."""


class StartPhase(Enum):
    """Status message of a starting rank: it joins the process group next, or the model is loaded.

    The first rank joins when all others have sent STARTED. Before that it notices at once if one of them has failed.
    """

    STARTED = "joins the process group"
    READY = "has loaded the model, and waits for messages"


class Sign(IntEnum):
    """Signs that a rank has failed. If several ranks show signs, the rank whose sign is the first one in this enum has
    most likely failed, and made the other ranks fail (`monitor.find_failure`).
    """

    RAISED, EXITED, SILENT, STUCK, BROKEN_COLLECTIVE, WAITING = range(6)


@dataclass(frozen=True, slots=True)
class RankFault:
    """A sign of failure: a rank sends it before it exits, or the monitor makes it for a silent or exited rank."""

    sign: Sign
    cause: str  # such as "has left with exit code 1"
    trace: str = ""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Reply to a status request: what a rank is doing now.

    num_messages: number of engine messages, including the current one. Loading the model is not counted. idle: whether
    the rank waits for the next message, or for other ranks. in_collective: whether it waits in a collective, for other
    ranks to join the process group, or for its GPU, which may be in a collective. frame: innermost frames of its
    thread.
    """

    num_messages: int
    idle: bool
    in_collective: bool
    frame: str


@dataclass(frozen=True, slots=True)
class RankConnection:
    """The two connections between the first rank and another one. Both break when either process ends.

    messages: engine messages and their replies. status: messages of the threads that monitor the ranks.
    """

    messages: Connection  # engine messages in order, and their replies
    status: Connection  # between the threads that monitor the ranks

    def close(self) -> None:
        """Close both connections. The other rank reads an end of file."""
        self.messages.close()
        self.status.close()


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Another rank, from the view of the first rank. process: None if torchrun has started it."""

    rank: int
    connection: RankConnection
    process: Popen[bytes] | None


class Progress:
    """Records what the thread that runs an engine does, for the threads that monitor ranks.

    The first rank sends each change of the engine to all ranks as a message (`engine.messages`), for example to run a
    step. Recorded are the number of messages so far, and the start and the time limit of the current one. Loading the
    model is the work before the first message: no rank counts it, so the counts of all ranks can be compared.
    """

    def __init__(self, since: float, limit: float) -> None:
        """since: `time.monotonic` when the work in progress began; infinite if there is none, so that no limit applies.
        limit: seconds that this work may take.
        """
        self._worker, self._since, self._limit, self._num_messages, self._idle = get_ident(), since, limit, 0, False

    def begin(self, limit: float) -> None:
        """Record that the calling thread begins to process a message, which may take `limit` seconds."""
        self._worker, self._limit, self._idle = get_ident(), limit, False
        self._num_messages += 1
        self._since = time.monotonic()

    def set_limit(self, limit: float) -> None:
        """Set the maximum seconds of the message in progress."""
        self._limit = limit

    def wait_for_others(self) -> None:
        """Record that this rank has finished its part of the message, and waits for other ranks."""
        self._idle = True

    def end(self) -> None:
        """Record that the message is processed."""
        self._since, self._idle = math.inf, True

    def status(self) -> RankStatus:
        """Return what the thread does now."""
        frame = None if self._idle else sys._current_frames().get(self._worker)
        stack = [] if frame is None else [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
        inside = any(code.co_filename in _WAITING_FILES for code, _ in stack)
        inner = [f"{code.co_name}, {os.path.basename(code.co_filename)}:{line}" for code, line in stack[:_NUM_FRAMES]]
        return RankStatus(self._num_messages, self._idle, inside, f"in {' < '.join(inner)}")


class RankHeartbeat(Progress, Thread):
    """Thread that tells the first rank, on request, what the thread that created it does.

    It ends the process if loading the model or processing a message takes longer than its time limit. It also does so
    if the first rank is gone, unless `leave` is called within 5 s.
    """

    def __init__(self, connection: RankConnection, limit: float) -> None:
        """limit: seconds that loading the model may take."""
        Progress.__init__(self, time.monotonic(), limit)
        Thread.__init__(self, name="bateleur-heartbeat", daemon=True)
        self._status, self._lock, self._left = connection.status, Lock(), Event()
        self.start()

    def leave(self) -> None:
        """Record that the first rank has closed its connection for messages, and the process exits by itself.

        When the status connection breaks, too, this thread then stops without ending the process.
        """
        self._left.set()

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank to the first rank."""
        sign = Sign.BROKEN_COLLECTIVE if isinstance(error, CollectiveBroken | RankFailed) else Sign.RAISED
        trace = "".join(traceback.format_exception(error))
        with suppress(OSError):  # the first rank is gone
            self.send(RankFault(sign, f"raised {type_and_message(error)}", trace))

    def send(self, message: StartPhase | RankFault | RankStatus) -> None:
        """Send a status message to the first rank."""
        with self._lock:
            self._status.send(message)

    def run(self) -> None:
        """Answer status requests until the first rank is gone, or a time limit has passed."""
        try:
            while True:
                if self._status.poll(1.0):
                    self._status.recv()
                    self.send(self.status())
                if time.monotonic() - self._since > self._limit:
                    cause = f"has stood still for {self._limit:g} s {self.status().frame}"
                    self.send(RankFault(Sign.BROKEN_COLLECTIVE, cause))
                    break
        except (EOFError, OSError):
            if self._left.wait(_CLOSING_SECONDS):  # it may be in its last step
                return
        os._exit(1)


def type_and_message(error: BaseException) -> str:
    """Return text with the type and the message of an error."""
    return f"{type(error).__name__}: {error}"
