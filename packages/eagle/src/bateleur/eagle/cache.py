"""Where a head keeps its keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from bateleur.eagle.heads.spec import HeadSpec
from bateleur.metadata import BatchLimits, KVGroup


@dataclass(frozen=True, slots=True)
class DraftCache:
    """Caches of a head's own, in the blocks of one of the target's KV groups.

    kv: (k_cache, v_cache) of each attention layer of the head, as its attention backend wants them.
    groups, group: the target's KV groups, and which of them the draft's layers are in.

    `ValueError` for a group that isn't there, or stores no tokens, or has blocks of another size.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    groups: Sequence[KVGroup]
    group: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.group < len(self.groups):
            raise ValueError(f"group is {self.group}; there are {len(self.groups)} KV groups")
        if not self.blocks.has_slots:
            raise ValueError(f"group {self.group} stores no tokens; a draft's keys need a group with slots")
        for layer, pair in enumerate(self.kv):
            for cache in pair:
                if cache.shape[1] != self.blocks.block_size:
                    raise ValueError(
                        f"kv[{layer}] has blocks of {cache.shape[1]} tokens; the group has {self.blocks.block_size}"
                    )

    @property
    def blocks(self) -> KVGroup:
        """The group."""
        return self.groups[self.group]

    def require_room(self, spec: HeadSpec, limits: BatchLimits, num_drafts: int) -> None:
        """Raise `ValueError` unless it has what a head needs that makes so many drafts for requests within limits."""
        blocks = self.blocks
        if blocks.max_blocks * blocks.block_size < limits.max_model_len:
            raise ValueError(
                f"groups[{self.group}]: {blocks.max_blocks} blocks of {blocks.block_size} tokens hold fewer than "
                f"max_model_len {limits.max_model_len}"
            )
        if blocks.lookahead_tokens < num_drafts - 1:
            raise ValueError(
                f"groups[{self.group}]: lookahead_tokens is {blocks.lookahead_tokens}; {num_drafts} drafts are stored "
                f"up to {num_drafts - 1} tokens behind the step"
            )
        if len(self.kv) != spec.num_layers:
            raise ValueError(f"kv has {len(self.kv)} layers; the head has {spec.num_layers}")

    def addresses(self) -> Iterator[tuple[str, int]]:
        """Name and address of each cache."""
        for layer, pair in enumerate(self.kv):
            for name, cache in zip("kv", pair, strict=True):
                yield f"{name}_cache.{layer}", cache.data_ptr()
