"""Connections between the first rank and another one, status messages, and the thread that answers the monitor."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from subprocess import Popen
from threading import Event, Lock, Thread, get_ident
from types import FrameType

from bateleur.runner.distributed import ranks as collectives
from bateleur.runner.errors import CollectiveBroken, RankFailed


@dataclass(frozen=True, slots=True)
class Started:
    """Status message: the rank runs, and can join the process group."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Status message: the rank has loaded the model, and waits for messages."""


@dataclass(frozen=True, slots=True)
class RankError:
    """Status message: the rank has raised an error, and exits.

    error: type and message, on one line. in_collective: whether a collective failed, usually because another rank has
    failed.
    """

    error: str
    trace: str
    in_collective: bool


@dataclass(frozen=True, slots=True)
class Exited:
    """Status of a process that has exited without a message. how: text such as "has left with exit code 1"."""

    how: str


@dataclass(frozen=True, slots=True)
class NoReply:
    """Status of a rank that does not answer."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Status message: the rank must reply with a `RankStatus`."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status message: what a rank is doing now.

    num_messages: number of engine messages that it has received. idle: whether it waits for the next one.
    in_collective: whether it is in a collective. frame: innermost frames of its thread.
    """

    num_messages: int
    idle: bool
    in_collective: bool
    frame: str


@dataclass(frozen=True, slots=True)
class RankConnection:
    """The two connections between the first rank and another one. Both break when either process ends.

    messages: for engine messages in order, and their replies. status: for the threads that monitor the ranks.
    """

    messages: Connection
    status: Connection

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


_CLOSING_SECONDS = 5.0
"""For the worker to see the end of messages after the end of the status connection."""
_NUM_FRAMES = 4
"""Innermost frames in a status."""


class RankHeartbeat(Thread):
    """Answers status requests about its creator's thread. Ends the process on timeout, or if the first rank is gone."""

    def __init__(self, connection: RankConnection, limit: float) -> None:
        """limit: seconds that loading the model may take."""
        super().__init__(name="bateleur-heartbeat", daemon=True)
        self._status, self._worker, self._lock, self._left = connection.status, get_ident(), Lock(), Event()
        self._limit = limit
        self._since: float | None = time.monotonic()
        self._num_messages = 0
        self.start()

    def begin(self, limit: float) -> None:
        """Record that a message has arrived whose processing may take `limit` seconds."""
        self._limit = limit
        self._num_messages += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """Record that the message is processed."""
        self._since = None

    def leave(self) -> None:
        """Record that the first rank sends no more messages; this process goes on or exits by itself."""
        self._left.set()

    def started(self) -> None:
        """Report that the rank can join the process group."""
        self._send(Started())

    def ready(self) -> None:
        """Report that the model is loaded."""
        self.end()
        self._send(Ready())

    def fail(self, error: BaseException) -> None:
        """Report an error."""
        in_collective = isinstance(error, CollectiveBroken | RankFailed)
        with suppress(OSError):  # the first rank is gone
            trace = "".join(traceback.format_exception(error))
            self._send(RankError(type_and_message(error), trace, in_collective))

    def _send(self, message: Started | Ready | RankError | RankStatus) -> None:
        with self._lock:
            self._status.send(message)

    def run(self) -> None:
        """Answer status requests until the first rank is gone."""
        try:
            while True:
                if self._status.poll(1.0):
                    self._status.recv()
                    self._send(self._current())
                since = self._since
                if since is not None and time.monotonic() - since > self._limit:
                    where = self._current().frame
                    self._send(RankError(f"it stood still for {self._limit:g} s {where}", "", True))
                    break
        except (EOFError, OSError):
            if self._left.wait(_CLOSING_SECONDS):  # it may be in its last step
                return
        os._exit(1)

    def _current(self) -> RankStatus:
        return status_of(self._worker, self._num_messages, idle=self._since is None)


def status_of(thread: int, num_messages: int, *, idle: bool) -> RankStatus:
    """Return what a thread of this process does. thread: its identifier. idle: whether it waits for messages."""
    frame: FrameType | None = None if idle else sys._current_frames().get(thread)
    frames: list[str] = []
    inside = False
    while frame is not None:
        code = frame.f_code
        frames.append(f"{code.co_name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}")
        inside = inside or code.co_filename == collectives.__file__
        frame = frame.f_back
    return RankStatus(num_messages, idle, inside, f"in {' < '.join(frames[:_NUM_FRAMES])}")


def type_and_message(error: BaseException) -> str:
    """Return text with the type and the message of an error."""
    return f"{type(error).__name__}: {error}"
