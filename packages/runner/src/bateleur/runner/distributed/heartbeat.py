"""The thread of every rank but the first that answers the monitor, and exits the process if the first rank is gone."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from threading import Event, Lock, Thread, get_ident
from types import FrameType

from bateleur.runner.distributed import ranks as collectives
from bateleur.runner.distributed.connections import RankConnection, RankError, RankStatus, Ready, Started
from bateleur.runner.errors import CollectiveBroken, RankFailed

_CLOSING_SECONDS = 5.0
"""For the worker to see the end of messages after the end of the status connection."""
_NUM_FRAMES = 4
"""Innermost frames in a status."""


class RankHeartbeat(Thread):
    """Sends the status of the thread that created it to the first rank.

    Exits the process when the first rank is gone, or when a time limit is over.
    """

    def __init__(self, connection: RankConnection, limit: float) -> None:
        """limit: maximum seconds for the start of the rank."""
        super().__init__(name="bateleur-heartbeat", daemon=True)
        self._status, self._worker, self._lock, self._left = connection.status, get_ident(), Lock(), Event()
        self._limit = limit
        self._since: float | None = time.monotonic()
        self._num_messages = 0
        self.start()

    def begin(self, limit: float) -> None:
        """Record that a message has arrived, which may take `limit` seconds."""
        self._limit = limit
        self._num_messages += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """Record that the message is processed."""
        self._since = None

    def leave(self) -> None:
        """Record that the first rank sends no more messages. This process then goes on or exits by itself."""
        self._left.set()

    def started(self) -> None:
        """Report that the rank can join the process group."""
        self._send(Started())

    def ready(self) -> None:
        """Report that the model is loaded."""
        self.end()
        self._send(Ready())

    def fail(self, error: BaseException) -> None:
        """Report an error to the first rank."""
        in_collective = isinstance(error, CollectiveBroken | RankFailed)
        with suppress(OSError):  # the first rank is gone
            trace = "".join(traceback.format_exception(error))
            self._send(RankError(type_and_message(error), trace, in_collective))

    def _send(self, message: Started | Ready | RankError | RankStatus) -> None:
        with self._lock:
            self._status.send(message)

    def run(self) -> None:
        """Answer until the first rank is gone."""
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
    """Return the status of a thread of this process."""
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
    """Return the type of an error and its message, as one text."""
    return f"{type(error).__name__}: {error}"
