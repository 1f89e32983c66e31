"""`CaptureTracker`: sees every operator of a capture, and tracks the memory that the operators use.

It refuses operators that a graph cannot repeat: reads of a device value on the host, and tensors made of host data. It
also refuses tensor subclasses, memory of another graph, and external memory that is freed during the capture.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph._host_sync import HOST_READS, flatten, is_composite, waits_for_device
from bateleur.cudagraph._memory import TrackedMemory, TrackedStorage, storage_at
from bateleur.cudagraph.backends.base import Graph
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import CaptureError, GraphError, HostSync

PoolViews: TypeAlias = WeakSet[UntypedStorage]
"""Storages of all non-owning views that captures of a pool have made, see `CaptureTracker.non_owning`."""


@cache
def writes(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments whose memory an operator writes."""
    arguments = () if changes_views(func) else enumerate(func._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write)


def changes_views(func: OpOverload) -> bool:
    """Return whether an operator changes only how a tensor views its memory, such as `unsqueeze_`."""
    return torch.Tag.inplace_view in func.tags


def results(value: Any) -> tuple[Any, ...]:
    return tuple(flatten(value)) if isinstance(value, list | tuple) else (value,)


class CaptureTracker(TorchDispatchMode):
    """Captures one piece (the operators of one graph) after another, and tracks the memory that each operator uses.

    It is a torch dispatch mode around the whole body, the captured function. It looks at operators only while a piece
    is `open`, so it does not see the eager parts of a piecewise capture.
    """

    def __init__(self, key: BatchExecutionDescriptor, device: torch.device, pool_views: PoolViews) -> None:
        TorchDispatchMode.__init__(self)
        self.open = False
        self.memory = TrackedMemory()
        self.failure: CaptureError | None = None  # the first one
        self._key, self._device, self._pool_views = key, device, pool_views

    def begin(self) -> None:
        """Begin a piece of the capture. Operators that run until `end` are captured into one graph."""
        raise NotImplementedError

    def end(self) -> Graph:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    def non_owning(self, tensor: Tensor) -> Tensor:
        """Return a view of a captured tensor, for use in replays. The view does not keep the tensor's memory allocated.

        Only a tensor in memory that an operator of the capture allocated gets such a view. Another tensor (weights,
        caches) is returned itself, so that its memory stays allocated.

        The graph pool may allocate the memory of a view again, for a later operator or a later capture. That is safe
        for two reasons:

        * Within one captured function, a replay runs the operators in the order of the capture, so it reuses memory in
          the order in which the pool did. The arguments of an eager part stay allocated until its result is allocated.
        * Between captured functions, every replay writes memory of the pool before it reads it. So an output is valid
          only until the next replay of any graph of the pool. `_track` refuses a capture that reads a view of another
          captured function, because the pool may allocate that memory for the capture itself.
        """
        tracked = self.memory.find(tensor) if self._on_device(tensor) else None
        if tracked is None or not tracked.owned or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        with self.paused():
            shared = self._pool_storage(storage.data_ptr(), storage.nbytes())
            view = self._view(shared, tensor, tensor.storage_offset())
        self.memory.add_view(view)
        return view

    def result_buffer(self, result: Tensor) -> Tensor:
        """Allocate memory in the graph's pool for the result of an eager part. A replay copies the result there."""
        # In torch's deterministic mode, `torch.empty` would record a kernel that overwrites the copy.
        spans = (stride * (size - 1) for size, stride in zip(result.shape, result.stride(), strict=True))
        numel = 1 + sum(spans) if result.numel() else 0
        with self.paused():
            made = self._view(self._allocate(numel * result.dtype.itemsize, result.device), result, 0)
        self.memory.add(made, owned=True)
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        is_open, self.open = self.open, False
        try:
            yield
        finally:
            self.open = is_open

    def _allocate(self, nbytes: int, device: torch.device) -> UntypedStorage:
        raise NotImplementedError

    def _pool_storage(self, address: int, nbytes: int) -> UntypedStorage:
        storage = self._storage_at(address, nbytes)
        if nbytes:
            self._pool_views.add(storage)
        return storage

    def _storage_at(self, address: int, nbytes: int) -> UntypedStorage:
        return storage_at(address, nbytes, self._device)

    @staticmethod
    def _view(storage: UntypedStorage, template: Tensor, offset: int | torch.SymInt) -> Tensor:
        empty = torch.empty(0, dtype=template.dtype, device=template.device)
        return empty.set_(storage, offset, template.shape, template.stride())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. If True, torch wraps the mode and imports its compiler, which takes seconds."""
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
            raise self.refuse(
                "a tensor was made of host data. On CUDA that is a copy from pageable memory, which no graph can hold: "
                "make it before the capture, or on the device with torch.full, torch.arange or fill_"
            )
        if waits_for_device(func, args, kwargs, self._on_device):
            raise self.refuse_read(str(func))
        return self._call(func, args, kwargs)

    def refuse(self, reason: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
        """Return the error to raise for `reason`, and record it.

        The capture then fails even if the captured function catches the error.
        """
        error = kind(f"{self._key}: {reason}")
        self.failure = self.failure or error
        return error

    def refuse_read(self, name: str) -> CaptureError:
        return self.refuse(
            f"{name} reads a device value on the host, which a replay cannot repeat; "
            "keep the value on the device, or read it before the capture",
            HostSync,
        )

    def check(self) -> None:
        """Raise the first error that `refuse` recorded, which the captured function may have caught.

        If there is none, raise `CaptureError` if external memory was freed or resized during the capture.
        """
        if self.failure is not None:
            raise self.failure
        try:
            self.memory.check()
        except GraphError as error:
            raise CaptureError(
                f"{self._key}: {error}, before the capture ended. Memory that no operator of the capture allocated "
                "must outlive the graph. The body may have made a tensor of host data; make it before the capture"
            ) from error

    def _on_device(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.device == self._device

    def _call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in flatten((*args, *kwargs.values())):
            if self._on_device(value):
                self._track(value)
        self._track_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        self._own_new(results(result))
        return result

    def _own_new(self, values: Sequence[Any]) -> list[int]:
        """Track as owned the storages that an operator allocated. Return the indices of the results that view them."""
        new: dict[TrackedStorage, None] = {}
        indices = []
        for i, value in enumerate(values):
            if self._on_device(value):
                tracked = self.memory.find(value)
                if tracked is None:
                    tracked = self.memory.add(value, owned=True)
                    new[tracked] = None
                if tracked in new:
                    indices.append(i)
        return indices

    def _track(self, tensor: Tensor) -> TrackedStorage:
        tracked = self.memory.find(tensor)
        if tracked is None:
            if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                name = type(tensor).__qualname__
                raise self.refuse(f"a tensor of class {name} can't be captured; convert it to torch.Tensor")
            if tensor.untyped_storage() in self._pool_views:
                raise self.refuse(
                    "the body uses memory of another graph of the same backend, such as an output. This capture may "
                    "get the same memory: copy the output before, or capture with a backend object of its own"
                )
            tracked = self.memory.add(tensor, owned=False)
        return tracked

    def _track_writes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, name in writes(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in flatten((value,)):
                if self._on_device(tensor):
                    self._track_write(tensor, self._track(tensor))

    def _track_write(self, tensor: Tensor, tracked: TrackedStorage) -> None:
        tracked.mutated = True


class HostReadGuard(TorchFunctionMode):
    """Refuses methods that read a tensor's memory on the host, and runs `tensor[index] = number` as an in-place fill.

    Before torch 2.14, torch makes a tensor of the number without calling an operator. `CaptureTracker` sees operators
    only, so it would miss the allocation of that tensor.
    """

    def __init__(self, tracker: CaptureTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._tracker.open:
            if func in HOST_READS:
                raise self._tracker.refuse_read(HOST_READS[func])
            if func is Tensor.__setitem__ and isinstance(args[2], Number) and _assign(*args):
                return None
        return func(*args, **(kwargs or {}))


def _assign(tensor: Tensor, index: Any, value: Any) -> bool:
    """Do `tensor[index] = value` for integers, slices and masks. Return False for another index, and do nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(index, Tensor) and index.dtype is torch.bool:
        tensor.masked_fill_(index[(..., *(None,) * (tensor.dim() - index.dim()))], value)
    elif all(type(part) in (int, slice, EllipsisType, NoneType) for part in parts):
        tensor[index].fill_(value)
    else:
        return False
    return True
