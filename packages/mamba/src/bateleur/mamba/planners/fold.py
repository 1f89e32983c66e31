"""State policy FOLD: plans the saved states and rings of later inputs that a step reads, and the folds after it.

A running request has a saved state (the state after `base` tokens), a ring with the inputs of the later
tokens, and a request conv window. A step appends its tokens to the ring, and computes its outputs from saved state and
ring, so a rejected token is never part of a state. The first entries of the ring are folded into the saved state when
the ring would overflow, and when a block boundary is passed. The state at the boundary may then be added to the prefix
cache. Source of the idea of replaying inputs: "Snakes and Ladders" (ENLSP workshop, NeurIPS 2024).

Legend: as in `plans`, and L the capacity of a ring. Token t of a request is in entry t % L of its ring.
"""

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import FORMS, FoldPlan, ReplayPlan, require, slots_at
from bateleur.mamba.spec import CacheLayout, StatePolicy
from bateleur.metadata.dispatch import Implementations


def plan_replay(
    layout: CacheLayout, table: Tensor, computed: Tensor, query_lens: Tensor, base: Tensor, accepted: Tensor,
    out: ReplayPlan | None = None,
) -> ReplayPlan:  # fmt: skip
    """Plan the saved state, ring of later inputs and conv window that each request starts from (state policy FOLD).

    Args:
        layout, table, computed, query_lens, out: as in `plan_step`.
        base: (R,) int64 tokens in the saved state, at most `computed`: the result of the previous `plan_fold`, or the
            tokens of the prefix-cache hit of a new request.
        accepted: (R,) int64 accepted tokens of the row's previous step, in [1, 1 + drafts], from `plan_fold`; 1 at
            first.

    Raises:
        ValueError: the layout has another policy, the table is too narrow, a row count differs, or, on CUDA, `out` is
            not contiguous.
    """
    plan = ReplayPlan.allocate(len(table), table.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "base": base, "accepted": accepted}
    require(layout, StatePolicy.FOLD, ("table", table), **rows, out=plan.slot)
    FORMS["plan_replay"].on(table)(layout, plan, table, computed, query_lens, base, accepted)
    return plan


def _replay(
    layout: CacheLayout, plan: ReplayPlan, table: Tensor, computed: Tensor, query_lens: Tensor, base: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    live, size = query_lens > 0, layout.block_size
    n, start = torch.where(live, computed, 0).long(), torch.where(live, base, 0)
    plan.fill(
        slot=slots_at(table, (start - 1) // size, start > 0),
        # A fold after this step ends in the block of its first token, for any number of accepted tokens.
        fold_slot=table.gather(1, n[:, None] // size).squeeze(1),
        ring_start=start, ring_len=n - start, conv_offset=torch.where(live, accepted - 1, 0),
    )  # fmt: skip


def plan_fold(
    layout: CacheLayout, plan: ReplayPlan, computed: Tensor, query_lens: Tensor, accepted: Tensor, *,
    flush: Tensor | None = None, scanned: Tensor | None = None, out: FoldPlan | None = None,
) -> FoldPlan:  # fmt: skip
    """Plan the folds (ring entries added to saved states) after a step, once the accepted tokens are known.

    With n = computed + accepted, a request folds up to the last block boundary q <= n if q is after its saved state.
    Otherwise it folds up to n if the ring (L entries) could not take another 1 + K tokens (K drafts). Because
    block_size >= 1 + K and L >= 1 + 2 K, a step passes at most one boundary, and the entries after it fit into the
    ring. `fold_ring` takes src and ring_start from the `ReplayPlan`, and dst, count and page_offset from the result.

    Args:
        layout, computed, query_lens, out: as in `plan_step`.
        plan: result of `plan_replay` for this step.
        accepted: (R,) accepted tokens of the row, counting its first token, which is no draft; clamped to
            [1, query_lens].
        flush: (R,) bool, decodes inside a prompt: their ring is emptied unless they pass a boundary, because the next
            prefill reads only the saved state. None means no row.
        scanned: (R,) bool, prefills: all their tokens are in the state that they wrote. None means no row.

    Raises:
        ValueError: the layout has the state policy SLOTS, a row count differs, or, on CUDA, `out` is not contiguous.
    """
    out = FoldPlan.allocate(len(plan.slot), plan.slot.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "flush": flush, "scanned": scanned}
    require(layout, StatePolicy.FOLD, ("plan", plan.slot), **rows, out=out.dst)
    FORMS["plan_fold"].on(plan.slot)(layout, out, plan, computed, query_lens, accepted, flush, scanned)
    return out


def _fold(
    layout: CacheLayout, out: FoldPlan, plan: ReplayPlan, computed: Tensor, query_lens: Tensor, accepted: Tensor,
    flush: Tensor | None, scanned: Tensor | None,
) -> None:  # fmt: skip
    kept = torch.minimum(accepted.clamp_min(1), query_lens)  # 0 in padded rows, which makes all other results 0
    ring = plan.ring_len + kept
    # Number of entries to keep: those after the last boundary, or the whole ring if the boundary is before it.
    keep = torch.minimum((computed + kept) % layout.block_size, ring)
    full = keep > layout.ring_capacity - 1 - layout.num_speculative_tokens
    if flush is not None:
        full |= flush & (keep == ring)
    keep = torch.where(full, 0, keep)
    count = ring - keep
    base = plan.ring_start + count
    if scanned is not None:
        kept, count = torch.where(scanned, 1, kept), torch.where(scanned, 0, count)
        base = torch.where(scanned, computed + query_lens, base)
    folds = count > 0
    out.fill(
        dst=torch.where(folds, plan.fold_slot, 0), count=count, base=base, accepted=kept,
        page_offset=torch.where(folds, kept - keep - 1, 0),
    )  # fmt: skip


FORMS["plan_replay"] = Implementations(_replay, triton="bateleur.mamba.planners.triton:plan_replay")
FORMS["plan_fold"] = Implementations(_fold, triton="bateleur.mamba.planners.triton:plan_fold")
