"""Penalties applied while logits are read, so that they need no launch: see `bateleur.eagle.Penalties`."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bateleur.eagle.sampling_metadata import Penalties

NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether kernels are compiled, with the exp and log1p of CUDA, as in torch. The interpreter has neither."""


@triton.jit
def penalties_of(
    row, size, values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before, KIND: tl.constexpr
):
    """Load the inputs of `penalised` for a logit row of `size` tokens.

    values_ptr to before_ptr: fields of `Penalties` (values, request rows, token counts, prompt masks, earlier drafts).
    num_before: columns of before_ptr. KIND: 0 without penalties, 1 with them, 2 if earlier drafts count as generated.
    """
    if KIND == 0:  # no code after a constexpr branch that returns: Triton types it, and these pointers are placeholders
        found = (1.0, 0.0, 0.0, counts_ptr, prompts_ptr, before_ptr, 0)
    else:
        at = tl.load(owners_ptr + row) * size
        values_ptr += row * 3
        repetition, frequency, presence = (tl.load(values_ptr), tl.load(values_ptr + 1), tl.load(values_ptr + 2))
        before_ptr += row * num_before
        found = (repetition, frequency, presence, counts_ptr + at, prompts_ptr + at, before_ptr, num_before)
    return found


@triton.jit
def penalised(x_L, lane_L, stop, penalties, KIND: tl.constexpr):
    """Apply penalties (of `penalties_of`) to logits (L,) float32 of ids `lane_L` below `stop`, rounded as in torch."""
    if KIND != 0:
        repetition, frequency, presence, counts_ptr, prompts_ptr, before_ptr, num_before = penalties
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            count_L = tl.load(counts_ptr + lane_L, mask=lane_L < stop, other=0)
            if KIND == 2:
                for k in range(num_before):
                    count_L += (tl.load(before_ptr + k) == lane_L).to(tl.int32)
            prompt_L = tl.load(prompts_ptr + lane_L, mask=lane_L < stop, other=0)
            one_L = tl.zeros_like(x_L) + 1.0
            factor_L = tl.where(x_L > 0, tl.div_rn(one_L, one_L * repetition), repetition)
            x_L = tl.where((count_L > 0) | (prompt_L != 0), x_L * factor_L, x_L)
            x_L -= frequency * count_L.to(tl.float32)
            x_L -= tl.where(count_L > 0, presence, 0.0)
    return x_L


def arguments(penalties: Penalties | None, unused: Tensor) -> tuple[list[Any], int]:
    """Return values_ptr to num_before of `penalties_of`, and its KIND. unused: tensor in place of absent ones."""
    if penalties is None:
        return [unused] * 5 + [0], 0
    before = penalties.before
    tables = [penalties.values, penalties.owners, penalties.counts, penalties.prompts]
    if before is None or not before.shape[1]:
        return [*tables, unused, 0], 1
    return [*tables, before.contiguous(), before.shape[1]], 2
