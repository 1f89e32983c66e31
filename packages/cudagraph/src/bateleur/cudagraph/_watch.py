"""Watching the operators of a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph._memory import Block, Memory, storage_at
from bateleur.cudagraph._sync import READS, is_composite, leaves, waits
from bateleur.cudagraph.backends.base import Graph
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import CaptureError, GraphError, HostSync

_HOST_DATA = (
    "a tensor was made of host data. On CUDA that is a copy from pageable memory, which no graph can hold: make it "
    "before the capture, or on the device with torch.full, torch.arange or fill_"
)

_LENT = (
    "the body uses memory of another graph of the same backend, such as an output. This capture may get the same "
    "memory: copy the output before, or capture with a backend object of its own"
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

    Args:
        key: what is captured.
        device: where the body runs.
        lent: the storages of all views that recordings of the same pool handed out, see `unowned`.
    """

    def __init__(
        self, key: BatchExecutionDescriptor, device: torch.device, lent: WeakSet[UntypedStorage]
    ) -> None:
        TorchDispatchMode.__init__(self)
        self.open = False
        self.memory = Memory()
        self.failure: CaptureError | None = None
        self._key = key
        self._device = device
        self._lent = lent

    def begin(self) -> None:
        """Open a piece: from here on, what the body does is captured."""
        raise NotImplementedError

    def end(self) -> Graph:
        """Close the piece."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close the piece, if one is open, and drop it."""
        raise NotImplementedError

    def unowned(self, tensor: Tensor) -> Tensor:
        """A view of a tensor of the capture that does not keep its memory allocated, for replays.

        Only memory that an operator of the capture made becomes a view. Any other memory (weights, caches, what an
        eager part keeps) is not of the pool, so the tensor itself is returned and keeps it alive.

        The pool may then give the memory to a later operator or a later capture. That is safe for two reasons:

        * Within a recording, a replay runs graphs and eager parts on one stream, in the order of the capture. The pool
          hands out memory in that order as well: an operator gets the memory of a tensor only after the body has
          dropped the tensor. The caller of an eager part holds its arguments until the part has returned, and the
          memory for its result is allocated before they are dropped. So the part reads its arguments before a later
          operator writes there, and its result is read before its memory is used again.
        * Between recordings, a replay reads memory of the pool only after it wrote that memory itself, so nothing
          depends on what another recording left there. (A body that allocates a buffer under capture and expects its
          contents in the next replay is wrong with any shared pool.) In return an output is valid only until the next
          replay of any recording of the pool.

        A capture must not read such a view of another recording, because the pool might give the same memory to the
        capture itself. `_meet` refuses that.
        """
        block = self.memory.find(tensor) if self._is_here(tensor) else None
        if block is None or not block.owned or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        with self.paused():
            borrowed = self._borrow(storage.data_ptr(), storage.nbytes())
            view = self._view(borrowed, tensor, tensor.storage_offset())
        self.memory.hold(view)
        return view

    def receive(self, result: Tensor) -> Tensor:
        """Memory of the open piece for what an eager part returned; a replay copies it there.

        No operator makes it: `torch.empty` would record a kernel in torch's deterministic mode that overwrites what the
        replay copied.
        """
        spans = (stride * (size - 1) for size, stride in zip(result.shape, result.stride(), strict=True))
        numel = 1 + sum(spans) if result.numel() else 0
        with self.paused():
            made = self._view(self._take(numel * result.dtype.itemsize, result.device), result, 0)
        self.memory.add(made, owned=True)
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look at no operator meanwhile."""
        is_open, self.open = self.open, False
        try:
            yield
        finally:
            self.open = is_open

    def _take(self, nbytes: int, device: torch.device) -> UntypedStorage:
        """Allocate memory within the open piece."""
        raise NotImplementedError

    def _borrow(self, address: int, nbytes: int) -> UntypedStorage:
        """Memory of the pool as a storage that does not own it, which no other capture of the pool may use."""
        storage = self._storage(address, nbytes)
        if nbytes:
            self._lent.add(storage)
        return storage

    def _storage(self, address: int, nbytes: int) -> UntypedStorage:
        return storage_at(address, nbytes, self._device)

    @staticmethod
    def _view(storage: UntypedStorage, like: Tensor, offset: int | torch.SymInt) -> Tensor:
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        return empty.set_(storage, offset, like.shape, like.stride())

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
            if tensor.untyped_storage() in self._lent:
                raise self.refuse(_LENT)
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
