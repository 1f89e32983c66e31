"""`Execution`: the argument of a captured function: the state of one step, and `eager` to leave the graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Generic, TypeAlias, TypeVar

from torch import Tensor

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor

# In all files of this package, S is the state that a producer stages, and T is what a body returns.
S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True, eq=False, repr=False)
class Execution(Generic[S]):
    """The argument of a body, the function that is captured: one run of the forward pass.

    ``key``: the graph that is captured or run, None if the step runs eagerly. ``state``: the staged state of the step.
    ``eager_call(fn, tensors)``: calls `fn(state, *tensors)` between two pieces of a piecewise capture.
    """

    key: BatchExecutionDescriptor | None
    state: S
    eager_call: Callable[..., Tensor] | None = None

    def eager(self, fn: Callable[Concatenate[S, ...], Tensor], *tensors: Tensor) -> Tensor:
        """Return `fn(state, *tensors)`. In a piecewise graph, `fn` runs eagerly between two pieces on every replay.

        On a replay, `fn` gets the state of the replayed step. It must read everything that depends on the batch from
        the state; anything else that it reads must live as long as the graph. It must not keep a reference to an
        argument, because later pieces reuse the memory. Work on another stream must be joined before it returns. Shape,
        strides and dtype of its result must be the same for every batch of a key.
        """
        return fn(self.state, *tensors) if self.eager_call is None else self.eager_call(fn, tensors)


Body: TypeAlias = Callable[[Execution[S]], T]
"""The function that a graph captures, usually the forward pass of a model."""
