"""Which memory a recording owns, and which it only knows by address."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from bateleur.cudagraph.errors import AddressMoved, DanglingExternal


@dataclass(eq=False, slots=True)
class External:
    """Memory that a recording reads or writes and does not own.

    Attributes:
        address: of the storage's first byte.
        nbytes: of the storage.
        shape, dtype: of the tensor through which the recording met it first.
        mutated: whether the recording writes to it.
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    mutated: bool

    def __str__(self) -> str:
        return f"tensor of shape {self.shape}, {self.dtype}, at {self.address:#x} ({self.nbytes} bytes)"


@dataclass(eq=False, slots=True)
class Block(External):
    """One storage that a recording met.

    It is held weakly. torch keeps one Python object for a storage as long as any tensor views it, so the reference
    dies with the memory and not before.
    """

    ref: weakref.ref[UntypedStorage]
    owned: bool


class Memory:
    """The storages that a recording met, each once, in order.

    A storage is owned if an operator of the capture returned it, else external. Owned memory goes back to the pool when
    the body drops it. A replay reaches it through views that do not own it, see `Tape.unowned`.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._by_id: dict[int, Block] = {}
        self._views: list[Tensor] = []

    def find(self, tensor: Tensor) -> Block | None:
        """The block of a tensor's storage, if it was met."""
        storage = tensor.untyped_storage()
        block = self._by_id.get(id(storage))
        return block if block is not None and block.ref() is storage else None

    def add(self, tensor: Tensor, *, owned: bool) -> Block:
        """Note a storage that was not met before."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.nbytes(), tuple(tensor.shape), tensor.dtype
        block = Block(*place, mutated=False, ref=weakref.ref(storage), owned=owned)
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
        return tuple(block for block in self._blocks if not block.owned)

    @property
    def owned(self) -> tuple[Block, ...]:
        """All owned blocks in the order in which the capture made them. The storages of most of them are gone."""
        return tuple(block for block in self._blocks if block.owned)

    def hold(self, view: Tensor) -> None:
        """Keep a view of owned memory that does not own it, for `poison` and `drop_views`."""
        self._views.append(view)

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
        """Spoil owned memory that can still be read: storages that exist, and views."""
        for block in self._blocks:
            storage = block.ref() if block.owned else None
            if storage is not None:
                poison_storage_(storage, block.dtype)
        for view in self._views:
            poison_storage_(view.untyped_storage(), view.dtype)

    def drop_views(self) -> None:
        """Make every view an empty tensor, because its memory is no longer reserved for the graphs."""
        with torch.inference_mode():
            for view in self._views:
                view.set_(UntypedStorage(0, device=view.device), 0, (0,), (1,))
        self._views = []


def storage_at(address: int, nbytes: int, device: torch.device) -> UntypedStorage:
    """Memory at an address, as a storage that does not own it and does not keep it alive."""
    # As torch's own cudagraph trees do. The declared type is that of another class.
    return cast(UntypedStorage, torch._C._construct_storage_from_data_pointer(address, device, nbytes))


def poison_storage_(storage: UntypedStorage, dtype: torch.dtype) -> None:
    """Spoil a whole storage, as numbers of `dtype`."""
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    poison_(flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)))


def poison_(tensor: Tensor) -> Tensor:
    """Spoil `tensor` in place: NaN, True, or an integer far out of any range; inference tensors too.

    Signed integers get half of their minimum, so that adding to it or negating it does not come back into range.
    """
    with torch.inference_mode():
        dtype = tensor.dtype
        if dtype.is_complex:
            tensor.fill_(complex("nan+nanj"))
        elif dtype.is_floating_point and dtype.itemsize > 1:
            tensor.fill_(float("nan"))
        elif dtype is torch.bool:
            tensor.fill_(True)
        elif dtype.itemsize == 1 and dtype is not torch.int8:  # uint8, and the float8 family: all bits set
            tensor.view(torch.uint8).fill_(255)
        else:
            info = torch.iinfo(dtype)
            tensor.fill_(info.min // 2 if info.min else info.max)
    return tensor
