"""Adds ring entries of Mamba-2 to saved states: one launch for all requests and layers.

Most requests have no fold (`dst` is 0), so programs skip them: see `rows_of_share`.
Legend: P channels of a head's tile, N state entries, J ring entries, R rows (requests).
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import (
    LAUNCH,
    load_tile,
    next_row,
    precision,
    require_dense,
    row_shares,
    rows_of_share,
    state_tile,
    store_tile,
    unless_null,
)
from bateleur.mamba.ops.shared.triton_conv import keep_window
from bateleur.metadata.dispatch import cdiv

_TILE_ENTRIES = 8192  # of a state; half of it for float32, which has no tensor cores and would spill registers
_BLOCK_C = 512


@triton.jit
def _fold_head(
    state_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, A_ptr,
    head, ring_row, start, count, src, dst, state_slot, ring_x_row, ring_dt_row, ring_B_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j, n = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_N)
    real_J, real_N = j < count, n < STATE
    place_J = ((start + j) % CAPACITY).to(tl.int64)
    step_J = tl.load(ring_dt_ptr + ring_row * ring_dt_row + place_J * HEADS + head, mask=real_J, other=0)
    g_J = tl.load(A_ptr + head).to(tl.float32) * step_J
    later_J = tl.sum(tl.where(j[None, :] > j[:, None], g_J[None, :], 0.0), 1)  # log decay after each entry
    weight_J = tl.exp(later_J) * step_J
    ring_B_N = ring_B_ptr + ring_row * ring_B_row + head // GROUP * STATE + n
    B_JN = load_tile(ring_B_N, place_J * (HEADS // GROUP * STATE), real_J, real_N).to(tl.float32)
    fade = tl.exp(tl.sum(g_J, 0))
    for first in range(0, HEAD_DIM, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        lane_P, real_P = head * HEAD_DIM + p, p < HEAD_DIM
        ring_x_P = ring_x_ptr + ring_row * ring_x_row + lane_P
        x_JP = load_tile(ring_x_P, place_J * (HEADS * HEAD_DIM), real_J, real_P).to(tl.float32)
        read_N = n < unless_null(src, STATE)
        state_PN = load_tile(state_ptr + src * state_slot + n, lane_P * STATE, real_P, read_N).to(tl.float32)
        u_PJ = tl.trans(x_JP * weight_J[:, None])
        state_PN = tl.dot(u_PJ, B_JN, state_PN * fade, input_precision=PRECISION)
        tl.debug_barrier()  # source and destination may be one slot
        store_tile(state_ptr + dst * state_slot + n, lane_P * STATE, state_PN, real_P, real_N)


@triton.jit(do_not_specialize=["num_rows"])
def fold_kernel(
    state_ptr, conv_ptr, window_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, A_ptr,
    ring_row_ptr, ring_start_ptr, count_ptr, src_ptr, dst_ptr, offset_ptr,
    state_layer, state_slot, conv_layer, conv_slot, conv_entry, window_layer, window_row, window_entry,
    ring_x_layer, ring_x_row, ring_dt_layer, ring_dt_row, ring_B_layer, ring_B_row, A_layer, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CAPACITY: tl.constexpr,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add ring entries to saved states, and copy the conv windows: S <- decay S + sum_j decay_j dt_j x_j B_j^T.

    Grid (heads + tiles of conv channels, groups of requests, layers). Occupancy on sm_90: at least 2 blocks per SM.
    """
    part, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    for begin in range(0, num_rows, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        dst_R = rows_of_share(dst_ptr, r, num_rows)
        row = next_row(dst_R, r, -1)
        while row < num_rows:
            dst, ring_row = tl.load(dst_ptr + row).to(tl.int64), tl.load(ring_row_ptr + row).to(tl.int64)
            if part < HEADS:
                _fold_head(
                    state_ptr + layer * state_layer, ring_x_ptr + layer * ring_x_layer,
                    ring_dt_ptr + layer * ring_dt_layer, ring_B_ptr + layer * ring_B_layer, A_ptr + layer * A_layer,
                    part, ring_row, tl.load(ring_start_ptr + row), tl.load(count_ptr + row),
                    tl.load(src_ptr + row).to(tl.int64), dst, state_slot, ring_x_row, ring_dt_row, ring_B_row,
                    HEADS, GROUP, HEAD_DIM, STATE, CAPACITY, BLOCK_J, BLOCK_P, BLOCK_N, PRECISION,
                )  # fmt: skip
            else:
                row_window_ptr = window_ptr + layer * window_layer + ring_row * window_row
                keep_window(
                    row_window_ptr, conv_ptr + layer * conv_layer + dst * conv_slot, tl.load(offset_ptr + row),
                    part - HEADS, window_entry, conv_entry, KEEP, CHANNELS, BLOCK_E, BLOCK_C,
                )  # fmt: skip
            row = next_row(dst_R, r, row)


@cache
def tile_options(head_dim: int, state_size: int, capacity: int, keep: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile sizes and launch options of `fold_kernel`; keep: entries of a conv window."""
    block_n = max(16, triton.next_power_of_2(state_size))
    entries = _TILE_ENTRIES // 2 if dtype == torch.float32 else _TILE_ENTRIES
    return LAUNCH | {
        "BLOCK_J": max(16, triton.next_power_of_2(capacity)),
        "BLOCK_P": state_tile(head_dim, max(16, entries // block_n)),
        "BLOCK_N": block_n,
        "PRECISION": precision(dtype, state=True),
        "BLOCK_E": triton.next_power_of_2(keep),
        "BLOCK_C": _BLOCK_C,
        "BLOCK_R": 256,
    }


def fold_ring(
    ssm_state, conv_state, request_conv, ring_x, ring_dt, ring_B, A, ring_row, ring_start, count, src, dst, page_offset,
):  # fmt: skip
    """Update saved states with ring entries in one launch. No request may write a state slot that another reads."""
    require_dense(1, conv_state=conv_state, request_conv=request_conv, A=A)
    require_dense(2, ring_dt=ring_dt)
    require_dense(3, ssm_state=ssm_state, ring_x=ring_x, ring_B=ring_B)
    layers, _, capacity, heads, head_dim = ring_x.shape
    groups, state_size = ring_B.shape[3:]
    keep, channels = conv_state.shape[2:]
    options = tile_options(head_dim, state_size, capacity, keep, ring_x.dtype)
    parts, num_rows = heads + cdiv(channels, options["BLOCK_C"]), dst.shape[0]
    fold_kernel[(parts, row_shares(num_rows, parts * layers), layers)](
        ssm_state, conv_state, request_conv, ring_x, ring_dt, ring_B, A,
        ring_row, ring_start, count, src, dst, page_offset,
        *ssm_state.stride()[:2], *conv_state.stride()[:3], *request_conv.stride()[:3],
        *ring_x.stride()[:2], *ring_dt.stride()[:2], *ring_B.stride()[:2], A.stride(0), num_rows,
        HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, STATE=state_size, CAPACITY=capacity,
        KEEP=keep, CHANNELS=channels, **options,
    )  # fmt: skip
