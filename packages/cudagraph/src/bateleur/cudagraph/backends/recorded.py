"""`RecordedBackend`: emulates CUDA graphs on CPU.

A capture records the operators of the body (the captured function), then undoes their effects. A replay runs the
operators again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from bateleur.cudagraph._capture_tracker import CaptureTracker, HostReadGuard, PoolViews, changes_views, results, writes
from bateleur.cudagraph._host_sync import flatten
from bateleur.cudagraph._memory import TrackedMemory, TrackedStorage, poison_storage_, storage_at
from bateleur.cudagraph.backends.base import CapturedBody, GraphBackend
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.capture import BodyCapture
from bateleur.cudagraph.errors import GraphError
from bateleur.cudagraph.execution import Body, S, T

_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any], tuple[tuple[int, Tensor], ...]]
"""An operator, its arguments, and the tensors to copy its results into, each with the index of the result."""


BLOCK_BYTES = 512
"""Allocations are rounded up to a multiple of this, as in torch's CUDA allocator."""


class _Range(NamedTuple):
    segment: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first


class CpuGraphPool:
    """CPU memory that returns to the pool when the allocated storage dies, a model of the pool of CUDA graphs.

    An allocation takes the smallest free range that fits, and leaves the rest of the range free. Neighbouring free
    ranges are joined. If no range fits, a new segment is allocated. Segments are never freed. A CUDA pool may be
    larger, because it has separate segments for small allocations and rounds large ones further.

    Attributes:
        nbytes: bytes of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._segments: list[Tensor] = []
        self._free: list[_Range] = []
        self._returned: list[_Range] = []  # separate, because a storage may die while `_free` is being changed

    def allocate(self, nbytes: int) -> UntypedStorage:
        """Return `nbytes` bytes with undefined contents. They are free again when the storage dies."""
        if nbytes == 0:
            return UntypedStorage(0)
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._free_returned()
        fitting = (each for each in self._free if each.nbytes >= size)
        found = min(fitting, key=lambda each: each.nbytes, default=None)
        if found is None:
            found = _Range(len(self._segments), 0, size)
            self._segments.append(torch.empty(size, dtype=torch.uint8))
            self.nbytes += size
        else:
            self._free.remove(found)
        taken = found._replace(last=found.first + size)
        if taken != found:
            self._free.append(found._replace(first=taken.last))
        storage = self._storage(taken.segment, taken.first, nbytes)
        finalize(storage, self._returned.append, taken).atexit = False
        return storage

    def storage_at(self, address: int, nbytes: int) -> UntypedStorage:
        """Return a storage over memory that `allocate` returned before.

        The storage does not reserve the memory, so the pool may allocate the same memory again. The storage can be read
        as long as it exists, because it keeps its segment alive.
        """
        if nbytes == 0:
            return UntypedStorage(0)
        for index, segment in enumerate(self._segments):
            if 0 <= address - segment.data_ptr() < segment.nbytes:
                return self._storage(index, address - segment.data_ptr(), nbytes)
        raise AssertionError(f"{address:#x} is not in this pool")

    def _storage(self, segment: int, first: int, nbytes: int) -> UntypedStorage:
        part = self._segments[segment].numpy()[first : first + nbytes]
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()

    def _free_returned(self) -> None:
        ranges, self._free = self._free, []
        while self._returned:
            ranges.append(self._returned.pop())
        for each in sorted(ranges):
            before = self._free[-1] if self._free else None
            if before is not None and (before.segment, before.last) == (each.segment, each.first):
                self._free[-1] = before._replace(last=each.last)
            else:
                self._free.append(each)


class RecordedBackend(GraphBackend):
    """Records operators on CPU to run them again. All captures share a memory pool, as with CUDA graphs."""

    name = "recorded"

    def __init__(self) -> None:
        self._pool = CpuGraphPool()
        self._pool_views: PoolViews = WeakSet()

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Record one call of `body` with `state`.

        The operators run during the capture. Afterwards external memory that they wrote and the random generators are
        restored bit for bit, and the memory of the capture itself is poisoned. So a capture has no effect, as on CUDA.
        """
        before = self._pool.nbytes
        recorder = _OperatorRecorder(key, self._pool, self._pool_views)
        captured = BodyCapture(recorder, key, state).capture(body, HostReadGuard(recorder), recorder)
        captured.nbytes = self._pool.nbytes - before
        recorder.poison()
        return captured


class RecordedPiece:
    """Recorded operators of one piece, the counterpart of one CUDA graph.

    calls: the operators with their arguments, which are views of pool memory or of external memory and own neither.
    """

    def __init__(self, memory: TrackedMemory, calls: list[_Call]) -> None:
        self._memory = memory
        self._calls = calls

    def replay(self) -> None:
        """Run all operators again, into the same memory.

        Raises `AddressMoved` or `DanglingExternal` before any of them runs, `GraphError` if a result has another shape.
        """
        alive = self._memory.check()  # keeps external memory alive until the end
        with torch.inference_mode():
            for func, args, kwargs, targets in self._calls:
                values = results(func(*args, **kwargs))
                for index, target in targets:
                    if values[index].shape != target.shape:
                        found = f"{tuple(values[index].shape)} in a replay, and {tuple(target.shape)} in the capture"
                        raise GraphError(f"{func} gave {found}")
                    target.copy_(values[index])
        del alive

    def reset(self) -> None:
        """Drop the operators and their arguments."""
        self._calls = []


