"""`EagerBackend`: no graphs; a replay calls the function. For devices without CUDA graphs, and for comparison."""

from bateleur.cudagraph.backends.base import CapturedBody, GraphBackend
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import Body, Execution, S, T


class EagerBackend(GraphBackend):
    """Keeps the body (function) instead of capturing it. A replay calls the body, and returns new tensors."""

    name = "eager"

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Keep `body` without running it. Each replay calls it."""
        return CapturedBody(key, lambda state: body(Execution(key, state)))
