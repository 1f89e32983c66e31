"""No graphs: a replay runs the body. For devices without them, and to compare with."""

from __future__ import annotations

from bateleur.cudagraph.backends.base import GraphBackend, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import Body, Execution, S, T


class EagerBackend(GraphBackend):
    """Keeps the body instead of capturing it. Nothing is frozen, and each replay returns new tensors."""

    name = "eager"

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Keep `body`; it does not run before the first replay."""
        return Recording(key, lambda state: body(Execution(key, state)))
