"""Delays Ctrl-C until the end of a step that must not be interrupted."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class Interrupts:
    """Delays SIGINT from `hold` to `release`, in the main thread. A second Ctrl-C is not delayed."""

    def __init__(self) -> None:
        self._before: Any = None
        self._pending = False

    def hold(self) -> None:
        """Start to delay SIGINT."""
        if current_thread() is main_thread() and callable(before := signal.getsignal(signal.SIGINT)):
            self._before, self._pending = before, False
            signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """Stop delaying, and raise a SIGINT that has arrived meanwhile."""
        if (before := self._before) is not None:
            self._before = None
            signal.signal(signal.SIGINT, before)
            if self._pending:
                before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self.release()
        self._pending = True