class _OperatorRecorder(CaptureTracker):
    """Records the operators of a capture. At the end of each piece it undoes the effects of the operators."""

    def __init__(self, key: BatchExecutionDescriptor, pool: CpuGraphPool, pool_views: PoolViews) -> None:
        super().__init__(key, torch.device("cpu"), pool_views)
        self._pool = pool
        self._calls: list[_Call] = []
        self._shared_storages: dict[TrackedStorage, UntypedStorage] = {}
        self._shared_views: dict[tuple[Any, ...], Tensor] = {}
        self._saved: dict[TrackedStorage, UntypedStorage] = {}
        self._restore_random: dict[torch.Generator | None, Callable[[], object]] = {}

    def begin(self) -> None:
        self._calls = []
        self._restore_random = {None: partial(torch.set_rng_state, torch.get_rng_state())}
        self.open = True

    def end(self) -> RecordedPiece:
        self._undo()
        self.check()
        return RecordedPiece(self.memory, self._calls)

    def abort(self) -> None:
        if self.open:
            self._undo()

    def result_buffer(self, result: Tensor) -> Tensor:
        """Allocate memory for the result of an eager part, and copy the result: operators of the next piece read it."""
        made = super().result_buffer(result)
        with self.paused():
            made.copy_(result)
        return made

    def poison(self) -> None:
        """Overwrite all memory that the capture allocated from the pool, freed or not, with invalid values."""
        for tracked in self.memory.owned:
            poison_storage_(self._shared_storage(tracked), tracked.dtype)

    def _undo(self) -> None:
        self.open = False
        for tracked, saved in self._saved.items():
            storage = tracked.ref()
            if storage is not None and storage.nbytes() == saved.nbytes():
                storage.copy_(saved)
        self._saved = {}
        for restore in self._restore_random.values():
            restore()

    def _track_write(self, tensor: Tensor, tracked: TrackedStorage) -> None:
        super()._track_write(tensor, tracked)
        if not tracked.owned and tracked not in self._saved:
            self._saved[tracked] = tensor.untyped_storage().clone()

    def _call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [value for value in flatten((*args, *kwargs.values())) if self._on_device(value)]
        for tensor in given:
            self._track_resized(tensor)
        self._track_writes(func, args, kwargs)
        for value in kwargs.values():
            if isinstance(value, torch.Generator) and value not in self._restore_random:
                self._restore_random[value] = partial(value.set_state, value.get_state())
        result = func(*args, **kwargs)
        if changes_views(func):
            return result
        for tensor in given:
            self._track_resized(tensor)
        result = tree_map(partial(self._move_to_pool, {}), result)
        values = results(result)
        targets = tuple([(i, self._shared_view(values[i])) for i in self._own_new(values)])
        is_view = not targets and not writes(func) and any(self._on_device(value) for value in values)
        only_allocates = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if not is_view and not only_allocates:
            self._calls.append((func, *tree_map(self._shared_view, (args, kwargs)), targets))
        return result

    def _track_resized(self, tensor: Tensor) -> None:
        """Track a tensor. If `out=` or `resize_` gave new memory to an owned empty tensor, move it to the pool."""
        tracked = self._track(tensor)
        storage = tensor.untyped_storage()
        if tracked.owned and storage.nbytes() != tracked.nbytes:
            moved = self._pool.allocate(storage.nbytes()).copy_(storage)
            tensor.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())
            self.memory.add(tensor, owned=True)

    def _move_to_pool(self, moved: dict[UntypedStorage, UntypedStorage], value: Any) -> Any:
        """Return `value`, or its copy in the pool if it is a tensor whose memory the capture does not track yet.

        moved: pool copies by storage. A new copy is added to it, so that views of one storage share one copy.
        """
        if not self._on_device(value) or self.memory.find(value) is not None:
            return value
        storage = value.untyped_storage()
        if storage not in moved:
            moved[storage] = self._pool.allocate(storage.nbytes()).copy_(storage)
        return self._view(moved[storage], value, value.storage_offset())

    def _shared_view(self, value: Any) -> Any:
        """Return a view of a tensor; the view does not keep its memory allocated. Return other values unchanged."""
        if not self._on_device(value):
            return value
        tracked = self._track(value)
        layout = (tracked, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if layout not in self._shared_views:
            storage = self._shared_storage(tracked)
            self._shared_views[layout] = self._view(storage, value, value.storage_offset())
        return self._shared_views[layout]

    def _shared_storage(self, tracked: TrackedStorage) -> UntypedStorage:
        if tracked not in self._shared_storages:
            place = tracked.address, tracked.nbytes
            self._shared_storages[tracked] = (
                self._pool_storage(*place) if tracked.owned else storage_at(*place, self._device)
            )
        return self._shared_storages[tracked]

    def _allocate(self, nbytes: int, device: torch.device) -> UntypedStorage:
        return self._pool.allocate(nbytes)

    def _storage_at(self, address: int, nbytes: int) -> UntypedStorage:
        return self._pool.storage_at(address, nbytes)
