"""KV blocks and states as rows of bytes: row i has the bytes of block (or state slot) i in all tensors of a cache."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.utils.device import upload

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class RowPart:
    """Position of one tensor's bytes in a row of `PagedRows`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # offset of its first byte

    @property
    def end(self) -> int:
        """Offset after the part's last byte."""
        return self.start + prod(self.shape) * self.dtype.itemsize


class PagedRows:
    """Views tensors (n, *shape) as rows (n, num_bytes): row i has the bytes of entry i of each tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: at least one, all on one device, with contiguous entries."""
        self.parts: tuple[RowPart, ...] = ()
        self.num_bytes = 0  # size of a row
        for name, tensor in tensors.items():
            self.parts += (RowPart(name, tensor.dtype, tuple(tensor.shape[1:]), self.num_bytes),)
            self.num_bytes = self.parts[-1].end
        # The widest possible words: a kernel that copies single bytes takes eight times as many threads.
        self._word = next(each for each in _WORDS if all(_divides(each, tensor) for tensor in tensors.values()))
        self._rows = [each.view(len(each), -1).view(self._word) for each in tensors.values()]

    def gather(self, numbers: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return copies of the rows `numbers`, (n, num_bytes) uint8 on the device, in `out` if given. No host sync."""
        index = upload(np.array(numbers, np.int64), self._rows[0].device)
        into = None if out is None else out.view(self._word)
        return torch.cat([each.index_select(0, index) for each in self._rows], 1, out=into).view(torch.uint8)

    def scatter(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Set the rows `numbers`, all different, to rows (n, num_bytes) uint8 on the device. No host sync."""
        index = upload(np.array(numbers, np.int64), self._rows[0].device)
        sources = rows.view(self._word).split([each.shape[1] for each in self._rows], 1)
        for each, source in zip(self._rows, sources, strict=True):
            each.index_copy_(0, index, source)

    def put(self, numbers: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Set the rows `numbers` to rows (n, num_bytes) in host memory, which must not be written to any more."""
        self.scatter(numbers, upload(rows, self._rows[0].device))


def _divides(word: torch.dtype, tensor: Tensor) -> bool:
    """Return whether the entries of a tensor can be viewed as aligned elements of dtype `word`."""
    width = prod(tensor.shape[1:]) * tensor.dtype.itemsize
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return bool(width % word.itemsize == 0 and offset % word.itemsize == 0)


@dataclass(frozen=True)
class RowLayout:
    """Layout of KV blocks and recurrent states (pages) in files, and everything besides tokens that they depend on.

    fields: weights, dtype, device, kernels, ranks and versions, by name. granularity: tokens between two possible ends
    of a prefix. num_lookahead_tokens: tokens after a prefix that its last block depends on: 1 if blocks include a draft
    head's keys and values, else 0. block_parts, page_parts: tensors of a block or a state; empty if there are none.
    """

    fields: Mapping[str, str]
    block_size: int  # tokens of a block; without attention, distance of two states in tokens
    granularity: int
    num_lookahead_tokens: int  # 1 if a draft head stores keys, else 0
    block_parts: tuple[RowPart, ...]  # parts of a KV block; empty without attention
    page_parts: tuple[RowPart, ...]  # parts of a state; empty without recurrent layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block; 0 without attention."""
        return self.block_parts[-1].end if self.block_parts else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a recurrent state; 0 without recurrent layers."""
        return self.page_parts[-1].end if self.page_parts else 0

    @cached_property
    def digest(self) -> str:
        """Hash of the whole layout, 32 hexadecimal digits."""
        parts = [[each.name, str(each.dtype), each.shape] for each in (*self.block_parts, *self.page_parts)]
        sizes = [self.block_size, self.granularity, self.num_lookahead_tokens]
        text = json.dumps([dict(sorted(self.fields.items())), sizes, parts])
        return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class PagedCache:
    """KV blocks or recurrent states of a device: the pool that maps keys to row numbers, and the rows."""

    pool: BlockPool
    rows: PagedRows

    def add(self, keys: Sequence[Hashable], data: NDArray[np.uint8]) -> bool:
        """Add those `keys` that are not cached; returns False, and adds none, if there is no room.

        data: (len(keys), num_bytes) contents; do not write to it any more.
        """
        filled = self.pool.fill(keys)
        if filled:
            self.rows.put([number for _, number in filled], data[[index for index, _ in filled]])
        return filled is not None


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """The prefix cache of a device, and the memory of its KV blocks and recurrent states (pages)."""

    prefixes: PrefixCache
    blocks: PagedCache | None  # keys and values of all layers and the draft head; None for a model without attention
    pages: PagedCache | None  # states of all layers; None for a model without recurrent layers

    @classmethod
    def of(cls, prefixes: PrefixCache, caches: Caches, draft_kv: Sequence[tuple[Tensor, Tensor]]) -> Self:
        """Return the device cache of an engine. draft_kv: keys and values of a draft head, in the same blocks."""
        blocks = pages = None
        if caches.blocks is not None:
            kv = {
                f"{name}.{i}.{kind}": tensor
                for name, pairs in (("kv", caches.kv), ("draft", draft_kv))
                for i, pair in enumerate(pairs)
                for kind, tensor in zip(("keys", "values"), pair, strict=True)
            }
            blocks = PagedCache(caches.blocks, PagedRows(kv))
        if caches.free_pages is not None:
            states = {
                f"states.{i}.{kind}": tensor
                for i, pair in enumerate(caches.states)
                for kind, tensor in zip(("conv", "state"), pair, strict=True)
                if tensor is not None and tensor.numel()
            }
            pages = PagedCache(caches.free_pages, PagedRows(states))
        return cls(prefixes, blocks, pages)
