"""Ctrl-C waits for the end of what must not break off."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class Interrupts:
    """Held from `hold` to `release`, in the main thread; no other gets any. A second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self._before: Any = None
        self._noted = False

    def hold(self) -> None:
        """From here on they wait."""
        if current_thread() is main_thread() and callable(before := signal.getsignal(signal.SIGINT)):
            self._before, self._noted = before, False
            signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """One that came is raised now."""
        if (before := self._before) is not None:
            self._before = None
            signal.signal(signal.SIGINT, before)
            if self._noted:
                before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            self.release()
        self._noted = True
