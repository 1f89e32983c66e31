"""Watching the operators of a capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph._memory import Block, Memory
from bateleur.cudagraph._sync import READS, is_composite, leaves, waits
from bateleur.cudagraph.backends.base import Graph
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import CaptureError, GraphError, HostSync

_HOST_DATA = (
    "a tensor was made of host data. On CUDA that is a copy from pageable memory, which no graph can hold: make it "
    "before the capture, or on the device with torch.full, torch.arange or fill_"
)


@cache
def writes(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments whose memory an operator writes to."""
    if changes_views(func):
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def changes_views(func: OpOverload) -> bool:
    """Whether an operator changes how a tensor object views its memory, and no memory."""
    return torch.Tag.inplace_view in func.tags


def results(value: Any) -> tuple[Any, ...]:
    """What an operator returned, as a flat tuple."""
    return tuple(leaves(value)) if isinstance(value, list | tuple) else (value,)


class Tape(TorchDispatchMode):
    """Captures pieces, one after another. As a mode it sees each operator on `device`: refuses what no graph can hold,
    notes whose memory is used.

    It stays in place for the whole body and looks only where `open`: a piecewise capture closes it for the eager parts.
    """

    def __init__(self, key: BatchExecutionDescriptor, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self.open = False
        self.memory = Memory()
        self.failure: CaptureError | None = None
        self._key = key
        self._device = device

    def begin(self) -> None:
        """Open a piece: from here on, what the body does is captured."""
        raise NotImplementedError

    def end(self) -> Graph:
        """Close the piece."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close the piece, if one is open, and drop it."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: what torch puts around a mode else imports its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.open:
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is torch.ops.aten.lift_fresh.default and args[0].device == self._device:
            raise self.refuse(_HOST_DATA)
        if waits(func, args, kwargs, self._is_here):
            raise self.refuse_read(str(func))
        return self._call(func, args, kwargs)

    def refuse(self, why: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
        """Note why the capture fails, so that it does even if the body catches the error."""
        error = kind(f"{self._key}: {why}")
        self.failure = self.failure or error
        return error

    def refuse_read(self, name: str) -> CaptureError:
        """Refuse what makes the host wait for a value."""
        return self.refuse(
            f"{name} reads a device value on the host; a replay could not do that again", HostSync
        )

    def check(self) -> None:
        """Raise what the body did and caught, or what shows only at the end of a piece."""
        if self.failure is not None:
            raise self.failure
        try:
            self.memory.check()
        except GraphError as error:
            raise CaptureError(
                f"{self._key}: {error} began, and before its end. Memory that no operator of the capture made must "
                "outlive the graph; a tensor of host data was perhaps made in the body"
            ) from error

    def _is_here(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.device == self._device

    def _call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in leaves((*args, *kwargs.values())):
            if self._is_here(value):
                self._meet(value)
        self._note_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        self._own_fresh(results(result))
        return result

    def _own_fresh(self, values: Sequence[Any]) -> list[int]:
        """Own memory that an operator returned and nobody had; the indices of the tensors that view it."""
        fresh: dict[Block, None] = {}
        indices = []
        for i, value in enumerate(values):
            if self._is_here(value):
                block = self.memory.find(value)
                if block is None:
                    block = self.memory.add(value, owned=True)
                    fresh[block] = None
                if block in fresh:
                    indices.append(i)
        return indices

    def _meet(self, tensor: Tensor) -> Block:
        block = self.memory.find(tensor)
        if block is None:
            if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                name = type(tensor).__qualname__
                raise self.refuse(f"a tensor of class {name} can't be captured")
            block = self.memory.add(tensor, owned=False)
        return block

    def _note_writes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, name in writes(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in leaves((value,)):
                if self._is_here(tensor):
                    self._write(tensor, self._meet(tensor))

    def _write(self, tensor: Tensor, block: Block) -> None:
        block.mutated = True


class HostReads(TorchFunctionMode):
    """Sees the methods that read a CPU tensor's memory without an operator, or would copy it from a device.

    It also assigns Python numbers as `fill_` does: before torch 2.14 they come as tensors that no operator made.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._tape.open:
            if func in READS:
                raise self._tape.refuse_read(READS[func])
            if func is Tensor.__setitem__ and isinstance(args[2], Number) and _assign(*args):
                return None
        return func(*args, **(kwargs or {}))


def _assign(tensor: Tensor, index: Any, value: Any) -> bool:
    """`tensor[index] = value` for slices and masks; False for an index that is neither."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(index, Tensor) and index.dtype is torch.bool:
        tensor.masked_fill_(index[(..., *(None,) * (tensor.dim() - index.dim()))], value)
    elif all(type(part) in (int, slice, EllipsisType, NoneType) for part in parts):
        tensor[index].fill_(value)
    else:
        return False
    return True
