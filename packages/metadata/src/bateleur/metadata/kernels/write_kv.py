"""Rotary embedding of queries and keys, fused with the write of keys and values by slot.

Legend: H heads of a tile, L lanes: of a head, or of one half of the lanes that turn.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import triton
import triton.language as tl

_TILE_LANES = 1024  # of one program: 8 a thread, 16 bytes of bfloat16


@triton.jit
def _copy(source_HL, target_HL, real_HL):
    x_HL = tl.load(source_HL, mask=real_HL)
    tl.store(target_HL, x_HL.to(target_HL.dtype.element_ty), mask=real_HL)


@triton.jit
def _rotate(source_HL, target_HL, real_HL, cos_L, sin_L, turning_L, HALF: tl.constexpr):
    """Lane i turns with lane i + HALF, in float32; source and target may be the same memory."""
    low_HL = tl.load(source_HL, mask=real_HL).to(tl.float32)
    high_HL = tl.load(source_HL + HALF, mask=real_HL).to(tl.float32)
    turned_low_HL = low_HL * tl.load(cos_L, mask=turning_L) + high_HL * tl.load(sin_L, mask=turning_L)
    cos_L += HALF
    sin_L += HALF
    turned_high_HL = high_HL * tl.load(cos_L, mask=turning_L) + low_HL * tl.load(sin_L, mask=turning_L)
    tl.debug_barrier()  # in place: all of the tile is read before any of it is written
    element = target_HL.dtype.element_ty
    tl.store(target_HL, turned_low_HL.to(element), mask=real_HL)
    tl.store(target_HL + HALF, turned_high_HL.to(element), mask=real_HL)


@triton.jit
def write_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, cos_ptr, sin_ptr,
    q_token, k_token, v_token, rotary_token, kv_block, kv_slot, kv_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of query heads that turn + tiles of key heads)."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = ROTARY_DIM // 2
    Q_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H if ROTARY_DIM > 0 else 0
    half_L = tl.arange(0, BLOCK_HALF)[None, :]
    cos_L, sin_L = cos_ptr + token * rotary_token + half_L, sin_ptr + token * rotary_token + half_L
    if tile < Q_TILES:
        head_H = tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        q_HL = q_ptr + token * q_token + head_H * HEAD_DIM + half_L
        _rotate(q_HL, q_HL, (head_H < HEADS) & (half_L < HALF), cos_L, sin_L, half_L < HALF, HALF)
        return
    head_H = (tile - Q_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    slot = tl.load(slots_ptr + token)
    real_H = head_H < tl.where(slot >= 0, KV_HEADS, 0)
    lane_L = tl.arange(0, BLOCK_D)[None, :]
    in_cache = slot // BLOCK_SIZE * kv_block + slot % BLOCK_SIZE * kv_slot
    k_H = k_ptr + token * k_token + head_H * HEAD_DIM
    k_cache_H = k_cache_ptr + in_cache + head_H * kv_head
    v_HL = v_ptr + token * v_token + head_H * HEAD_DIM + lane_L
    _copy(v_HL, v_cache_ptr + in_cache + head_H * kv_head + lane_L, real_H & (lane_L < HEAD_DIM))
    if ROTARY_DIM > 0:
        real_HL = real_H & (half_L < HALF)
        _rotate(k_H + half_L, k_cache_H + half_L, real_HL, cos_L, sin_L, half_L < HALF, HALF)
    if ROTARY_DIM < HEAD_DIM:
        _copy(k_H + lane_L, k_cache_H + lane_L, real_H & (lane_L >= ROTARY_DIM) & (lane_L < HEAD_DIM))


def tile_options(num_kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, Any]:
    """Tile sizes and launch options of :func:`write_kernel`."""
    block_d = triton.next_power_of_2(head_dim)
    return {
        "BLOCK_H": max(1, min(triton.next_power_of_2(num_kv_heads), _TILE_LANES // block_d)),
        "BLOCK_HALF": triton.next_power_of_2(max(rotary_dim // 2, 1)),
        "BLOCK_D": block_d,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
