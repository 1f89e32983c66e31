"""Tokens of a delta rule over a checkpoint and a ring of corrected values: every state between them stays unwritten.

One program a row, head and tile of values reads its part of the checkpoint once, some key channels at a time.
Checkpoint and ring meet the new tokens in matrix products; what these correct of one another is a triangular system.
Legend: V value channels of a head's tile, K key channels, D decays of a head (1 or K), T new tokens, J ring entries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import (
    LAUNCH,
    load_tile,
    precision,
    require_dense,
    state_tile,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.mamba.ops.shared.triton_delta import (
    betas,
    block_options,
    by_head,
    log_decays,
    pairs,
    product,
    ring_keys,
    seen_products,
    shape_options,
    solve,
    sums_of_tokens,
    to_unit,
)

_SLICE = 16  # key channels at a time: products of all of them would spill registers


@triton.jit
def _take(k_TK, q_TK, sum_TD, state_VK, old_JK, left_JD, fade_D, t, count,
          DECAYS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Of a tile of key channels: what keys and queries take of the checkpoint, of entries, and of one another."""
    # Raw halves: their products are exact.
    key_TT, query_TT = pairs(k_TK, q_TK, sum_TD, t, count, DECAYS, PRECISION)
    k_TK *= tl.exp(sum_TD)
    q_TK *= tl.exp(sum_TD)
    left_JK = old_JK * left_JD
    key_JT, query_JT = product(left_JK, tl.trans(k_TK), EXACT), product(left_JK, tl.trans(q_TK), PRECISION)
    key_VT = product(state_VK, tl.trans(k_TK * fade_D[None, :]), EXACT)
    query_VT = product(state_VK, tl.trans(q_TK * fade_D[None, :]), PRECISION)
    return key_VT, query_VT, key_JT, query_JT, key_TT, query_TT


