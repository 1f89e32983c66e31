"""One execution of a body, and the places where it may leave the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Generic, TypeAlias, TypeVar

from torch import Tensor

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor

# S is the state that a producer stages and a body reads, T what a body returns: here and in the other files.
S = TypeVar("S")
T = TypeVar("T")


Cut: TypeAlias = Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Tensor]
"""What a piecewise capture does where the body leaves the graph: run `fn(state, *tensors)` between two pieces."""


class Execution(Generic[S]):
    """What a body gets: the key it runs for (None when it runs eagerly), the state, and `eager`."""

    __slots__ = ("_cut", "key", "state")

    def __init__(self, key: BatchExecutionDescriptor | None, state: S, cut: Cut | None = None) -> None:
        self.key = key
        self.state = state
        self._cut = cut

    def eager(self, fn: Callable[Concatenate[S, ...], Tensor], *tensors: Tensor) -> Tensor:
        """`fn(state, *tensors)`; in a piecewise graph this runs between two captured pieces, on each replay again.

        `fn` must take all that belongs to the batch from the `state` it is given, since a replay passes the state of
        its own step, and may depend otherwise only on what lives as long as the graph. Its result has the same
        shape, strides and dtype for every batch of one key. It must not keep an argument: later pieces use the memory
        of arguments again. Work that it launches on another stream must be joined before it returns.
        """
        return fn(self.state, *tensors) if self._cut is None else self._cut(fn, tensors)


Body: TypeAlias = Callable[[Execution[S]], T]
"""A forward pass: everything on the device that a graph should hold."""
