"""Plans which ring entries are added to ("folded into") the saved state after a step under FOLD.

A running request has a saved state (the state after `base` tokens), a ring with the inputs of the later
tokens, and a request conv window. A step appends its tokens to the ring, and computes its outputs from saved state and
ring, so a rejected token is never part of a state. The first entries of the ring are folded into the saved state when
the ring would overflow, and when a block boundary is passed. The state at the boundary may then be added to the prefix
cache. Source of the idea of replaying inputs: "Snakes and Ladders" (ENLSP workshop, NeurIPS 2024).

Legend: as in `plans`, and L the capacity of a ring. Token t of a request is in entry t % L of its ring.
"""

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import FoldPlan, ReplayPlan, require_policy, require_rows
from bateleur.mamba.spec import CacheLayout, StatePolicy
from bateleur.metadata.dispatch import Implementations


def plan_fold(
    layout: CacheLayout,
    plan: ReplayPlan,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor,
    *,
    flush: Tensor | None = None,
    scanned: Tensor | None = None,
    out: FoldPlan | None = None,
) -> FoldPlan:
    """Plan the folds (ring entries added to saved states) after a step, once the accepted tokens are known.

    With n = computed + accepted, a request folds up to the last block boundary q <= n if q is after its saved state.
    Otherwise it folds up to n if the ring (L entries) could not take another 1 + K tokens (K drafts). Because
    block_size >= 1 + K and L >= 1 + 2 K, a step passes at most one boundary, and the entries after it fit into the
    ring. `fold_ring` takes src and ring_start from the `ReplayPlan`, and dst, count and page_offset from the result.

    Args:
        layout, computed, query_lens, out: as in `plan_step`.
        plan: result of `plan_replay` for this step.
        accepted: (R,) accepted tokens of the row, the first one included; clamped to [1, query_lens].
        flush: (R,) bool, decodes inside a prompt: their ring is emptied unless they pass a boundary, because the next
            prefill reads only the saved state. None means no row.
        scanned: (R,) bool, prefills: all their tokens are in the state that they wrote. None means no row.

    Raises:
        ValueError: the layout has the policy SLOTS, a row count differs, or, on CUDA, `out` is not contiguous.
    """
    require_policy(layout, StatePolicy.FOLD)
    out = FoldPlan.allocate(len(plan.slot), plan.slot.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "flush": flush}
    require_rows("plan", len(plan.slot), rows | {"scanned": scanned, "out": out.dst})
    FORMS.on(plan.slot)(layout, out, plan, computed, query_lens, accepted, flush, scanned)
    return out


def _in_torch(
    layout: CacheLayout,
    out: FoldPlan,
    plan: ReplayPlan,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor,
    flush: Tensor | None,
    scanned: Tensor | None,
) -> None:
    # accepted is 0 in padded rows, which makes all other results 0.
    torch.minimum(accepted.clamp_min(1), query_lens, out=out.accepted)
    ring = plan.ring_len + out.accepted
    # Number of entries to keep: those after the last boundary, or the whole ring if the boundary is before it.
    keep = torch.minimum((computed + out.accepted).remainder_(layout.block_size), ring)
    full = keep > layout.ring_capacity - 1 - layout.num_speculative_tokens
    if flush is not None:
        full |= flush & (keep == ring)
    keep.masked_fill_(full, 0)
    torch.sub(ring, keep, out=out.count)
    if scanned is not None:
        out.accepted.masked_fill_(scanned, 1)
        out.count.masked_fill_(scanned, 0)
    torch.add(plan.ring_start, out.count, out=out.base)
    if scanned is not None:
        torch.where(scanned, computed + query_lens, out.base, out=out.base)
    folds = out.count.sign()
    torch.mul(plan.fold_slot, folds, out=out.dst)
    torch.sub(out.accepted, keep, out=out.page_offset).sub_(1).mul_(folds)


FORMS = Implementations(_in_torch, triton="bateleur.mamba.planners.triton:plan_fold")
