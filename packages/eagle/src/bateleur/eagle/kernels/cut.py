"""Which tokens min_p, top_k and top_p leave, without an order of the vocabulary: of each row the least that stays.

One program a row finds it by narrowing the range where it must be, in eight parts at each pass over the row, which
comes from the cache. Floats are ordered as integers. Of equal logits the lowest ids stay, so the last id that stays of
those that are the least is told as well.

The mass of a token is exp(logit - max) in units of 2^-40, summed as integers, as in `bateleur.eagle.law`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bateleur.eagle.kernels.penalise import arguments, penalised, penalties_of
from bateleur.eagle.penalties import Penalties

_BLOCK = 1024
_PIVOTS = 8  # of which seven are looked at, and the last is behind the range


@triton.jit
def tempered(row_ptr, lane_L, size, temperature, penalties, KIND: tl.constexpr):
    """Logits under penalties over the temperature; -inf behind the row. A rounding as torch's."""
    logits_L = tl.load(row_ptr + lane_L, mask=lane_L < size, other=float("-inf")).to(tl.float32)
    logits_L = penalised(logits_L, lane_L, size, penalties, KIND)
    return tl.div_rn(logits_L, tl.zeros_like(logits_L) + temperature)


@triton.jit
def order_of(x):
    """An int32 that is ordered as the float; both zeros have one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(order):
    """What `order_of` was made of."""
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, best, NATIVE: tl.constexpr):
    """exp(x - best) in units of 2^-40, int64. NATIVE takes CUDA's exp, which torch takes too."""
    # A difference of large numbers may be infinite, and best - 100 be best. Halves are exact.
    below = tl.maximum(x * 0.5 - best * 0.5, -50.0) * 2.0
    if NATIVE:
        part = libdevice.exp(below)
    else:
        part = tl.exp(below)
    return (part.to(tl.float64) * 1099511627776.0).to(tl.int64)


@triton.jit
def select(
    row_ptr, size, temperature, penalties, best, goal, low, high,
    KIND: tl.constexpr, MASS: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest value in [low, high], as `order_of`, so that what is not below it has the goal: as mass, or as
    number of tokens. What is not below `low` has it, what is above `high` has not; these are int64.
    """
    pivot_P = tl.arange(0, PIVOTS).to(tl.int64) + 1
    while low < high:
        step = (high - low + PIVOTS) // PIVOTS
        from_P = low + pivot_P * step
        sum_P = tl.zeros([PIVOTS], tl.int64)
        for start in range(0, size, BLOCK):
            x_L = tempered(row_ptr, start + tl.arange(0, BLOCK), size, temperature, penalties, KIND)
            weight_L = tl.full([BLOCK], 1, tl.int64)
            if MASS:
                weight_L = mass_of(x_L, best, NATIVE)
            reached_PL = order_of(x_L)[None, :].to(tl.int64) >= from_P[:, None]
            sum_P += tl.sum(tl.where(reached_PL, weight_L[None, :], 0), 1)
        enough_P = (sum_P.to(tl.float64) >= goal) & (from_P <= high)
        low += tl.sum(enough_P.to(tl.int64), 0) * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def weigh(
    row_ptr, size, temperature, penalties, best, order,
    KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens are above a value, their mass, and how many are equal to it."""
    num, mass, ties = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, size, BLOCK):
        x_L = tempered(row_ptr, start + tl.arange(0, BLOCK), size, temperature, penalties, KIND)
        order_L = order_of(x_L).to(tl.int64)
        num += tl.sum((order_L > order).to(tl.int64), 0)
        mass += tl.sum(tl.where(order_L > order, mass_of(x_L, best, NATIVE), 0), 0)
        ties += tl.sum((order_L == order).to(tl.int64), 0)
    return num, mass, ties


