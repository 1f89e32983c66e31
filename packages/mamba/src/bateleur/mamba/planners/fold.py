"""What a step folds under FOLD.

A running request has one state, its checkpoint, after `base` tokens; a ring with the inputs of the tokens since; and a
live conv window. A step adds its tokens to the ring and computes the state after any of them from checkpoint and ring,
so a token that is rejected was never part of a state. Once in a while the first entries of the ring are folded into
the checkpoint: up to every block boundary, which may then be published, and where the ring would overflow. The idea of
replaying inputs is that of "Snakes and Ladders" (ENLSP workshop, NeurIPS 2024).

Legend: as in `plans`, and L the ring's capacity. Token t of a request lies in entry t % L of its ring.
"""

import torch
from torch import Tensor

from bateleur.mamba.planners.checks import require_policy, require_rows
from bateleur.mamba.planners.plans import FoldPlan, ReplayPlan
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
    eager: bool = False,
) -> FoldPlan:
    """What to fold after a step planned by `plan_replay`, once the accepted tokens are known.

    With n = computed + accepted, a row folds up to the last boundary q <= n if that is beyond its checkpoint; else up
    to n if the ring could not take another 1 + K tokens; else nothing. As block_size >= 1 + K and L >= 1 + 2 K, that
    is enough: no step crosses two boundaries, and what a boundary leaves in the ring fits. `fold_ring` takes src,
    ring_start from the `ReplayPlan`, dst, count and page_offset from the result.

    Args:
        layout, computed, query_lens, out: as in `plan_step`.
        plan: of this step.
        accepted: (R,) tokens of the row that survive, the first one included; held to [1, query_lens].
        flush: (R,) bool, rows that must end with an empty ring unless they end behind a boundary: those whose prompt
            goes on after a step of one token, since a prompt's step reads a checkpoint alone. None means no row.
        scanned: (R,) bool, rows whose step was a prompt's: all tokens are in the state it wrote. None means no row.

    Raises:
        ValueError: the layout is that of SLOTS, a row count differs from the plan's, or, on CUDA, `out` is strided.
    """
    require_policy(layout, StatePolicy.FOLD)
    out = FoldPlan.allocate(len(plan.slot), plan.slot.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "flush": flush}
    require_rows("plan", len(plan.slot), rows | {"scanned": scanned, "out": out.dst})
    FORMS.on(plan.slot, eager=eager)(layout, out, plan, computed, query_lens, accepted, flush, scanned)
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
    # 0 in padded rows, and so everything is.
    torch.minimum(accepted.clamp_min(1), query_lens, out=out.accepted)
    ring = plan.ring_len + out.accepted
    # Entries to keep: those behind the last boundary, if the ring reaches back beyond it.
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


FORMS = Implementations(
    _in_torch,
    triton="bateleur.mamba.planners.triton:plan_fold",
    numpy="bateleur.mamba.planners.host:plan_fold",
)
