"""Kernels of a mixture of experts: choice of experts, sorting by expert, and the weighted sum.

Legend: G groups, P experts of a group, K experts of a token, S pairs of token and expert, L width of the experts.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.dispatch import cdiv
from bateleur.runner.models.kernels import require_adjacent

_LANES_A_WARP = 512
_TILE_PLACES = 1024
_TILE_LANES = 512
_NONE = tl.constexpr(-(2**63))  # below every key


@triton.jit
def _keys(x, number, COUNT: tl.constexpr):
    """Return distinct int64 sort keys in order of x, NaN largest. Of equal x, the lower number has the larger key.

    number: index of each x, below COUNT.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x == x, bits, 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) + (COUNT - number).to(tl.int64)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _of_best_groups(key_GP, choice_GP, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return key_GP in the TOP_GROUPS groups with the largest sums of their two best scores, else the lowest key.

    key_GP: sort keys of the scores choice_GP.
    """
    best_G1 = tl.max(key_GP, 1)[:, None]
    rest_GP = tl.where(key_GP == best_G1, _NONE, key_GP)
    two_GP = (key_GP == best_G1) | (rest_GP == tl.max(rest_GP, 1)[:, None])
    g = tl.arange(0, BLOCK_G)
    key_G = _keys(tl.sum(tl.where(two_GP, choice_GP, 0.0), 1), g, GROUPS)
    key_G = tl.where(g < GROUPS, key_G, _NONE)
    left_G = key_G
    for _ in range(TOP_GROUPS):
        left_G = tl.where(left_G == tl.max(left_G, 0), _NONE, left_G)
    return tl.where((left_G == _NONE)[:, None], key_GP, _NONE)


@triton.jit
def route_kernel(
    logits_ptr, correction_ptr, weights_ptr, experts_ptr, logits_token, sum_eps, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISED: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose a token's TOP_K experts one after the other; write their ids and weights, computed from the logits.

    GROUPS, TOP_GROUPS: groups of experts, and chosen ones. NORMALISED: whether sum_eps is used, CORRECTED: correction.
    Other arguments: see `models.router.route_tokens`. Grid (tokens,). Occupancy on sm_90: at least 28 blocks per SM.
    """
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    g, p = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_P)[None, :]
    e_GP, real_GP = g * SIZE + p, (g < GROUPS) & (p < SIZE)
    logits_ptr += token * logits_token
    logit_GP = tl.load(logits_ptr + e_GP, mask=real_GP, other=float("-inf"))
    choice_GP = _sigmoid(logit_GP) if SIGMOID else logit_GP
    if CORRECTED:
        choice_GP += tl.load(correction_ptr + e_GP, mask=real_GP, other=0)
    key_GP = tl.where(real_GP, _keys(choice_GP, e_GP, EXPERTS), _NONE)
    if TOP_GROUPS < GROUPS:
        key_GP = _of_best_groups(key_GP, choice_GP, GROUPS, TOP_GROUPS, BLOCK_G)
    expert_K = tl.zeros([BLOCK_K], tl.int32)
    for rank in range(TOP_K):
        best = tl.max(tl.max(key_GP, 1), 0)
        expert_K = tl.where(k == rank, EXPERTS - (best & 0xFFFFFFFF).to(tl.int32), expert_K)
        key_GP = tl.where(key_GP == best, _NONE, key_GP)
    chosen_K = tl.load(logits_ptr + expert_K, mask=k < TOP_K, other=float("-inf"))
    if SIGMOID:
        weight_K = tl.where(k < TOP_K, _sigmoid(chosen_K), 0.0)
        if NORMALISED:
            weight_K /= tl.sum(weight_K, 0) + sum_eps
    else:
        no_nan_GP = tl.where(logit_GP == logit_GP, logit_GP, float("-inf"))
        top = tl.max(tl.max(no_nan_GP, 1), 0)
        weight_K = tl.exp(chosen_K - top)
        if NORMALISED:
            weight_K /= tl.sum(weight_K, 0)
        else:
            weight_K /= tl.sum(tl.sum(tl.exp(logit_GP - top), 1), 0)
    at_K = token * TOP_K + k
    tl.store(weights_ptr + at_K, weight_K * scale, mask=k < TOP_K)
    tl.store(experts_ptr + at_K, expert_K.to(tl.int64), mask=k < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(
    experts_ptr, token_ptr, sorted_index_ptr, ends_ptr, num_pairs,
    TOP_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sort (token, expert) pairs by expert: write the tokens and sorted positions of one expert's pairs, and their end.

    experts_ptr: expert of each pair, TOP_K per token. A program counts the pairs of lower experts, then writes those of
    its own expert in order. Grid (experts,). Occupancy on sm_90: at least 5 blocks per SM.
    """
    own, s = tl.program_id(0), tl.arange(0, BLOCK_S)
    below_S, mine_S = tl.zeros([BLOCK_S], tl.int32), tl.zeros([BLOCK_S], tl.int32)
    for first in range(0, num_pairs, BLOCK_S):
        expert_S = tl.load(experts_ptr + first + s, mask=first + s < num_pairs, other=2**31)
        below_S += (expert_S < own).to(tl.int32)
        mine_S += (expert_S == own).to(tl.int32)
    at, count = tl.sum(below_S, 0), tl.sum(mine_S, 0)
    tl.store(ends_ptr + own, at + count)
    if count == 0:
        return
    for first in range(0, num_pairs, BLOCK_S):
        expert_S = tl.load(experts_ptr + first + s, mask=first + s < num_pairs, other=2**31)
        mine_S = (expert_S == own).to(tl.int32)
        to_S = at + tl.cumsum(mine_S, 0) - mine_S
        tl.store(token_ptr + to_S, ((first + s) // TOP_K).to(tl.int64), mask=mine_S > 0)
        tl.store(sorted_index_ptr + first + s, to_S.to(tl.int64), mask=mine_S > 0)
        at += tl.sum(mine_S, 0)


@triton.jit
def combine_kernel(
    y_ptr, sorted_index_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, y_row, shared_token, gate_token,
    TOP_K: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a token's weighted sum over its experts, plus the shared expert (times sigmoid of a gate).

    Tensors: see `models.router.combine`. SIZE is L. Sums are float32, the best expert first, and rounded once.
    Grid (tokens, tiles of L). Occupancy on sm_90: at least 11 blocks per SM.
    """
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    real = lane < SIZE
    sum_L = tl.zeros([BLOCK_L], tl.float32)
    for rank in tl.static_range(TOP_K):
        y = tl.load(y_ptr + tl.load(sorted_index_ptr + token * TOP_K + rank) * y_row + lane, mask=real, other=0)
        sum_L += tl.load(weights_ptr + token * TOP_K + rank) * y.to(tl.float32)
    if SHARED:
        shared_L = tl.load(shared_ptr + token * shared_token + lane, mask=real, other=0).to(tl.float32)
        if GATED:
            shared_L *= _sigmoid(tl.load(gate_ptr + token * gate_token).to(tl.float32))
        sum_L += shared_L
    tl.store(out_ptr + token * SIZE + lane, sum_L.to(out_ptr.dtype.element_ty), mask=real)


@cache
def route_options(experts: int, groups: int, top_k: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `route_kernel`."""
    block_g, block_p = triton.next_power_of_2(groups), triton.next_power_of_2(experts // groups)
    warps = max(1, min(4, block_g * block_p // _LANES_A_WARP))
    sizes = {"BLOCK_G": block_g, "BLOCK_P": block_p, "BLOCK_K": triton.next_power_of_2(top_k)}
    return sizes | {"num_warps": warps, "enable_fp_fusion": True}


SORT_OPTIONS: dict[str, Any] = {"BLOCK_S": _TILE_PLACES, "num_warps": 4, "enable_fp_fusion": True}
COMBINE_OPTIONS: dict[str, Any] = {"BLOCK_L": _TILE_LANES, "num_warps": 2, "enable_fp_fusion": True}


def route_tokens(logits, correction, top_k, sigmoid, sum_eps, scale, groups):
    """Compute `models.router.route_tokens` by a Triton kernel, with the same arguments and result."""
    other = logits if correction is None else correction
    require_adjacent(logits=logits, correction=other)
    num_tokens, experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    route_kernel[(num_tokens,)](
        logits, other, weights, chosen, logits.stride(0), sum_eps or 0.0, scale,
        EXPERTS=experts, TOP_K=top_k, GROUPS=groups[0], TOP_GROUPS=groups[1], SIGMOID=sigmoid,
        NORMALISED=sum_eps is not None, CORRECTED=correction is not None,
        **route_options(experts, groups[0], top_k),
    )  # fmt: skip
    return weights, chosen


def sort_places(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `models.router.sort_places` in one Triton launch, with the same arguments and result."""
    experts = experts.contiguous()
    tokens, sorted_index = torch.empty(2, experts.numel(), dtype=torch.int64, device=experts.device).unbind()
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    sort_kernel[(num_experts,)](
        experts, tokens, sorted_index, ends, experts.numel(), TOP_K=experts.shape[1], **SORT_OPTIONS
    )
    return tokens, sorted_index, ends


def combine(y: Tensor, sorted_index: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Compute `models.router.combine` by a Triton kernel, with the same arguments and result."""
    added, factor = y if shared is None else shared, y if gate is None else gate
    require_adjacent(y=y, shared=added, sorted_index=sorted_index, weights=weights)
    (num_tokens, top_k), size = weights.shape, y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    combine_kernel[(num_tokens, cdiv(size, _TILE_LANES))](
        y, sorted_index, weights, added, factor, out, y.stride(0), added.stride(0), factor.stride(0),
        TOP_K=top_k, SIZE=size, SHARED=shared is not None, GATED=gate is not None, **COMBINE_OPTIONS,
    )  # fmt: skip
    return out
