"""What a step folds, in C, on a CPU with a compiler: `fold.c`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import FoldPlan, ReplayPlan
from bateleur.mamba.spec import CacheLayout
from bateleur.metadata.native import finder

_kernel = finder(__file__, {"fold.c": {"fold_rows": "=" + "ppllpll" + "pp" + "ppppp" + "pl" + "ppppp"}})


Folds: TypeAlias = Callable[[Tensor, int, Tensor | None], int | None]


def fold_call(
    layout: CacheLayout,
    states: Tensor,
    computed: Tensor,
    starts: Tensor,
    flush: Tensor | None,
    request_row: Tensor,
    plan: ReplayPlan,
    out: FoldPlan,
) -> Folds:
    """`plan_fold` into `out` of steps that `plan` is of, and into `states` what is carried on: of each how many rows
    fold.

    states: `RequestStates.values`; computed, starts int32, dense; request_row (R,) int64; flush (R,) bool.

    With each call, of what is in these tensors then, and of the tokens that stay, `accepted` (R,) int64. Rows behind
    the first `num_decodes` were scanned; of those before, `through` (R,) int64 tokens were folded on the way, or None,
    and the plan's `slot` follows. None where there is no compiler, and for tensors that are not read so.
    """
    fold = _kernel("fold_rows")
    dense = all(each.is_contiguous() for each in (computed, starts, request_row))
    if fold is None or not dense or (computed.dtype, starts.dtype) != (torch.int32, torch.int32):
        return lambda accepted, num_decodes, through: None
    slot, fold_slot, ring_start, ring_len, _ = plan.addresses()
    most = layout.ring_capacity - 1 - layout.num_speculative_tokens
    rows = computed.data_ptr(), starts.data_ptr(), len(request_row)
    kinds = None if flush is None else flush.data_ptr(), layout.block_size, most
    own = request_row.data_ptr()
    kept = (slot, fold_slot, ring_start, ring_len, states.data_ptr(), states.shape[1], *out.addresses())

    def call(accepted: Tensor, num_decodes: int, through: Tensor | None) -> int | None:
        if accepted.dtype != torch.int64 or not accepted.is_contiguous():
            return None
        way = None if through is None else through.data_ptr()
        done: int = fold(*rows, num_decodes, *kinds, accepted.data_ptr(), own, way, *kept)
        return None if done < 0 else done

    return call
