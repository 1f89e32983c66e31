"""No graphs: a replay runs the body. For devices without them, and to compare with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from bateleur.cudagraph.backends.base import Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import Body, Execution

S = TypeVar("S")
T = TypeVar("T")


class EagerBackend:
    """Keeps the body instead of capturing it. Nothing is frozen, and each replay returns new tensors."""

    name = "eager"

    def session(self) -> AbstractContextManager[None]:
        """Nothing of the process needs to change."""
        return nullcontext()

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Keep `body`; it does not run before the first replay."""
        return Recording(key, lambda state: body(Execution(key, state)))
