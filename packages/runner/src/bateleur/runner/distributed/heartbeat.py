"""In every rank but the first: the thread that answers for it, and ends it with the first."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from threading import Event, Lock, Thread, get_ident
from types import FrameType

from bateleur.runner.distributed import ranks as collectives
from bateleur.runner.distributed.connections import At, Failed, Here, Link, Ready
from bateleur.runner.errors import CollectiveBroken, RankFailed

_LEAVING = 5.0
"""Seconds in which the end of orders is seen behind that of the watch."""
_FRAMES = 4
"""Of a stack, the innermost, that say where a thread is."""


class RankHeartbeat(Thread):
    """Answers while the thread that made it computes; ends the process when the first rank is gone, or hangs."""

    def __init__(self, link: Link, loading: float) -> None:
        """loading: seconds that its beginning may take."""
        super().__init__(name="bateleur-minder", daemon=True)
        self._watch, self._minded, self._lock, self._left = link.watch, get_ident(), Lock(), Event()
        self.limit = loading
        """Seconds that the order it is at may take."""
        self._since: float | None = time.monotonic()
        self._num_orders = 0
        self.start()

    def begin(self, limit: float) -> None:
        """An order has come, which may take so many seconds."""
        self.limit = limit
        self._num_orders += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """It is carried out."""
        self._since = None

    def leave(self) -> None:
        """The first rank has no more orders: this process goes on, or ends by itself."""
        self._left.set()

    def here(self) -> None:
        """It can join the others."""
        self._tell(Here())

    def ready(self) -> None:
        """It is loaded."""
        self.end()
        self._tell(Ready())

    def fail(self, error: BaseException) -> None:
        """Tell what was raised."""
        in_collective = isinstance(error, CollectiveBroken | RankFailed)
        with suppress(OSError):  # the first is gone
            self._tell(Failed(named(error), "".join(traceback.format_exception(error)), in_collective))

    def _tell(self, message: Here | Ready | Failed | At) -> None:
        with self._lock:
            self._watch.send(message)

    def run(self) -> None:
        """Until the first rank is gone."""
        try:
            while True:
                if self._watch.poll(1.0):
                    self._watch.recv()
                    self._tell(self._at())
                since = self._since
                if since is not None and time.monotonic() - since > self.limit:
                    self._tell(Failed(f"it stood still for {self.limit:g} s {self._at().frame}", "", True))
                    break
        except (EOFError, OSError):
            if self._left.wait(_LEAVING):  # it may be at the last step
                return
        os._exit(1)

    def _at(self) -> At:
        return at(self._minded, self._num_orders, idle=self._since is None)


def at(thread: int, num_orders: int, *, idle: bool) -> At:
    """Where a thread is."""
    frame: FrameType | None = None if idle else sys._current_frames().get(thread)
    here: list[str] = []
    inside = False
    while frame is not None:
        code = frame.f_code
        here.append(f"{code.co_name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}")
        inside = inside or code.co_filename == collectives.__file__
        frame = frame.f_back
    return At(num_orders, idle, inside, f"in {' < '.join(here[:_FRAMES])}")


def named(error: BaseException) -> str:
    """Type and message."""
    return f"{type(error).__name__}: {error}"
