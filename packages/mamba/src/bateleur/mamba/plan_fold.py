"""Where a step finds its states under FOLD, and what it folds: pure functions of the batch, on the device.

A running request has one state, its checkpoint, after `base` tokens; a ring with the inputs of the tokens since; and a
live conv window. A step adds its tokens to the ring and computes the state after any of them from checkpoint and ring,
so a token that is rejected was never part of a state. Once in a while the first entries of the ring are folded into
the checkpoint: up to every block boundary, which may then be published, and where the ring would overflow. The idea of
replaying inputs is that of "Snakes and Ladders" (ENLSP workshop, NeurIPS 2024).

Legend: as in `plan`, and L the ring's capacity. Token t of a request lies in entry t % L of its ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.plan import HostViews, form_of, require, require_policy, require_rows
from bateleur.mamba.spec import CacheLayout, StatePolicy


@dataclass(frozen=True, slots=True)
class ReplayPlan(HostViews):
    """Where each row's state is, all (R,) int64 on the device of the block table; 0 in rows without tokens.

    A prompt's step, which has no ring, reads `slot` as well.
    """

    slot: Tensor
    """Slot of the checkpoint, which is only read; 0 for a zero state. The `src` of `fold_ring`."""
    fold_slot: Tensor
    """Slot of the column that a fold after this step would write; it may be `slot`. Not masked in padded rows."""
    ring_start: Tensor
    """Tokens in the checkpoint, `base`; entry ring_start % L of the ring is the first one not in it."""
    ring_len: Tensor
    """Entries of the ring that follow the checkpoint."""
    conv_offset: Tensor
    """Entry of the live window where the step's window begins: accepted - 1."""

    @classmethod
    def allocate(cls, num_reqs: int, device: torch.device | str) -> ReplayPlan:
        """A neutral plan of `num_reqs` rows, to be refilled in place through `plan_replay(..., out=...)`."""
        return cls(*torch.zeros((5, num_reqs), dtype=torch.int64, device=device))


@dataclass(frozen=True, slots=True)
class FoldPlan(HostViews):
    """What each row folds after a step, and what its next step needs; all (R,) int64, 0 in rows without tokens."""

    dst: Tensor
    """Slot that the new checkpoint is written to; 0 in rows that fold nothing, as most do."""
    count: Tensor
    """Entries of the ring to fold."""
    conv_offset: Tensor
    """Entry of the live window where the window at the new checkpoint begins."""
    base: Tensor
    """Tokens in the checkpoint from now on."""
    accepted: Tensor
    """The next step's `accepted`."""

    @classmethod
    def allocate(cls, num_reqs: int, device: torch.device | str) -> FoldPlan:
        """A plan that folds nothing, to be refilled in place through `plan_fold(..., out=...)`."""
        return cls(*torch.zeros((5, num_reqs), dtype=torch.int64, device=device))


def plan_replay(
    layout: CacheLayout,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    base: Tensor,
    accepted: Tensor,
    out: ReplayPlan | None = None,
    *,
    eager: bool = False,
) -> ReplayPlan:
    """The states that a step under FOLD starts from.

    Args:
        layout: of the group the table belongs to.
        table: (R, columns) integer block table; at least `layout.columns()` columns, 0 where there is no slot.
        computed: (R,) tokens before the step, accepted ones only.
        query_lens: (R,) tokens of the step; 0 in padded rows.
        base: (R,) int64 tokens in the checkpoint, at most `computed`: what the previous `plan_fold` said. Of a request
            that has just been admitted, the tokens of its prefix hit.
        accepted: (R,) int64 tokens that survived of the row's previous step, in [1, 1 + K] as `plan_fold` leaves them;
            1 where there was none.
        out: buffers to fill instead of allocating; their addresses are kept.
        eager: as in `plan_step`.

    Raises:
        ValueError: the layout is not FOLD's, the table is too narrow, a row count differs, a CPU that plans in numpy
            finds a row beyond `max_model_len`, or, on CUDA, `out` is strided.
    """
    plan = ReplayPlan.allocate(len(table), table.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "base": base, "accepted": accepted}
    require(layout, StatePolicy.FOLD, table, rows | {"out": plan.slot})
    fill = form_of(_plan_replay, table, eager)
    fill(layout, plan, table, computed, query_lens, base, accepted)
    return plan


def _plan_replay(
    layout: CacheLayout,
    plan: ReplayPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    base: Tensor,
    accepted: Tensor,
) -> None:
    """The specification of the other forms."""
    # Factors of 0 and 1 in place of masks: whatever a padded row holds is gone before it becomes an index.
    valid = query_lens.sign().long()
    n = computed.long() * valid
    torch.mul(base, valid, out=plan.ring_start)
    torch.sub(n, plan.ring_start, out=plan.ring_len)
    torch.mul(accepted, valid, out=plan.conv_offset).sub_(valid)
    has = plan.ring_start.sign()
    # Whatever this step accepts, a fold ends in the block of its first token, or on that block's last boundary.
    columns = torch.stack((plan.ring_start - has, n)).div_(layout.block_size, rounding_mode="trunc")
    checkpoint, written = table.t().gather(0, columns).long().unbind()
    torch.mul(checkpoint, has, out=plan.slot)
    plan.fold_slot.copy_(written)


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
    ring_start from the `ReplayPlan`, dst, count and conv_offset from the result.

    Args:
        layout, computed, query_lens: as in `plan_replay`.
        plan: of this step.
        accepted: (R,) tokens of the row that survive, the first one included; held to [1, query_lens].
        flush: (R,) bool, rows that must end with an empty ring unless they end behind a boundary: those whose prompt
            goes on after a step of one token, since a prompt's step reads a checkpoint alone. None means no row.
        scanned: (R,) bool, rows whose step was a prompt's: all tokens are in the state it wrote. None means no row.
        out: buffers to fill instead of allocating; their addresses are kept.
        eager: as in `plan_step`.

    Raises:
        ValueError: the layout is that of SLOTS, a row count differs from the plan's, or, on CUDA, `out` is strided.
    """
    require_policy(layout, StatePolicy.FOLD)
    out = FoldPlan.allocate(len(plan.slot), plan.slot.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "flush": flush}
    require_rows("plan", len(plan.slot), rows | {"scanned": scanned, "out": out.dst})
    fill = form_of(_plan_fold, plan.slot, eager)
    fill(layout, out, plan, computed, query_lens, accepted, flush, scanned)
    return out


def _plan_fold(
    layout: CacheLayout,
    out: FoldPlan,
    plan: ReplayPlan,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor,
    flush: Tensor | None,
    scanned: Tensor | None,
) -> None:
    """The specification of the other forms."""
    tokens = query_lens.long()
    torch.minimum(accepted.clamp_min(1), tokens, out=out.accepted)  # 0 in padded rows, and so everything is
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
        torch.where(scanned, computed + tokens, out.base, out=out.base)
    folds = out.count.sign()
    torch.mul(plan.fold_slot, folds, out=out.dst)
    torch.sub(out.accepted, keep, out=out.conv_offset).sub_(1).mul_(folds)