@triton.jit
def _row(
    state_V, ring_k_ptr, ring_u_V, ring_g_ptr, q_ptr, k_ptr, v_V, a_ptr, b_ptr, A, bias_ptr, o_V,
    head, first, count, slot, start, length, kept, tile, beta_scale,
    q_token, k_token, v_token, a_token, b_token, real_V,
    GROUP: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Pointers are those of the row's slot and ring, and of the head."""
    t, j = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_J)
    real_T, kept_T, token_T = t < count, t < kept, (first + t).to(tl.int64)
    place_T, place_J = ((start + length + t) % CAPACITY).to(tl.int64), ((start + j) % CAPACITY).to(tl.int64)
    zero_VT = tl.zeros([real_V.shape[0], BLOCK_T], tl.float32)
    zero_JT, zero_J = tl.zeros([BLOCK_J, BLOCK_T], tl.float32), tl.zeros([BLOCK_J], tl.float32)
    zero_TT, zero_T = tl.zeros([BLOCK_T, BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    # Before keys and queries have length 1: what it takes is known at the end.
    key_VT, key_JT, key_TT, k_T, old_J = zero_VT, zero_JT, zero_TT, zero_T, zero_J
    query_VT, query_JT, query_TT, q_T = zero_VT, zero_JT, zero_TT, zero_T
    for begin in range(0, KEY_DIM, BLOCK_K):
        k, d = begin + tl.arange(0, BLOCK_K), (begin if DECAYS > 1 else 0) + tl.arange(0, BLOCK_D)
        real_K, real_D = k < KEY_DIM, d < DECAYS
        state_VK = tl.load(state_V[:, None] + k[None, :], real_V[:, None] & (k < slot)[None, :], 0)
        raw_TK = load_tile(k_ptr + k, token_T * k_token, real_T, real_K)
        q_TK = load_tile(q_ptr + k, token_T * q_token, real_T, real_K).to(tl.float32)
        k_TK = raw_TK.to(tl.float32)
        g_TD = log_decays(a_ptr + d, token_T * a_token, A, bias_ptr + d, real_T, real_D)
        old_JK, left_JD, fade_D = ring_keys(
            ring_k_ptr + k, ring_g_ptr + d, start, length, j, real_K, real_D,
            HEADS // GROUP * KEY_DIM, HEADS * DECAYS, CAPACITY,
        )  # fmt: skip
        k_T += tl.sum(k_TK * k_TK, 1)
        q_T += tl.sum(q_TK * q_TK, 1)
        old_J += tl.sum(old_JK * old_JK, 1)
        sum_TD = sums_of_tokens(g_TD, False)
        more = _take(
            k_TK, q_TK, sum_TD, state_VK.to(tl.float32), old_JK, left_JD, fade_D, t, count,
            DECAYS, PRECISION, EXACT,
        )  # fmt: skip
        key_VT, query_VT, key_JT = key_VT + more[0], query_VT + more[1], key_JT + more[2]
        query_JT, key_TT, query_TT = query_JT + more[3], key_TT + more[4], query_TT + more[5]
        if tile == 0:
            store_tile(ring_g_ptr + d, place_T * (HEADS * DECAYS), g_TD, kept_T, real_D)
            kept_K = k < tl.where(head % GROUP == 0, KEY_DIM, 0)
            store_tile(ring_k_ptr + k, place_T * (HEADS // GROUP * KEY_DIM), raw_TK, kept_T, kept_K)
    k_T, q_T = to_unit(k_T), to_unit(q_T) * KEY_DIM**-0.5
    # Values stand first in what follows, since tensor cores take at least 16 lines a warp, and tokens are few.
    old_JV = load_tile(ring_u_V, place_J * (HEADS * VALUE_DIM), j < length, real_V)
    old_VJ = tl.trans(old_JV * to_unit(old_J)[:, None])
    beta_T = betas(b_ptr + token_T * b_token, real_T, beta_scale)
    u_VT = tl.trans(load_tile(v_V, token_T * v_token, real_T, real_V)).to(tl.float32)
    u_VT = beta_T[None, :] * (u_VT - k_T[None, :] * (key_VT + product(old_VJ, key_JT, EXACT)))
    u_VT = solve(key_TT * (beta_T * k_T)[:, None] * k_T[None, :], u_VT, t, count)
    o_VT = query_VT + product(old_VJ, query_JT, PRECISION)
    o_VT += seen_products(query_TT * k_T[None, :], u_VT, t, count)
    store_tile(o_V, token_T * (HEADS * VALUE_DIM), tl.trans(o_VT * q_T[None, :]), real_T, real_V)
    store_tile(ring_u_V, place_T * (HEADS * VALUE_DIM), tl.trans(u_VT), kept_T, real_V)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def replay_kernel(
    state_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr,
    starts_ptr, slot_ptr, ring_row_ptr, ring_start_ptr, ring_len_ptr, o_ptr,
    num_rows, num_tokens, max_query_len, beta_scale,
    state_slot, ring_k_row, ring_u_row, ring_g_row,
    q_token, q_group, k_token, k_group, v_token, v_head, a_token, a_head, b_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles of values, rows + 1): the last row zeroes the tokens of no row."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head, tile, row = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real_V, lane_V, group = v < VALUE_DIM, head * VALUE_DIM + v, head // GROUP
    first, there = tl.load(starts_ptr + row), row < num_rows  # all loads in flight at once
    slot = tl.load(slot_ptr + row, mask=there, other=0).to(tl.int64)
    ring_row = tl.load(ring_row_ptr + row, mask=there, other=0).to(tl.int64)
    start = tl.load(ring_start_ptr + row, mask=there, other=0)
    length = unless_null(ring_row, tl.load(ring_len_ptr + row, mask=there, other=0)).to(tl.int32)
    if row == num_rows:
        zero_tail(o_ptr, first, num_tokens, HEADS * VALUE_DIM, lane_V, real_V)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    _row(
        state_ptr + slot * state_slot + lane_V * KEY_DIM, ring_k_ptr + ring_row * ring_k_row + group * KEY_DIM,
        ring_u_ptr + ring_row * ring_u_row + lane_V, ring_g_ptr + ring_row * ring_g_row + head * DECAYS,
        q_ptr + group * q_group, k_ptr + group * k_group, v_ptr + head * v_head + v, a_ptr + head * a_head,
        b_ptr + head, tl.load(A_ptr + head).to(tl.float32), bias_ptr + head * DECAYS, o_ptr + lane_V,
        head, first, count, unless_null(slot, KEY_DIM), start, length, unless_null(ring_row, count), tile, beta_scale,
        q_token, k_token, v_token, a_token, b_token, real_V,
        GROUP, HEADS, VALUE_DIM, KEY_DIM, DECAYS, CAPACITY, BLOCK_T, BLOCK_J, BLOCK_K, BLOCK_D, PRECISION, EXACT,
    )  # fmt: skip


@cache
def tile_options(
    value_dim: int, key_dim: int, decays: int, capacity: int, max_query_len: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Tile sizes and launch options of `replay_kernel`."""
    blocks = block_options(key_dim, decays, most=_SLICE)
    tiles = {
        "BLOCK_T": max(16, triton.next_power_of_2(max_query_len)),
        "BLOCK_J": max(16, triton.next_power_of_2(capacity)),
        "BLOCK_V": state_tile(value_dim, 64),
        "PRECISION": precision(dtype),
        "EXACT": precision(dtype, state=True),  # corrected values go into states
        "num_stages": 1,  # loads of the next slice in flight would spill as well
    }
    return LAUNCH | blocks | tiles


def delta_replay_update(
    state, ring_k, ring_u, ring_g, q, k, v, a, b, A, dt_bias, query_start_loc, max_query_len,
    slot, ring_row, ring_start, ring_len, beta_scale,
):  # fmt: skip
    """See `bateleur.mamba.ops.delta_replay_update`."""
    require_dense(1, q=q, k=k, v=v, a=a, b=b, A=A)
    require_dense(dt_bias.dim(), dt_bias=dt_bias)
    require_dense(3, state=state, ring_k=ring_k, ring_u=ring_u)
    require_dense(ring_g.dim() - 1, ring_g=ring_g)
    num_rows, capacity, shape = slot.shape[0], ring_u.shape[1], shape_options(q, v, a)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    sizes = shape["VALUE_DIM"], shape["KEY_DIM"], shape["DECAYS"]
    options = tile_options(*sizes, capacity, max_query_len, v.dtype)
    tiles = triton.cdiv(shape["VALUE_DIM"], options["BLOCK_V"])
    replay_kernel[(shape["HEADS"] * tiles, num_rows + 1)](
        state, ring_k, ring_u, ring_g, q, k, v, a, b, A, dt_bias,
        query_start_loc, slot, ring_row, ring_start, ring_len, o,
        num_rows, v.shape[0], max_query_len, beta_scale,
        state.stride(0), ring_k.stride(0), ring_u.stride(0), ring_g.stride(0),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *by_head(a), b.stride(0),
        CAPACITY=capacity, **shape, **options,
    )  # fmt: skip
    return o
