"""`BodyCapture`: captures a function as one full graph, or as piecewise graphs with eager parts between them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph._capture_tracker import CaptureTracker
from bateleur.cudagraph._trees import replace_tensors
from bateleur.cudagraph.backends.base import CapturedBody, Graph
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import AddressMoved, CaptureError, DanglingExternal, GraphError
from bateleur.cudagraph.execution import Body, Execution, S, T
from bateleur.cudagraph.modes import CudaGraphMode

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor."""


class EagerPart(NamedTuple):
    """A function that runs eagerly between two graphs of a replay, such as attention.

    Attributes:
        name: name of the part in errors.
        fn: the function. A replay calls `fn(state, *tensors)` with the state of the step.
        tensors: arguments of `fn`, which the graph before this part writes. Those in memory of the graph pool are
            views that do not keep it allocated, see `CaptureTracker.non_owning`.
        result: the tensor that the graph after this part reads: a view of pool memory that does not keep it allocated,
            or a view of an argument if `fn` returned one.
        layout: shape, strides, dtype and device of `result`.
    """

    name: str
    fn: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    result: Tensor
    layout: _Layout

    def run(self, state: Any) -> None:
        """Call the function, and copy its result to the tensor that the next graph reads.

        Raises `GraphError` if the result has another shape, strides, dtype or device than at capture.
        """
        result = self.fn(state, *self.tensors)
        found = _layout(result) if isinstance(result, Tensor) else type(result).__name__
        if found != self.layout:
            raise GraphError(f"{self.name} returned {found}; the next graph reads {self.layout}")
        if result.data_ptr() != self.result.data_ptr():
            with torch.inference_mode():
                self.result.copy_(result)


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class BodyCapture(Generic[S]):
    """Captures one call of a body, the function to capture, with the staged `state`.

    A FULL key gives one graph, a PIECEWISE key one graph before, between and after its eager parts.
    """

    def __init__(self, tracker: CaptureTracker, key: BatchExecutionDescriptor, state: S) -> None:
        self._graphs: list[Graph] = []
        self._parts: list[EagerPart] = []
        self._tracker, self._key, self._state = tracker, key, state
        self._in_body = False

    def capture(self, body: Body[S, T], *modes: AbstractContextManager[Any]) -> CapturedBody[S, T]:
        """Call the body once, within the torch modes `modes`. If it fails, the capture is ended, and `CaptureError`
        is raised.
        """
        piecewise = self._key.mode is CudaGraphMode.PIECEWISE
        execution = Execution(self._key, self._state, self._eager_call if piecewise else None)
        with ExitStack() as stack:
            for mode in (torch.no_grad(), *modes):
                stack.enter_context(mode)
            try:
                self._begin()
                output = body(execution)
                self._end()
                output = replace_tensors(output, self._tracker.non_owning)
            except BaseException as error:
                self._in_body = False
                self._tracker.abort()
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                raise CaptureError(f"{self._key}: {type(error).__name__} in the body: {error}") from error
        key, first, rest = self._key, self._graphs[0], tuple(zip(self._parts, self._graphs[1:], strict=True))

        def run(state: S) -> T:
            first.replay()
            try:
                for part, graph in rest:
                    part.run(state)
                    graph.replay()
            except (AddressMoved, DanglingExternal) as error:
                raise GraphError(f"{key}: between two pieces: {error}") from error
            return output

        return CapturedBody(key, run, self._graphs, self._tracker.memory)

    def _begin(self) -> None:
        self._tracker.begin()
        self._in_body = True

    def _end(self) -> None:
        self._in_body = False
        self._graphs.append(self._tracker.end())

    def _eager_call(self, fn: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        function = getattr(fn, "func", fn)  # of a partial, whose own text contains its arguments and may read a device
        function_name = getattr(function, "__qualname__", type(function).__name__)
        name = f"{self._key}: eager part {len(self._parts)} ({function_name})"
        if not self._in_body:
            raise CaptureError(f"{name}: eager() was called within an eager part, or after the capture")
        self._end()
        result = fn(self._state, *tensors)
        if not isinstance(result, Tensor):
            raise CaptureError(f"{name} must return one tensor, not {type(result).__name__}")
        arguments = tuple(self._tracker.non_owning(tensor) for tensor in tensors)
        self._begin()
        argument_storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if result.untyped_storage().data_ptr() not in argument_storages:
            result = self._tracker.result_buffer(result)
        self._parts.append(EagerPart(name, fn, arguments, self._tracker.non_owning(result), _layout(result)))
        return result
