"""Adds ring entries of a delta rule to saved states: one launch for all requests and layers.

Most requests have no fold (`dst` is 0), so programs skip them: see `rows_of_share`. The ring stores corrected
values, so the new state is a sum of outer products.
Legend: V value channels of a head's tile, K key channels, D decays of a head (1 or K), J ring entries.
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
from bateleur.mamba.ops.shared.triton_delta_rule import block_options, ring_keys, shape_options, unit
from bateleur.metadata.dispatch import cdiv

_TILE_ENTRIES = 8192  # of a state; half of it for float32, which has no tensor cores and would spill registers
_BLOCK_C = 512


@triton.jit
def _fold_head(
    state_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr,
    head, start, count, src, dst, state_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the state of one head of one request with its ring entries; ring pointers point to the request's ring."""
    j, k, d = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    real_J, real_K = j < count, k < KEY_DIM
    k_JK, left_JD, fade_D = ring_keys(
        ring_k_ptr + head // GROUP * KEY_DIM + k, ring_g_ptr + head * DECAYS + d, start, count, j,
        real_K, d < DECAYS, HEADS // GROUP * KEY_DIM, HEADS * DECAYS, CAPACITY,
    )  # fmt: skip
    k_JK = unit(k_JK) * left_JD
    u_place_J = ((start + j) % CAPACITY).to(tl.int64) * (HEADS * VALUE_DIM)
    for first in range(0, VALUE_DIM, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        lane_V, real_V = head * VALUE_DIM + v, v < VALUE_DIM
        u_JV = load_tile(ring_u_ptr + lane_V, u_place_J, real_J, real_V).to(tl.float32)
        read_K = k < unless_null(src, KEY_DIM)
        state_VK = load_tile(state_ptr + src * state_slot + k, lane_V * KEY_DIM, real_V, read_K).to(tl.float32)
        state_VK = tl.dot(tl.trans(u_JV), k_JK, state_VK * fade_D[None, :], input_precision=PRECISION)
        tl.debug_barrier()  # source and destination may be one slot
        store_tile(state_ptr + dst * state_slot + k, lane_V * KEY_DIM, state_VK, real_V, real_K)


@triton.jit(do_not_specialize=["num_rows"])
def fold_kernel(
    state_ptr, conv_ptr, window_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr,
    ring_row_ptr, ring_start_ptr, count_ptr, src_ptr, dst_ptr, offset_ptr,
    state_layer, state_slot, conv_layer, conv_slot, conv_entry, window_layer, window_row, window_entry,
    ring_k_layer, ring_k_row, ring_u_layer, ring_u_row, ring_g_layer, ring_g_row, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, KEEP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add ring entries to saved states, and copy the conv windows: S <- decay S + sum_j decay_j u_j k_j^T.

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
                    state_ptr + layer * state_layer, ring_k_ptr + layer * ring_k_layer + ring_row * ring_k_row,
                    ring_u_ptr + layer * ring_u_layer + ring_row * ring_u_row,
                    ring_g_ptr + layer * ring_g_layer + ring_row * ring_g_row,
                    part, tl.load(ring_start_ptr + row), tl.load(count_ptr + row),
                    tl.load(src_ptr + row).to(tl.int64), dst, state_slot,
                    HEADS, GROUP, VALUE_DIM, KEY_DIM, DECAYS, CAPACITY, BLOCK_J, BLOCK_V, BLOCK_K, BLOCK_D, PRECISION,
                )  # fmt: skip
            else:
                row_window_ptr = window_ptr + layer * window_layer + ring_row * window_row
                keep_window(
                    row_window_ptr, conv_ptr + layer * conv_layer + dst * conv_slot, tl.load(offset_ptr + row),
                    part - HEADS, window_entry, conv_entry, KEEP, CHANNELS, BLOCK_E, BLOCK_C,
                )  # fmt: skip
            row = next_row(dst_R, r, row)


@cache
def tile_options(
    value_dim: int, key_dim: int, decays: int, capacity: int, keep: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return tile sizes and launch options of `fold_kernel`; keep: entries of a conv window."""
    blocks = block_options(key_dim, decays)
    entries = _TILE_ENTRIES // 2 if dtype == torch.float32 else _TILE_ENTRIES
    tiles = {
        "BLOCK_J": max(16, triton.next_power_of_2(capacity)),
        "BLOCK_V": state_tile(value_dim, max(16, entries // blocks["BLOCK_K"])),
        "PRECISION": precision(dtype, state=True),
        "BLOCK_E": triton.next_power_of_2(keep),
        "BLOCK_C": _BLOCK_C,
        "BLOCK_R": 256,
    }
    return LAUNCH | blocks | tiles


def delta_fold_ring(
    state, conv_state, request_conv, ring_k, ring_u, ring_g, ring_row, ring_start, count, src, dst, page_offset,
):  # fmt: skip
    """Update saved states with ring entries in one launch. No request may write a state slot that another reads."""
    require_dense(1, conv_state=conv_state, request_conv=request_conv)
    require_dense(3, state=state, ring_k=ring_k, ring_u=ring_u)
    require_dense(ring_g.dim() - 2, ring_g=ring_g)
    shape, layers, capacity = shape_options(ring_k, ring_u, ring_g), ring_u.shape[0], ring_u.shape[2]
    keep, channels = conv_state.shape[2:]
    sizes = shape["VALUE_DIM"], shape["KEY_DIM"], shape["DECAYS"]
    options = tile_options(*sizes, capacity, keep, ring_k.dtype)
    parts, num_rows = shape["HEADS"] + cdiv(channels, options["BLOCK_C"]), dst.shape[0]
    fold_kernel[(parts, row_shares(num_rows, parts * layers), layers)](
        state, conv_state, request_conv, ring_k, ring_u, ring_g,
        ring_row, ring_start, count, src, dst, page_offset,
        *state.stride()[:2], *conv_state.stride()[:3], *request_conv.stride()[:3],
        *ring_k.stride()[:2], *ring_u.stride()[:2], *ring_g.stride()[:2], num_rows,
        CAPACITY=capacity, KEEP=keep, CHANNELS=channels, **shape, **options,
    )  # fmt: skip
