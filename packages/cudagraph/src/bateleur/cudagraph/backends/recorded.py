"""CUDA-graph semantics on the CPU: what a body does is recorded operator by operator, undone, and done again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload

from bateleur.cudagraph._memory import Block, Memory, poison_storage_, storage_at
from bateleur.cudagraph._pool import Pool
from bateleur.cudagraph._sync import leaves
from bateleur.cudagraph._watch import HostReads, Tape, changes_views, results, writes
from bateleur.cudagraph.backends.base import GraphBackend, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import GraphError
from bateleur.cudagraph.execution import Body, S, T
from bateleur.cudagraph.segments import Segments

_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any], tuple[tuple[int, Tensor], ...]]


class RecordedBackend(GraphBackend):
    """Records on the CPU. Its recordings share memory as CUDA graphs do: a replay may overwrite outputs of another."""

    name = "recorded"

    def __init__(self) -> None:
        self._pool = Pool()
        self._lent: WeakSet[UntypedStorage] = WeakSet()

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Record one call of `body`.

        The operators run for real, so that any of them works; then the memory that they wrote and do not own is
        restored bit for bit, so are the random generators, and the recording's own memory is poisoned.
        """
        before = self._pool.nbytes
        recorder = Recorder(key, self._pool, self._lent)
        recording = Segments(recorder, key, state).capture(body, HostReads(recorder), recorder)
        recording.nbytes = self._pool.nbytes - before
        recorder.spoil()
        return recording


class RecordedPiece:
    """Operators with their arguments: views of memory of the pool, or of foreign memory by address."""

    def __init__(self, memory: Memory, calls: list[_Call]) -> None:
        self._memory = memory
        self._calls = calls

    def replay(self) -> None:
        """Do all of it again, into the same memory."""
        alive = self._memory.check()  # and kept alive until the end
        with torch.inference_mode():
            for func, args, kwargs, targets in self._calls:
                result = func(*args, **kwargs)
                if targets:
                    _store(func, result, targets)
        del alive

    def reset(self) -> None:
        """Drop the operators and their memory."""
        self._calls = []


def _store(func: OpOverload, result: Any, targets: tuple[tuple[int, Tensor], ...]) -> None:
    values = results(result)
    for index, target in targets:
        value = values[index]
        if value.shape != target.shape:
            raise GraphError(
                f"{func} gave {tuple(value.shape)} in a replay, and {tuple(target.shape)} in the capture"
            )
        target.copy_(value)


class Recorder(Tape):
    """Records the operators of a capture; a piece is a transaction that is rolled back."""

    def __init__(self, key: BatchExecutionDescriptor, pool: Pool, lent: WeakSet[UntypedStorage]) -> None:
        super().__init__(key, torch.device("cpu"), lent)
        self._pool = pool
        self._calls: list[_Call] = []
        self._bases: dict[Block, UntypedStorage] = {}
        self._baked: dict[tuple[Any, ...], Tensor] = {}
        self._saved: dict[Block, UntypedStorage] = {}
        self._undo_random: dict[torch.Generator | None, Callable[[], object]] = {}

    def begin(self) -> None:
        """Open a piece."""
        self._calls = []
        self._undo_random = {None: partial(torch.set_rng_state, torch.get_rng_state())}
        self.open = True

    def end(self) -> RecordedPiece:
        """Close the piece: undo what it did."""
        self._roll_back()
        self.check()
        return RecordedPiece(self.memory, self._calls)

    def abort(self) -> None:
        """Undo what an unfinished piece did."""
        if self.open:
            self._roll_back()

    def receive(self, result: Tensor) -> Tensor:
        """Memory of the open piece for a result, with its contents: the capture goes on with what an eager run has."""
        made = super().receive(result)
        with self.paused():
            made.copy_(result)
        return made

    def spoil(self) -> None:
        """Poison all memory that the capture took of the pool, also what went back."""
        for block in self.memory.owned:
            poison_storage_(self._base(block), block.dtype)

    def _roll_back(self) -> None:
        self.open = False
        for block, saved in self._saved.items():
            storage = block.ref()
            if storage is not None and storage.nbytes() == saved.nbytes():
                storage.copy_(saved)
        self._saved = {}
        for undo in self._undo_random.values():
            undo()

    def _write(self, tensor: Tensor, block: Block) -> None:
        super()._write(tensor, block)
        if not block.owned and block not in self._saved:
            self._saved[block] = tensor.untyped_storage().clone()

    def _call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [value for value in leaves((*args, *kwargs.values())) if self._is_here(value)]
        for tensor in given:
            self._follow(tensor)
        self._note_writes(func, args, kwargs)
        self._save_generators(kwargs)
        result = func(*args, **kwargs)
        if changes_views(func):
            return result
        for tensor in given:
            self._follow(tensor)
        result = self._place(result, {})
        values = results(result)
        targets = tuple([(i, self._bake(values[i])) for i in self._own_fresh(values)])
        is_view = not targets and not writes(func) and any(self._is_here(value) for value in values)
        allocates = func._schema.name.startswith(("aten::empty", "aten::new_empty"))  # without contents
        if not is_view and not allocates:
            baked = tuple([self._bake(value) for value in args])
            self._calls.append((func, baked, {name: self._bake(kwargs[name]) for name in kwargs}, targets))
        return result

    def _follow(self, tensor: Tensor) -> None:
        """Meet a tensor; if `out=` or `resize_` gave memory to an empty one of the capture, move that to the pool."""
        block = self._meet(tensor)
        storage = tensor.untyped_storage()
        if block.owned and storage.nbytes() != block.nbytes:
            moved = self._pool.take(storage.nbytes()).copy_(storage)
            tensor.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())
            self.memory.add(tensor, owned=True)

    def _place(self, value: Any, moved: dict[UntypedStorage, UntypedStorage]) -> Any:
        """`value`, which an operator returned, with new memory moved into the pool. moved: storages to their copies."""
        if isinstance(value, list | tuple):
            return type(value)([self._place(item, moved) for item in value])
        if not self._is_here(value) or self.memory.find(value) is not None:
            return value
        storage = value.untyped_storage()
        if storage not in moved:
            moved[storage] = self._pool.take(storage.nbytes()).copy_(storage)
        return self._view(moved[storage], value, value.storage_offset())

    def _bake(self, value: Any) -> Any:
        """`value` with its tensors replaced by views that share their memory, and own none of it."""
        if isinstance(value, Tensor):
            if not self._is_here(value):
                return value
            block = self._meet(value)
            layout = (block, value.storage_offset(), value.shape, value.stride(), value.dtype)
            if layout not in self._baked:
                self._baked[layout] = self._view(self._base(block), value, value.storage_offset())
            return self._baked[layout]
        if isinstance(value, list | tuple):
            return [self._bake(item) for item in value]
        return value

    def _base(self, block: Block) -> UntypedStorage:
        if block not in self._bases:
            place = block.address, block.nbytes
            self._bases[block] = self._borrow(*place) if block.owned else storage_at(*place, self._device)
        return self._bases[block]

    def _take(self, nbytes: int, device: torch.device) -> UntypedStorage:
        return self._pool.take(nbytes)

    def _storage(self, address: int, nbytes: int) -> UntypedStorage:
        return self._pool.at(address, nbytes)

    def _save_generators(self, kwargs: dict[str, Any]) -> None:
        for value in kwargs.values():
            if isinstance(value, torch.Generator) and value not in self._undo_random:
                self._undo_random[value] = partial(value.set_state, value.get_state())
