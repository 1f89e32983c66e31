"""Tracks the memory that a capture uses: owned memory, and external memory that is only known by address."""

import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from bateleur.cudagraph.errors import AddressMoved, DanglingExternal


@dataclass(eq=False, slots=True)
class ExternalMemory:
    """A storage that a graph reads or writes (``mutated``) and does not own: weights, caches, staged buffers. Shape and
    dtype are those of the first tensor through which the capture used it.
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    mutated: bool

    def __str__(self) -> str:
        return f"tensor of shape {self.shape}, {self.dtype}, at {self.address:#x} ({self.nbytes} bytes)"


@dataclass(eq=False, slots=True)
class TrackedStorage(ExternalMemory):
    """One storage that a capture used, ``owned`` if an operator of the capture allocated it.

    torch keeps one Python object per storage while any tensor views it, so ``ref`` dies when the memory is freed.
    """

    ref: weakref.ref[UntypedStorage]
    owned: bool


class TrackedMemory:
    """The storages that a capture used, in order of first use.

    Owned memory was allocated by an operator of the capture. It returns to the graph pool when the captured function
    drops its last tensor of the storage. A replay uses owned memory through views that do not keep it allocated, see
    `CaptureTracker.non_owning`.
    """

    def __init__(self) -> None:
        self._storages: list[TrackedStorage] = []
        self._by_id: dict[int, TrackedStorage] = {}
        self._views: list[Tensor] = []

    def find(self, tensor: Tensor) -> TrackedStorage | None:
        storage = tensor.untyped_storage()
        tracked = self._by_id.get(id(storage))
        return tracked if tracked is not None and tracked.ref() is storage else None

    def add(self, tensor: Tensor, *, owned: bool) -> TrackedStorage:
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.nbytes(), tuple(tensor.shape), tensor.dtype
        tracked = TrackedStorage(*place, mutated=False, ref=weakref.ref(storage), owned=owned)
        self._storages.append(tracked)
        self._by_id[id(storage)] = tracked
        return tracked

    @property
    def externals(self) -> tuple[ExternalMemory, ...]:
        return tuple(each for each in self._storages if not each.owned)

    @property
    def owned(self) -> tuple[TrackedStorage, ...]:
        return tuple(each for each in self._storages if each.owned)

    def add_view(self, view: Tensor) -> None:
        """Remember a view of owned memory that does not keep it allocated, for `poison` and `empty_views`."""
        self._views.append(view)

    def check(self) -> list[UntypedStorage]:
        """Return the external storages. Raises `DanglingExternal` if one was freed, `AddressMoved` if one was moved."""
        alive = []
        for each in self._storages:
            if each.owned:
                continue
            storage = each.ref()
            if storage is None:
                raise DanglingExternal(f"{each} was freed since the capture began")
            if storage.data_ptr() != each.address:
                raise AddressMoved(f"{each} is at {storage.data_ptr():#x} now: its storage was resized")
            alive.append(storage)
        return alive

    def poison(self) -> None:
        """Overwrite owned memory that can still be read (live storages and views) with NaN or out-of-range values."""
        for each in self._storages:
            storage = each.ref() if each.owned else None
            if storage is not None:
                poison_storage_(storage, each.dtype)
        for view in self._views:
            poison_storage_(view.untyped_storage(), view.dtype)

    def empty_views(self) -> None:
        """Make every view an empty tensor, because its memory is no longer reserved for the graphs."""
        with torch.inference_mode():
            for view in self._views:
                view.set_(UntypedStorage(0, device=view.device), 0, (0,), (1,))
        self._views = []


def storage_at(address: int, nbytes: int, device: torch.device) -> UntypedStorage:
    """Return the memory at an address as a storage that neither owns it nor keeps it alive."""
    # The cudagraph trees of torch use this function too. Its declared return type is wrong.
    return cast(UntypedStorage, torch._C._construct_storage_from_data_pointer(address, device, nbytes))


def poison_storage_(storage: UntypedStorage, dtype: torch.dtype) -> None:
    """Fill a whole storage, as elements of `dtype`, with NaN, True or out-of-range integers."""
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    poison_(flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)))


def poison_(tensor: Tensor) -> Tensor:
    """Fill `tensor` in place with NaN, True, or an integer out of any valid range. Inference tensors are allowed."""
    with torch.inference_mode():
        dtype = tensor.dtype
        if dtype.is_complex:
            tensor.fill_(complex("nan+nanj"))
        elif dtype.is_floating_point and dtype.itemsize > 1:
            tensor.fill_(float("nan"))
        elif dtype is torch.bool:
            tensor.fill_(True)
        elif dtype.itemsize == 1 and dtype is not torch.int8:  # uint8 and float8: all bits set
            tensor.view(torch.uint8).fill_(255)
        else:
            info = torch.iinfo(dtype)  # half of the minimum: a sum or negation is out of range too
            tensor.fill_(info.min // 2 if info.min else info.max)
    return tensor
