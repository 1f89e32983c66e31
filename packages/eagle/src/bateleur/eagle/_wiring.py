"""What is checked once, when a drafter is wired, and once a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from bateleur.eagle.drafter import DraftContext, TargetNeeds
from bateleur.metadata import BatchLimits, KVGroup

if TYPE_CHECKING:
    from bateleur.eagle.heads.spec import Head


def checked_group(
    head: Head,
    kv: Sequence[tuple[Tensor, Tensor]],
    groups: Sequence[KVGroup],
    group: int,
    limits: BatchLimits,
    k: int,
) -> KVGroup:
    """The KV group that the draft is kept in; `ValueError` for what does not fit together."""
    if not 0 <= group < len(groups):
        raise ValueError(f"group is {group}; there are {len(groups)} KV groups")
    found = groups[group]
    if not found.has_slots:
        raise ValueError(f"group {group} stores no tokens; a draft's keys need a group with slots")
    if found.max_blocks * found.block_size < limits.max_model_len:
        raise ValueError(
            f"groups[{group}]: {found.max_blocks} blocks of {found.block_size} tokens hold fewer than max_model_len "
            f"{limits.max_model_len}"
        )
    if found.lookahead_tokens < k - 1:
        raise ValueError(
            f"groups[{group}]: lookahead_tokens is {found.lookahead_tokens}; {k} drafts are stored up to {k - 1} "
            "tokens behind the step"
        )
    if len(kv) != head.spec.num_layers:
        raise ValueError(f"kv has {len(kv)} layers; the head has {head.spec.num_layers}")
    for layer, pair in enumerate(kv):
        for cache in pair:
            if cache.shape[1] != found.block_size:
                raise ValueError(
                    f"kv[{layer}] has blocks of {cache.shape[1]} tokens; the group has {found.block_size}"
                )
    return found


def checked_rows(context: DraftContext, needs: TargetNeeds, k: int) -> int:
    """The number of real rows of a step; `ValueError` for what is not as the drafter needs it."""
    expected = len(needs.taps) + needs.hidden
    if len(context.features) != expected:
        raise ValueError(f"features has {len(context.features)} tensors; the head needs {expected}: {needs}")
    for index, feature in enumerate(context.features):
        if feature.shape[0] != context.batch.num_tokens:
            raise ValueError(
                f"features[{index}] has {feature.shape[0]} tokens; the step has {context.batch.num_tokens}"
            )
    if not 0 <= context.num_drafts <= k:
        raise ValueError(f"num_drafts is {context.num_drafts}; it must be in [0, {k}]")
    return context.batch.num_actual_reqs
