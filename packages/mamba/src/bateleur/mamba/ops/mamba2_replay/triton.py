"""The Mamba-2 recurrence of decodes under FOLD: from a saved state and a ring of inputs, without writing a state.

One program per request, head and tile of channels reads its tile of the saved state once. Outputs are small matrix
products of saved state, ring entries and new tokens, where the new tokens are padded to 16. Legend: P channels of a
head's tile, N state entries, T new tokens, J ring entries followed by the new tokens.
"""

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
    rounded,
    state_tile,
    step_size,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.metadata.dispatch import cdiv

_TILE_ENTRIES = 8192  # of a state, per program: 32 KiB in float32


@triton.jit
def _entries(old_ptr_L, new_ptr_L, place_J, token_J, old_J, new_J, real_L):
    """Load a matrix (J, L) float32, L numbers per row: ring entries, then new tokens, then zeros."""
    old_JL = load_tile(old_ptr_L, place_J, old_J, real_L).to(tl.float32)
    return tl.where(new_J[:, None], load_tile(new_ptr_L, token_J, new_J, real_L).to(tl.float32), old_JL)


@triton.jit
def _weights(CB_TJ, g_J, step_J, length, t, j):
    """Return the decay from the saved state to each query (T,), and the weight of each entry for each query (T, J).

    Sums for queries and entries add the same numbers in the same order, so the decay of a query to itself is exactly 1.
    """
    sum_J = tl.sum(tl.where(j[:, None] >= j[None, :], g_J[None, :], 0.0), 1)
    sum_T = tl.sum(tl.where(length + t[:, None] >= j[None, :], g_J[None, :], 0.0), 1)
    decay_TJ = tl.exp(tl.minimum(sum_T[:, None] - sum_J[None, :], 0.0))
    seen_TJ = length + t[:, None] >= j[None, :]
    return tl.exp(sum_T), tl.where(seen_TJ, CB_TJ * decay_TJ * step_J[None, :], 0.0)