@triton.jit
def nth_tie(row_ptr, size, temperature, penalties, order, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the n-th token of a value, from 1."""
    last, seen = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, size, BLOCK):
        lane_L = start + tl.arange(0, BLOCK)
        x_L = tempered(row_ptr, lane_L, size, temperature, penalties, KIND)
        tied_L = order_of(x_L).to(tl.int64) == order
        rank_L = seen + tl.cumsum(tied_L.to(tl.int64), 0)
        last += tl.sum(tl.where(tied_L & (rank_L == n), lane_L, 0).to(tl.int64), 0)
        seen += tl.sum(tied_L.to(tl.int64), 0)
    return last


@triton.jit
def survey(row_ptr, size, temperature, penalties, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The largest value of a row, and whether it holds no finite one, or NaN."""
    best, broken = float("-inf"), 0
    for start in range(0, size, BLOCK):
        x_L = tempered(row_ptr, start + tl.arange(0, BLOCK), size, temperature, penalties, KIND)
        best = tl.maximum(best, tl.max(x_L, 0))
        broken |= tl.max((x_L != x_L).to(tl.int32), 0)
    return best, (broken != 0) | (best == float("-inf")) | (best == float("inf"))


@triton.jit
def nucleus(
    row_ptr, size, temperature, penalties, best, top_p, order, mass, ties, kept,
    KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """What top_p leaves of the tokens above `order`, of that mass, and of `kept` ties: order, kept, ties."""
    own = mass_of(float_of(order), best, NATIVE)
    limit = (mass + kept * own).to(tl.float64) * top_p.to(tl.float64)
    if mass.to(tl.float64) >= limit:
        # Far below there is no mass, so that nothing has to be looked for there.
        low, high = tl.maximum(order + 1, order_of(best - 28.0).to(tl.int64)), order_of(best).to(tl.int64)
        order = select(
            row_ptr, size, temperature, penalties, best, limit, low, high, KIND, True, NATIVE, BLOCK, PIVOTS
        )
        _, mass, ties = weigh(row_ptr, size, temperature, penalties, best, order, KIND, NATIVE, BLOCK)
        own, kept = mass_of(float_of(order), best, NATIVE), ties
    needed = ((limit - mass.to(tl.float64)) / tl.maximum(own, 1).to(tl.float64)).to(tl.int64)
    needed += ((mass + needed * own).to(tl.float64) < limit).to(tl.int64)
    return order, tl.minimum(kept, tl.maximum(needed, 1)), ties


@triton.jit
def cut_kernel(
    logits_ptr, law_ptr, least_ptr, last_ptr, logits_row, size,
    values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before,
    KIND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows). A row that draws from all tokens, or holds a NaN, has -inf for its least."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row
    temperature, log_min_p = tl.load(law_ptr + row * 4), tl.load(law_ptr + row * 4 + 1)
    top_k, top_p = tl.load(law_ptr + row * 4 + 2).to(tl.int64), tl.load(law_ptr + row * 4 + 3)
    top_k = tl.where((top_k <= 0) | (top_k > size), size, top_k).to(tl.int64)
    tl.store(least_ptr + row, float("-inf"))
    tl.store(last_ptr + row, size)
    if (temperature <= 0) | ((log_min_p == float("-inf")) & (top_k == size) & (top_p >= 1)):
        return
    penalties = penalties_of(
        row, size, values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before, KIND
    )
    best, broken = survey(row_ptr, size, temperature, penalties, KIND, BLOCK)
    if broken:
        return
    # Nothing that is -inf is ever kept, so the floor is finite.
    order = order_of(tl.maximum(best + log_min_p, -3.4028234663852886e38)).to(tl.int64)
    num, mass, ties = weigh(row_ptr, size, temperature, penalties, best, order, KIND, NATIVE, BLOCK)
    if num + ties > top_k:
        high = order_of(best).to(tl.int64)
        order = select(
            row_ptr,
            size,
            temperature,
            penalties,
            best,
            top_k,
            order,
            high,
            KIND,
            False,
            NATIVE,
            BLOCK,
            PIVOTS,
        )
        num, mass, ties = weigh(row_ptr, size, temperature, penalties, best, order, KIND, NATIVE, BLOCK)
    kept = tl.minimum(ties, top_k - num)
    if top_p < 1:
        order, kept, ties = nucleus(
            row_ptr, size, temperature, penalties, best, top_p, order, mass, ties, kept,
            KIND, NATIVE, BLOCK, PIVOTS,
        )  # fmt: skip
    tl.store(least_ptr + row, float_of(order))
    if kept < ties:
        last = nth_tie(row_ptr, size, temperature, penalties, order, kept, KIND, BLOCK)
        tl.store(last_ptr + row, last.to(tl.int32))


def cut_options(size: int, interpreted: bool = False) -> dict[str, Any]:
    """Constants and launch options of `cut_kernel` for rows of ``size`` lanes."""
    block = min(_BLOCK, max(16, triton.next_power_of_2(size)))
    return {
        "NATIVE": not interpreted,
        "BLOCK": block,
        "PIVOTS": _PIVOTS,
        "num_warps": 16,
        "enable_fp_fusion": False,
    }


def cut(logits: Tensor, values: Tensor, penalties: Penalties | None = None) -> tuple[Tensor, Tensor]:
    """Of each row the least logit over the temperature that its law keeps, (N,) float32, and the last id that stays of
    those that are equal to it, (N,) int32. One launch.

    logits: (N, V), dense in the last dimension. values: (N, 4) float32, see `Law`. penalties: of logits, before.
    """
    num_rows, size = logits.shape
    least = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    options = cut_options(size, interpreted=not logits.is_cuda)
    of_penalties, kind = arguments(penalties, least)
    cut_kernel[(num_rows,)](
        logits, values.contiguous(), least, last, logits.stride(0), size, *of_penalties, KIND=kind, **options
    )
    return least, last
