"""A captured body as steps: graphs, and for a piecewise key the eager parts between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic

import torch
from torch import Tensor

from bateleur.cudagraph._trees import replace_tensors
from bateleur.cudagraph._watch import Tape
from bateleur.cudagraph.backends.base import Graph, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import AddressMoved, CaptureError, DanglingExternal, GraphError
from bateleur.cudagraph.execution import Body, Execution, S, T
from bateleur.cudagraph.modes import CudaGraphMode


class EagerPart:
    """A part of the body that runs anew on each replay, between two graphs.

    Args:
        name: for errors.
        fn: called with the state of the step and the arguments.
        tensors: the arguments, at the addresses where the graph before leaves them. Memory of the pool is not owned,
            see `Tape.unowned`.
        result: where the next graph reads the result, in memory of the pool that is not owned; or a view of an
            argument if the part returned one, which is at a fixed address already.
    """

    def __init__(
        self, name: str, fn: Callable[..., Tensor], tensors: tuple[Tensor, ...], result: Tensor
    ) -> None:
        self._name = name
        self._fn = fn
        self._tensors = tensors
        self._result = result
        self._layout = _layout(result)

    def run(self, state: Any) -> None:
        """Run it, and put its result to where the next graph reads it."""
        result = self._fn(state, *self._tensors)
        if not isinstance(result, Tensor) or _layout(result) != self._layout:
            found = _layout(result) if isinstance(result, Tensor) else type(result).__name__
            raise GraphError(f"{self._name} returned {found}; the next graph reads {self._layout}")
        if result.data_ptr() != self._result.data_ptr():
            with torch.inference_mode():
                self._result.copy_(result)


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class Segments(Generic[S]):
    """Captures one call of a body: a FULL key as one graph, a PIECEWISE key as graphs around its eager parts."""

    def __init__(self, tape: Tape, key: BatchExecutionDescriptor, state: S) -> None:
        self._graphs: list[Graph] = []
        self._parts: list[EagerPart] = []
        self._tape = tape
        self._key = key
        self._state = state
        self._in_body = False

    def capture(self, body: Body[S, T], *watchers: AbstractContextManager[Any]) -> Recording[S, T]:
        """Run the body once, under `watchers`.

        Raises:
            CaptureError: from whatever the body raised; the tape is closed then.
        """
        piecewise = self._key.mode is CudaGraphMode.PIECEWISE
        execution = Execution(self._key, self._state, self._cut if piecewise else None)
        with ExitStack() as stack:
            for watcher in (torch.no_grad(), *watchers):
                stack.enter_context(watcher)
            try:
                self._begin()
                output = body(execution)
                self._end()
                kept = replace_tensors(output, self._tape.unowned)
            except BaseException as error:
                self._in_body = False
                self._tape.abort()
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                raise CaptureError(f"{self._key}: {type(error).__name__} in the body: {error}") from error
        run = _in_turns(self._key, kept, self._graphs, self._parts)
        return Recording(self._key, run, self._graphs, self._tape.memory)

    def _begin(self) -> None:
        self._tape.begin()
        self._in_body = True

    def _end(self) -> None:
        self._in_body = False
        self._graphs.append(self._tape.end())

    def _cut(self, fn: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        # A partial goes by its function: the text of its arguments may read a device.
        called = getattr(fn, "func", fn)
        name = f"{self._key}: eager part {len(self._parts)} ({getattr(called, '__qualname__', type(called).__name__)})"
        if not self._in_body:
            raise CaptureError(f"{name}: eager() within an eager part, or after the capture")
        self._end()
        result = fn(self._state, *tensors)
        if not isinstance(result, Tensor):
            raise CaptureError(f"{name} must return one tensor, not {type(result).__name__}")
        held = tuple(self._tape.unowned(tensor) for tensor in tensors)
        self._begin()
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if result.untyped_storage().data_ptr() not in given:
            result = self._tape.receive(result)
        self._parts.append(EagerPart(name, fn, held, self._tape.unowned(result)))
        return result


def _in_turns(
    key: BatchExecutionDescriptor, output: T, graphs: list[Graph], parts: list[EagerPart]
) -> Callable[[Any], T]:
    """A replay: the first graph, then each part and the graph behind it."""
    first, turns = graphs[0], tuple(zip(parts, graphs[1:], strict=True))

    def run(state: Any) -> T:
        first.replay()
        try:
            for part, graph in turns:
                part.run(state)
                graph.replay()
        except (AddressMoved, DanglingExternal) as error:
            raise GraphError(f"{key}: between two pieces: {error}") from error
        return output

    return run
