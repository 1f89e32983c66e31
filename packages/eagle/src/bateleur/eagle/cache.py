"""KV caches of the attention layers of a draft head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.eagle.heads.spec import HeadSpec
from bateleur.metadata import BatchLimits, KVCacheGroup


@dataclass(frozen=True, slots=True)
class DraftCache:
    """KV caches of a draft head, in the blocks of one of the target's KV groups.

    kv: (k_cache, v_cache) of each attention layer of the head, in the layout of its attention backend.
    groups, group: the target's KV groups, and the index of the one that the draft layers use.
    dtype: dtype of the head's activations; None for that of the caches.
    kv_scales: scales (2, Hkv) float32 of the caches of each layer, or None; () for none.

    Raises `ValueError` for a group that does not exist, stores no tokens, or has another block size than the caches.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    groups: Sequence[KVCacheGroup]
    group: int = 0
    dtype: torch.dtype | None = None
    kv_scales: Sequence[Tensor | None] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.group < len(self.groups):
            raise ValueError(f"group is {self.group}; there are {len(self.groups)} KV groups")
        if not self.blocks.has_slots:
            raise ValueError(f"group {self.group} stores no tokens; a draft's keys need a group with slots")
        size = self.blocks.block_size
        for layer, pair in enumerate(self.kv):
            for cache in pair:
                if cache.shape[1] != size:
                    raise ValueError(f"kv[{layer}] has blocks of {cache.shape[1]} tokens; the group has {size}")

    @property
    def blocks(self) -> KVCacheGroup:
        """The KV-cache group of the draft layers."""
        return self.groups[self.group]

    def require_room(self, spec: HeadSpec, limits: BatchLimits, num_drafts: int) -> None:
        """Raise `ValueError` unless the cache can hold `num_drafts` drafts of a head for requests within `limits`."""
        blocks, name = self.blocks, f"groups[{self.group}]"
        if blocks.max_blocks * blocks.block_size < limits.max_model_len:
            raise ValueError(
                f"{name}: {blocks.max_blocks} blocks of {blocks.block_size} tokens hold fewer than max_model_len "
                f"{limits.max_model_len}"
            )
        if blocks.lookahead_tokens < num_drafts - 1:
            raise ValueError(
                f"{name}: lookahead_tokens is {blocks.lookahead_tokens}; {num_drafts} drafts are stored up to "
                f"{num_drafts - 1} tokens after the step"
            )
        if len(self.kv) != spec.num_layers:
            raise ValueError(f"kv has {len(self.kv)} layers; the head has {spec.num_layers}")

    def addresses(self) -> Iterator[tuple[str, int]]:
        """Yield name and address of each cache."""
        for layer, pair in enumerate(self.kv):
            for name, cache in zip("kv", pair, strict=True):
                yield f"{name}_cache.{layer}", cache.data_ptr()
