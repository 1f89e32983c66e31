"""CUDA-graph semantics on the CPU: what a body does is recorded operator by operator, undone, and done again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload

from bateleur.cudagraph._memory import Block, Memory
from bateleur.cudagraph._watch import HostReads, Tape, changes_views, results, writes
from bateleur.cudagraph.backends.base import GraphBackend, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import GraphError
from bateleur.cudagraph.execution import Body, S, T
from bateleur.cudagraph.segments import Segments

_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any], tuple[tuple[int, Tensor], ...]]


class RecordedBackend(GraphBackend):
    """Records on the CPU. Its recordings have memory of their own, and `poison` plays the sibling that shares it."""

    name = "recorded"

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Record one call of `body`.

        The operators run for real, so that any of them works; then the memory that they wrote and do not own is
        restored bit for bit, so are the random generators, and the recording's own memory is poisoned.
        """
        recorder = Recorder(key)
        recording = Segments(recorder, key, state).capture(body, HostReads(recorder), recorder)
        recording.nbytes = recorder.memory.owned_nbytes
        recording.poison()
        return recording


class RecordedPiece:
    """Operators with their arguments: views of the recording's memory, or of foreign memory by address."""

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

    def __init__(self, key: BatchExecutionDescriptor) -> None:
        super().__init__(key, torch.device("cpu"))
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
        baked_args = tuple([self._bake(value) for value in args])
        baked_kwargs = {name: self._bake(value) for name, value in kwargs.items()}
        self._note_writes(func, args, kwargs)
        self._save_generators(kwargs)
        result = func(*args, **kwargs)
        if changes_views(func):
            return result
        values = results(result)
        targets = tuple([(i, self._bake(values[i])) for i in self._own_fresh(values)])
        is_view = not targets and not writes(func) and any(self._is_here(value) for value in values)
        allocates = func._schema.name.startswith(("aten::empty", "aten::new_empty"))  # without contents
        if not is_view and not allocates:
            self._calls.append((func, baked_args, baked_kwargs, targets))
        return result

    def _bake(self, value: Any) -> Any:
        """`value` with its tensors replaced by views that share their memory, and own only that of the recording."""
        if isinstance(value, Tensor):
            if not self._is_here(value):
                return value
            block = self._meet(value)
            layout = (block, value.storage_offset(), value.shape, value.stride(), value.dtype)
            if layout not in self._baked:
                self._baked[layout] = torch.empty(0, dtype=value.dtype).set_(self._base(block), *layout[1:4])
            return self._baked[layout]
        if isinstance(value, list | tuple):
            return [self._bake(item) for item in value]
        return value

    def _base(self, block: Block) -> UntypedStorage:
        if block not in self._bases:
            storage = block.ref()
            assert storage is not None, "it is in use"
            self._bases[block] = storage if block.owned else storage_at(block.address, block.nbytes)
        return self._bases[block]

    def _save_generators(self, kwargs: dict[str, Any]) -> None:
        for value in kwargs.values():
            if isinstance(value, torch.Generator) and value not in self._undo_random:
                self._undo_random[value] = partial(value.set_state, value.get_state())


def storage_at(address: int, nbytes: int) -> UntypedStorage:
    """CPU memory as a storage that does not own it and does not keep it alive."""
    if nbytes == 0:
        return UntypedStorage(0)
    return torch.frombuffer(
        (ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8
    ).untyped_storage()
