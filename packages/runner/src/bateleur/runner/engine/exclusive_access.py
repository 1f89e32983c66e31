"""Rejects concurrent calls of an engine, which has no locks."""

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
        self.device = device
        self.holder: int | None = None
        """The thread that is in a call."""
        self.closed = False
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process."""
        if (process := os.getpid()) != self._process:
            raise RuntimeError(
                f"this LLM was made in process {self._process}, and this is process {process}: torch's threads do not "
                "survive a fork. Make an LLM in each process, or start processes by 'spawn'"
            )

    def take(self) -> None:
        """Start a call.
        Raises RuntimeError if another call is active or the process was forked, EngineDead after `close`.
        """
        me = get_ident()
        self.check_process()
        if self.closed:
            raise EngineDead("it was closed")
        # No call from here on, so that no thread or signal interrupts.
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
    """Decorate a method so that it holds the guard `self._access` and makes the guard's device current."""

    @wraps(method)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        access: ExclusiveAccess = args[0]._access  # type: ignore[attr-defined]
        access.take()
        try:
            with use_device(access.device):
                return method(*args, **kwargs)
        finally:
            access.holder = None

    return held
