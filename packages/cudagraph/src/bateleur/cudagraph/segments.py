"""A captured body as steps: graphs, and for a piecewise key the eager parts between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from bateleur.cudagraph._memory import Memory
from bateleur.cudagraph.backends.base import External
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import AddressMoved, CaptureError, DanglingExternal, GraphError
from bateleur.cudagraph.execution import Body, Execution
from bateleur.cudagraph.modes import CudaGraphMode

S = TypeVar("S")
T = TypeVar("T")


class Step(Protocol):
    """What a replay goes through."""

    def run(self, state: Any, /) -> None:
        """Do it, for the state of this step."""
        ...

    def release(self) -> None:
        """Free what it holds."""
        ...


class Tape(Protocol):
    """Captures pieces, one after another."""

    memory: Memory

    def begin(self) -> None:
        """Open a piece: from here on, what the body does is captured."""
        ...

    def end(self) -> Step:
        """Close the piece."""
        ...

    def abort(self) -> None:
        """Close the piece, if one is open, and drop it."""
        ...


class EagerPart:
    """A part of the body that runs anew on each replay, between two graphs.

    Its arguments are tensors of the graphs, at fixed addresses. What it returns is copied to where the next graph reads
    it, unless it returned memory of its arguments, which is at a fixed address already.
    """

    def __init__(self, name: str, fn: Callable[..., Tensor], tensors: tuple[Tensor, ...], state: Any) -> None:
        self._name = name
        self._fn = fn
        self._tensors = tensors
        result = fn(state, *tensors)
        if not isinstance(result, Tensor):
            raise CaptureError(f"{name} must return one tensor, not {type(result).__name__}")
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        aliases = result.untyped_storage().data_ptr() in given
        self.result = result if aliases else _copy(result)
        self._layout = _layout(result)

    def run(self, state: Any, /) -> None:
        """Run it, and put its result to where the next graph reads it."""
        result = self._fn(state, *self._tensors)
        if not isinstance(result, Tensor) or _layout(result) != self._layout:
            found = _layout(result) if isinstance(result, Tensor) else type(result).__name__
            raise GraphError(f"{self._name} returned {found}; the next graph reads {self._layout}")
        if result.data_ptr() != self.result.data_ptr():
            with torch.inference_mode():
                self.result.copy_(result)

    def release(self) -> None:
        """Drop the tensors that it holds."""
        del self._tensors, self.result, self._fn


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _copy(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


class Segments(Generic[S]):
    """Captures one call of a body: a FULL key as one graph, a PIECEWISE key as graphs around its eager parts."""

    def __init__(self, tape: Tape, key: BatchExecutionDescriptor, state: S) -> None:
        self.steps: list[Step] = []
        self._tape = tape
        self._key = key
        self._state = state
        self._in_body = False
        self._num_parts = 0

    def capture(self, body: Body[S, T]) -> T:
        """Run the body once; `steps` are what a replay runs.

        Raises:
            CaptureError: from whatever the body raised; the tape is closed then.
        """
        piecewise = self._key.mode is CudaGraphMode.PIECEWISE
        execution = Execution(self._key, self._state, self._cut if piecewise else None)
        try:
            self._tape.begin()
            self._in_body = True
            output = body(execution)
            self._in_body = False
            self.steps.append(self._tape.end())
        except BaseException as error:
            self._in_body = False
            self._tape.abort()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            raise CaptureError(f"{self._key}: {type(error).__name__} in the body: {error}") from error
        return output

    def _cut(self, fn: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        # A partial goes by its function: the text of its arguments may read a device.
        called = getattr(fn, "func", fn)
        name = f"{self._key}: eager part {self._num_parts} ({getattr(called, '__qualname__', type(called).__name__)})"
        if not self._in_body:
            raise CaptureError(f"{name}: eager() within an eager part, or after the capture")
        self._num_parts += 1
        self._in_body = False
        self.steps.append(self._tape.end())
        part = EagerPart(name, fn, tensors, self._state)
        self.steps.append(part)
        self._tape.memory.adopt(part.result)
        self._tape.begin()
        self._in_body = True
        return part.result


class GraphRecording(Generic[S, T]):
    """What a capture left: the steps of a replay, the output, and the memory that it met."""

    def __init__(
        self, key: BatchExecutionDescriptor, output: T, steps: list[Step], memory: Memory, nbytes: int
    ) -> None:
        self._key = key
        self._kept: tuple[T, list[Step]] | None = (output, steps)
        self._memory = memory
        self.nbytes = nbytes
        self.num_graphs = sum(not isinstance(step, EagerPart) for step in steps)

    @property
    def output(self) -> T:
        """What the body returned under capture: tensors of the graph's own memory, undefined until a replay."""
        return self._alive()[0]

    @property
    def externals(self) -> tuple[External, ...]:
        """Everything it reads or writes and does not own."""
        return self._memory.externals

    def replay(self, state: S) -> T:
        """Run the steps. Graphs read only what they baked; eager parts get `state`.

        Raises:
            AddressMoved, DanglingExternal: from the first piece, so that nothing was run.
        """
        output, (first, *others) = self._alive()
        first.run(state)
        try:
            for step in others:
                step.run(state)
        except (AddressMoved, DanglingExternal) as error:
            raise GraphError(f"{self._key}: between two pieces: {error}") from error
        return output

    def check_externals(self) -> None:
        """Raise `DanglingExternal` if memory it does not own has been freed since the capture."""
        self._memory.check()

    def poison(self) -> None:
        """Spoil what it owns, as a sibling that shares its memory might."""
        self._memory.poison()

    def release(self) -> None:
        """Free the graphs and the output; a replay after that is refused."""
        if self._kept is not None:
            for step in self._kept[1]:
                step.release()
        self._kept = None
        self._memory = Memory(keep_owned=False)

    def _alive(self) -> tuple[T, list[Step]]:
        if self._kept is None:
            raise GraphError(f"{self._key}: released")
        return self._kept
