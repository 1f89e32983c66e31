"""What a step folds, in C, on a CPU with a compiler: `fold.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import FoldPlan, ReplayPlan
from bateleur.mamba.spec import CacheLayout
from bateleur.metadata.native import finder

_kernel = finder(__file__, {"fold.c": {"fold_rows": "=" + "ppllpll" + "pp" + "ppppp" + "pl" + "ppppp"}})


def fold_rows(
    layout: CacheLayout,
    states: Tensor,
    computed: Tensor,
    starts: Tensor,
    num_decodes: int,
    flush: Tensor | None,
    accepted: Tensor,
    request_row: Tensor,
    plan: ReplayPlan,
    out: FoldPlan,
    through: Tensor | None = None,
) -> int | None:
    """`plan_fold` into `out` of a step that `plan` is of, and into `states` what is carried on: how many rows fold.

    through: (R,) int64 tokens that were folded on the way, of rows before `num_decodes`; the plan's `slot` follows.
    Rows behind the first `num_decodes` were scanned. states: `RequestStates.values`; computed, starts int32, dense;
    accepted, request_row (R,) int64. None where there is no compiler, and for tensors that are not read so.
    """
    fold, dense = _kernel("fold_rows"), (computed, starts, accepted, request_row)
    if fold is None or not all(each.is_contiguous() for each in dense):
        return None
    if (computed.dtype, starts.dtype, accepted.dtype) != (torch.int32, torch.int32, torch.int64):
        return None
    slot, fold_slot, ring_start, ring_len, _ = plan.addresses()
    most = layout.ring_capacity - 1 - layout.num_speculative_tokens
    done: int = fold(
        computed.data_ptr(), starts.data_ptr(), len(request_row), num_decodes,
        None if flush is None else flush.data_ptr(), layout.block_size, most, accepted.data_ptr(),
        request_row.data_ptr(), None if through is None else through.data_ptr(), slot, fold_slot, ring_start,
        ring_len, states.data_ptr(), states.shape[1], *out.addresses(),
    )  # fmt: skip
    return None if done < 0 else done