@triton.jit
def _add_new(y_TP, weight_TJ, x_P, x_token, real_P, length, count, t, j):
    """Add the new tokens to the outputs one by one: in a matrix product, a NaN draft would be multiplied by zero, and
    the result would be NaN for earlier tokens.
    """
    for i in range(count):
        own_P = tl.load(x_P + i * x_token, mask=real_P, other=0).to(tl.float32)
        weight_T = tl.sum(tl.where(j[None, :] == length + i, weight_TJ, 0.0), 1)
        y_TP += tl.where(t[:, None] >= i, weight_T[:, None] * own_P[None, :], 0.0)
    return y_TP


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def replay_kernel(
    state_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr,
    starts_ptr, slot_ptr, ring_row_ptr, ring_start_ptr, ring_len_ptr, y_ptr,
    num_rows, num_tokens, max_query_len, dt_min, dt_max,
    state_slot, ring_x_row, ring_dt_row, ring_B_row, x_token, x_head, dt_token, B_token, B_group, C_token, C_group,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of each decode from its saved state and ring, and append its tokens to the ring.

    Grid (heads x tiles of channels, requests + 1): the last programs zero the tokens of no request.
    Occupancy on sm_90: at least 2 blocks per SM.
    """
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head, tile, row = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    p, n = tile * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    t, j = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_J)
    real_P, real_N = p < HEAD_DIM, n < STATE
    lane_P, group = head * HEAD_DIM + p, head // GROUP
    first, there = tl.load(starts_ptr + row), row < num_rows  # all loads in flight at once
    slot = tl.load(slot_ptr + row, mask=there, other=0).to(tl.int64)
    ring_row = tl.load(ring_row_ptr + row, mask=there, other=0).to(tl.int64)
    ring_start = tl.load(ring_start_ptr + row, mask=there, other=0)
    length = unless_null(ring_row, tl.load(ring_len_ptr + row, mask=there, other=0)).to(tl.int32)
    if row == num_rows:
        zero_tail(y_ptr, first, num_tokens, HEADS * HEAD_DIM, lane_P, real_P)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    read_N = n < unless_null(slot, STATE)
    state_PN = load_tile(state_ptr + slot * state_slot + n, lane_P * STATE, real_P, read_N).to(tl.float32)
    place_J = ((ring_start + j) % CAPACITY).to(tl.int64)
    token_J, token_T = (first + j - length).to(tl.int64), (first + t).to(tl.int64)
    old_J, new_J, real_T = j < length, (j >= length) & (j < length + count), t < count

    dt_J = ring_dt_ptr + ring_row * ring_dt_row + place_J * HEADS + head
    raw_J = tl.load(dt_ptr + token_J * dt_token + head, mask=new_J, other=0)
    step_J = step_size(raw_J, tl.load(bias_ptr + head).to(tl.float32), dt_min, dt_max)
    step_J = tl.where(new_J, step_J, tl.load(dt_J, mask=old_J, other=0))
    ring_B_N = ring_B_ptr + ring_row * ring_B_row + group * STATE + n
    B_place_J = place_J * (HEADS // GROUP * STATE)
    ring_x_P, x_place_J = ring_x_ptr + ring_row * ring_x_row + lane_P, place_J * (HEADS * HEAD_DIM)
    x_P = x_ptr + head * x_head + p
    B_JN = _entries(ring_B_N, B_ptr + group * B_group + n, B_place_J, token_J * B_token, old_J, new_J, real_N)
    x_JP = _entries(ring_x_P, x_P, x_place_J, token_J * x_token, old_J, new_J, real_P)
    C_TN = load_tile(C_ptr + group * C_group + n, token_T * C_token, real_T, real_N).to(tl.float32)
    CB_TJ = tl.dot(C_TN, tl.trans(B_JN), input_precision=PRECISION)
    fade_T, weight_TJ = _weights(CB_TJ, tl.load(A_ptr + head).to(tl.float32) * step_J, step_J, length, t, j)
    y_TP = tl.dot(C_TN, tl.trans(rounded(state_PN, PRECISION)), input_precision=PRECISION) * fade_T[:, None]
    old_JP = tl.where(old_J[:, None], x_JP, 0.0)
    y_TP = tl.dot(rounded(weight_TJ, PRECISION), old_JP, y_TP, input_precision=PRECISION)
    y_TP = _add_new(y_TP, weight_TJ, x_P + first.to(tl.int64) * x_token, x_token, real_P, length, count, t, j)
    x_TP = load_tile(x_P, token_T * x_token, real_T, real_P).to(tl.float32)
    y_TP += tl.load(D_ptr + head).to(tl.float32) * x_TP
    store_tile(y_ptr + lane_P, token_T * (HEADS * HEAD_DIM), y_TP, real_T, real_P)

    kept_J = new_J & (j < unless_null(ring_row, CAPACITY))
    store_tile(ring_x_P, x_place_J, x_JP, kept_J, real_P)
    if tile == 0:
        tl.store(dt_J, step_J, mask=kept_J)
        if head % GROUP == 0:
            store_tile(ring_B_N, B_place_J, B_JN, kept_J, real_N)


@cache
def tile_options(
    head_dim: int, state_size: int, capacity: int, max_query_len: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return tile sizes and launch options of `replay_kernel`."""
    block_n = max(16, triton.next_power_of_2(state_size))
    exact = dtype == torch.float32  # needs more registers: larger tiles or four warps would spill
    return LAUNCH | {
        "BLOCK_T": max(16, triton.next_power_of_2(max_query_len)),
        "BLOCK_J": max(16, triton.next_power_of_2(capacity)),
        "BLOCK_P": state_tile(head_dim, max(16, _TILE_ENTRIES // block_n // (2 if exact else 1))),
        "BLOCK_N": block_n,
        "PRECISION": precision(dtype),
        "num_warps": 8 if exact else 4,
    }


def replay_update(
    ssm_state, ring_x, ring_dt, ring_B, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len,
    slot, ring_row, ring_start, ring_len, dt_min, dt_max,
):  # fmt: skip
    """Run Mamba-2 over 1 to 1 + K tokens (K drafts) per request with saved states and rings, in one launch."""
    require_dense(1, x=x, dt=dt, B=B, C=C)
    require_dense(2, ring_dt=ring_dt)
    require_dense(3, ssm_state=ssm_state, ring_x=ring_x, ring_B=ring_B)
    num_rows, (num_tokens, heads, head_dim) = slot.shape[0], x.shape
    (groups, state_size), capacity = B.shape[1:], ring_dt.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = tile_options(head_dim, state_size, capacity, max_query_len, x.dtype)
    tiles = cdiv(head_dim, options["BLOCK_P"])
    replay_kernel[(heads * tiles, num_rows + 1)](
        ssm_state, ring_x, ring_dt, ring_B, x, dt, A, B, C, D, dt_bias,
        query_start_loc, slot, ring_row, ring_start, ring_len, y,
        num_rows, num_tokens, max_query_len, dt_min, dt_max,
        ssm_state.stride(0), ring_x.stride(0), ring_dt.stride(0), ring_B.stride(0),
        *x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2],
        HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, STATE=state_size, CAPACITY=capacity, **options,
    )  # fmt: skip
    return y
