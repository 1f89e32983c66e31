"""One caller at a time, in one process: an engine has no locks, so nobody else may be inside."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import ParamSpec, TypeVar

import torch

from bateleur.runner.errors import EngineDead
from bateleur.runner.utils.device import use_device

P = ParamSpec("P")
R = TypeVar("R")


class ExclusiveAccess:
    """Guard that rejects concurrent and re-entrant calls to an object, and makes its device current for each call."""

    def __init__(self, device: torch.device) -> None:
        """device: where the object computes."""
        self.device = device
        self.holder: int | None = None
        """The thread that is inside."""
        self._process, self._closed = os.getpid(), False

    def close(self) -> None:
        """Nobody has a turn any more."""
        self._closed = True

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked off."""
        if (process := os.getpid()) != self._process:
            raise RuntimeError(
                f"this LLM was made in process {self._process}, and this is process {process}: torch's threads do not "
                "survive a fork. Make an LLM in each process, or start processes by 'spawn'"
            )

    def take(self) -> None:
        """Raises RuntimeError at once if somebody is inside, or in a process that was forked off; EngineDead if it was
        closed.
        """
        me = get_ident()
        self.check_process()
        if self._closed:
            raise EngineDead("it was closed")
        # No call from here on: neither another thread nor a signal comes in between.
        if self.holder == me:
            raise RuntimeError(
                "this LLM is in the middle of a call, which called it again: from a drafter or a policy?"
            )
        if self.holder is not None:
            raise RuntimeError(
                "another thread is inside this LLM, which serves one at a time: give all requests to one thread, or "
                "hold a lock around every call"
            )
        self.holder = me


def exclusive(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method hold the turn of its object, `self._turn`, while it runs, with the object's device as the current
    one of the calling thread.
    """

    @wraps(method)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        turn: ExclusiveAccess = args[0]._turn  # type: ignore[attr-defined]
        turn.take()
        try:
            with use_device(turn.device):
                return method(*args, **kwargs)
        finally:
            turn.holder = None

    return held
