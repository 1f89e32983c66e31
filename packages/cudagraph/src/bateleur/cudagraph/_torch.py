"""What is not documented as stable in torch, in this file, `_sync` and `_watch`; a test holds that it exists.

Nothing else of torch's inside is used: the life of a storage is followed with `weakref`, and memory that a
recording does not own is reached through its address.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What an operator's schema and tags say about it.

    Attributes:
        host_data: makes a tensor of host data: on CUDA a copy from pageable memory.
        metadata_only: changes how a tensor object views its memory, no memory.
        allocates_only: gives memory without contents.
        writes: position and name of the arguments that it writes to.
    """

    host_data: bool
    metadata_only: bool
    allocates_only: bool
    writes: tuple[tuple[int, str], ...]


@cache
def traits(func: OpOverload) -> OpTraits:
    """The traits of an operator."""
    name = func._schema.name
    return OpTraits(
        host_data=name == "aten::lift_fresh",
        metadata_only=torch.Tag.inplace_view in func.tags,
        allocates_only=name.startswith(("aten::empty", "aten::new_empty")),
        writes=tuple(
            (position, argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def storage_at(address: int, nbytes: int) -> torch.UntypedStorage:
    """CPU memory as a storage that does not own it and does not keep it alive."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(
        (ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8
    ).untyped_storage()


def drop_pool_of_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the CUDA allocator that a capture into `pool` is over.

    `CUDAGraph.capture_end` does that last, and not at all where the driver says that the capture was invalid; the
    allocator would then put off frees for good.
    """
    with suppress(RuntimeError):  # it was told
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
