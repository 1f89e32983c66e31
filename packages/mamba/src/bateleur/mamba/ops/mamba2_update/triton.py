"""The Mamba-2 recurrence of decodes, writing a state per token: one program per request, head and tile of channels.

A program reads its tile of the state once, and keeps it in registers for all tokens of the request. The time is that
of reading one state and of writing one state per token.
Legend: P channels of a head's tile, N state entries.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import (
    LAUNCH,
    load_tile,
    require_dense,
    step_size,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.metadata.dispatch import cdiv

_TILE_ENTRIES = 2048  # of a state, per program: four loads of 16 bytes per thread in float32


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def update_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, starts_ptr, read_ptr, write_ptr, y_ptr,
    num_rows, num_tokens, max_query_len, dt_min, dt_max,
    state_slot, x_token, x_head, dt_token, B_token, B_group, C_token, C_group, write_row, write_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Run the recurrence over the tokens of each decode, and write the state after each token to its state slot.

    Grid (heads x tiles of channels, requests + 1): the last programs zero the tokens of no request.
    Occupancy on sm_90: at least 8 blocks per SM.
    """
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    p = tl.program_id(0) % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    real_P, real_N = p < HEAD_DIM, n < STATE
    lane_P = head * HEAD_DIM + p
    slot = tl.load(read_ptr + row, mask=row < num_rows, other=0).to(tl.int64)  # all loads in flight at once
    first = tl.load(starts_ptr + row)
    if row == num_rows:
        zero_tail(y_ptr, first, num_tokens, HEADS * HEAD_DIM, lane_P, real_P)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    read_N = n < unless_null(slot, STATE)
    state_PN = load_tile(state_ptr + slot * state_slot + n, lane_P * STATE, real_P, read_N).to(tl.float32)
    tl.debug_barrier()  # a row may write the slot that it reads
    group = head // GROUP
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for i in range(count):
        token = first.to(tl.int64) + i
        step = step_size(tl.load(dt_ptr + token * dt_token + head), bias, dt_min, dt_max)
        x_P = tl.load(x_ptr + token * x_token + head * x_head + p, mask=real_P, other=0).to(tl.float32)
        B_N = tl.load(B_ptr + token * B_token + group * B_group + n, mask=real_N, other=0).to(tl.float32)
        C_N = tl.load(C_ptr + token * C_token + group * C_group + n, mask=real_N, other=0).to(tl.float32)
        state_PN = state_PN * tl.exp(A * step) + (x_P * step)[:, None] * B_N[None, :]
        y_P = tl.sum(state_PN * C_N[None, :], 1) + D * x_P
        y_at_P = y_ptr + token * (HEADS * HEAD_DIM) + lane_P
        tl.store(y_at_P, y_P.to(y_ptr.dtype.element_ty), mask=real_P)
        slot = tl.load(write_ptr + row * write_row + i * write_token).to(tl.int64)
        write_N = n < unless_null(slot, STATE)
        store_tile(state_ptr + slot * state_slot + n, lane_P * STATE, state_PN, real_P, write_N)


@cache
def tile_options(head_dim: int, state_size: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `update_kernel`."""
    block_n = triton.next_power_of_2(state_size)
    return LAUNCH | {
        "BLOCK_P": min(triton.next_power_of_2(head_dim), max(1, _TILE_ENTRIES // block_n)),
        "BLOCK_N": block_n,
    }


def selective_state_update(
    ssm_state, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len, read, write, dt_min, dt_max,
):  # fmt: skip
    """Run Mamba-2 over up to 1 + drafts tokens per request. No request may write a state slot that another reads."""
    require_dense(1, x=x, dt=dt, B=B, C=C)
    require_dense(3, ssm_state=ssm_state)
    num_rows, (num_tokens, heads, head_dim) = read.shape[0], x.shape
    groups, state_size = B.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = tile_options(head_dim, state_size)
    tiles = cdiv(head_dim, options["BLOCK_P"])
    update_kernel[(heads * tiles, num_rows + 1)](
        ssm_state, x, dt, A, B, C, D, dt_bias, query_start_loc, read, write, y,
        num_rows, num_tokens, min(max_query_len, write.shape[1]), dt_min, dt_max,
        ssm_state.stride(0), *x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], *write.stride(),
        HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, STATE=state_size, **options,
    )  # fmt: skip
    return y
