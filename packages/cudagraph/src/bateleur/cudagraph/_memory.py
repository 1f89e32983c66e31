"""Which memory a recording owns, and which it only knows by address."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from bateleur.cudagraph.backends.base import External
from bateleur.cudagraph.errors import AddressMoved, DanglingExternal
from bateleur.cudagraph.poison import poison_


@dataclass(eq=False, slots=True)
class Block:
    """One storage that a recording met.

    It is held weakly. torch keeps one Python object for a storage as long as any tensor views it, so the reference
    dies with the memory and not before.
    """

    ref: weakref.ref[UntypedStorage]
    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    owned: bool
    mutated: bool = False

    def __str__(self) -> str:
        return f"tensor of shape {self.shape}, {self.dtype}, at {self.address:#x} ({self.nbytes} bytes)"


class Memory:
    """The storages that a recording met, each once, in order.

    A storage is owned if an operator of the capture returned it, else external.
    """

    def __init__(self, *, keep_owned: bool) -> None:
        self._blocks: list[Block] = []
        self._by_id: dict[int, Block] = {}
        self._kept: list[UntypedStorage] | None = [] if keep_owned else None

    def find(self, tensor: Tensor) -> Block | None:
        """The block of a tensor's storage, if it was met."""
        storage = tensor.untyped_storage()
        block = self._by_id.get(id(storage))
        return block if block is not None and block.ref() is storage else None

    def add(self, tensor: Tensor, *, owned: bool) -> Block:
        """Note a storage that was not met before."""
        storage = tensor.untyped_storage()
        if owned and self._kept is not None:
            self._kept.append(storage)
        block = Block(
            ref=weakref.ref(storage),
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            owned=owned,
        )
        self._blocks.append(block)
        self._by_id[id(storage)] = block
        return block

    def adopt(self, tensor: Tensor) -> None:
        """Own a tensor's storage, unless it was met before."""
        if self.find(tensor) is None:
            self.add(tensor, owned=True)

    @property
    def externals(self) -> tuple[External, ...]:
        """What is not owned."""
        return tuple(
            External(b.address, b.nbytes, b.shape, b.dtype, b.mutated) for b in self._blocks if not b.owned
        )

    @property
    def owned_nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(storage.nbytes() for storage in self._kept or ())

    def check(self) -> list[UntypedStorage]:
        """The external storages, alive as long as the caller holds the list.

        Raises:
            DanglingExternal: one was freed.
            AddressMoved: one was resized, and is elsewhere now.
        """
        alive = []
        for block in self._blocks:
            if block.owned:
                continue
            storage = block.ref()
            if storage is None:
                raise DanglingExternal(f"{block} was freed since the capture")
            if storage.data_ptr() != block.address:
                raise AddressMoved(f"{block} is at {storage.data_ptr():#x} now: its storage was resized")
            alive.append(storage)
        return alive

    def poison(self) -> None:
        """Spoil what is owned and still exists."""
        for block in self._blocks:
            storage = block.ref() if block.owned else None
            if storage is not None:
                numel = storage.nbytes() // block.dtype.itemsize
                flat = torch.empty(0, dtype=block.dtype, device=storage.device)
                poison_(flat.set_(storage, 0, (numel,), (1,)))
