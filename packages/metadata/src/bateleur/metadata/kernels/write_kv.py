"""RMS norm and rotary embedding of queries and keys, fused with the write of keys and values to the cache.

Shapes: H heads of a tile, L dimensions of a head ("lanes"), or one half of its rotated dimensions. real_HL: mask.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl

_TILE_LANES = 1024  # of one program: 8 per thread, 16 bytes of bfloat16


@triton.jit
def _normed(x_HL, scale_H, weight_HL, real_HL):
    """Multiply by norm scale and weights in float32, and round once to the dtype of the input."""
    y_HL = x_HL.to(tl.float32) * scale_H * tl.load(weight_HL, mask=real_HL, other=0).to(tl.float32)
    return y_HL.to(x_HL.dtype)


@triton.jit
def _fp8_of(x_HL):
    """Return float32 values as float8 e4m3, rounded to nearest, ties to even; saturates at 448 and keeps NaN.

    Computed with integers, because Triton's interpreter rounds in another way.
    """
    bits_HL = x_HL.to(tl.int32, bitcast=True)
    size_HL = tl.minimum(tl.abs(x_HL), 448.0)
    size_bits_HL = size_HL.to(tl.int32, bitcast=True)
    normal_HL = ((size_bits_HL + 0x7FFFF + ((size_bits_HL >> 20) & 1)) >> 20) - 120 * 8
    small_HL = (size_HL + 16384.0).to(tl.int32, bitcast=True) & 0xF  # multiples of 2^-9, the last bit of 2^14
    code_HL = tl.where(size_HL < 0.015625, small_HL, normal_HL)
    code_HL = tl.where(x_HL == x_HL, code_HL, 0x7F) | ((bits_HL >> 24) & 0x80)
    return code_HL.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _store(target_HL, x_HL, real_HL, kv_scale_H, SCALED: tl.constexpr):
    """Store values, divided by ``kv_scale_H`` if ``SCALED``. FP8 saturates and keeps NaN."""
    element = target_HL.dtype.element_ty
    if SCALED:
        x_HL = tl.div_rn(x_HL.to(tl.float32), kv_scale_H + tl.zeros_like(x_HL).to(tl.float32))
    if element.is_fp8():
        tl.store(target_HL, _fp8_of(x_HL.to(tl.float32)), mask=real_HL)
    else:
        tl.store(target_HL, x_HL.to(element), mask=real_HL)


@triton.jit
def _copy(source_HL, target_HL, real_HL, scale_H, weight_HL, kv_scale_H, NORM: tl.constexpr, SCALED: tl.constexpr):
    x_HL = tl.load(source_HL, mask=real_HL)
    if NORM > 0:
        x_HL = _normed(x_HL, scale_H, weight_HL, real_HL)
    _store(target_HL, x_HL, real_HL, kv_scale_H, SCALED)


@triton.jit
def _rotate(
    source_HL, target_HL, real_HL, cos_L, sin_L, turning_L, scale_H, weight_HL, kv_scale_H,
    HALF: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rotate dimensions i and i + HALF of each head, in float32. Source and target may be the same memory.

    turning_L: mask of the dimensions i. scale_H, weight_HL: of the norm, see `_normed`. kv_scale_H: see `_store`.
    """
    low_HL, high_HL = tl.load(source_HL, mask=real_HL), tl.load(source_HL + HALF, mask=real_HL)
    if NORM > 0:
        low_HL = _normed(low_HL, scale_H, weight_HL, real_HL)
        high_HL = _normed(high_HL, scale_H, weight_HL + HALF, real_HL)
    low_HL, high_HL = low_HL.to(tl.float32), high_HL.to(tl.float32)
    turned_low_HL = low_HL * tl.load(cos_L, mask=turning_L) + high_HL * tl.load(sin_L, mask=turning_L)
    cos_L += HALF
    sin_L += HALF
    turned_high_HL = high_HL * tl.load(cos_L, mask=turning_L) + low_HL * tl.load(sin_L, mask=turning_L)
    tl.debug_barrier()  # in place: all of the tile is read before any of it is written
    _store(target_HL, turned_low_HL, real_HL, kv_scale_H, SCALED)
    _store(target_HL + HALF, turned_high_HL, real_HL, kv_scale_H, SCALED)


@triton.jit
def _squares(x_HL, real_HL):
    """Return the sum of squares of every head, (H, 1)."""
    x_HL = tl.load(x_HL, mask=real_HL, other=0).to(tl.float32)
    return tl.sum(x_HL * x_HL, 1)[:, None]


@triton.jit
def _side(
    source_ptr, target_ptr, target_head, weight_ptr, kv_scales_ptr, cos_L, sin_L, eps, tile, real_heads,
    HEADS: tl.constexpr, TILES: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr, REST: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the query heads or the key heads of one tile of a token.

    Heads are read at ``source_ptr`` and written at ``target_ptr``: the same memory for queries, the slot in the cache
    for keys. target_head: stride of heads at the target. HEADS, TILES: heads of the token, and tiles that share them.
    real_heads: HEADS, or 0 for a token without a slot, whose keys are not written. REST: also copy the dimensions that
    are not rotated. weight_ptr, eps, NORM: of the norm (0: none). Other arguments as in `write_kernel`.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    half_L, lane_L = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, BLOCK_D)[None, :]
    h_H = tl.arange(0, BLOCK_H)[:, None]
    scale_H = tl.zeros([BLOCK_H, 1], tl.float32)
    if NORM == 2:
        for first in range(0, HEADS, BLOCK_H):
            head_H = first + h_H
            real_HL = (head_H < real_heads) & (lane_L < HEAD_DIM)
            scale_H += _squares(source_ptr + head_H * HEAD_DIM + lane_L, real_HL)
        scale_H = tl.rsqrt(tl.sum(scale_H, 0)[None, :] / (HEADS * HEAD_DIM) + eps)
    for first in range(tile * BLOCK_H, HEADS, TILES * BLOCK_H):
        head_H = first + h_H
        real_H = head_H < real_heads
        source_H, target_H, weight_H = (source_ptr + head_H * HEAD_DIM, target_ptr + head_H * target_head, weight_ptr)
        kv_scale_H = scale_H
        if SCALED:
            kv_scale_H = tl.load(kv_scales_ptr + head_H, mask=real_H, other=1)
        if NORM == 1:
            squares_H = _squares(source_H + lane_L, real_H & (lane_L < HEAD_DIM))
            scale_H = tl.rsqrt(squares_H / HEAD_DIM + eps)
        if NORM == 2:
            weight_H += head_H * HEAD_DIM
        if ROTARY_DIM > 0:
            _rotate(
                source_H + half_L, target_H + half_L, real_H & (half_L < HALF), cos_L, sin_L, half_L < HALF,
                scale_H, weight_H + half_L, kv_scale_H, HALF, NORM, SCALED,
            )  # fmt: skip
        if REST:
            resting_HL = real_H & (lane_L >= ROTARY_DIM) & (lane_L < HEAD_DIM)
            source_HL, weight_HL = source_H + lane_L, weight_H + lane_L
            _copy(source_HL, target_H + lane_L, resting_HL, scale_H, weight_HL, kv_scale_H, NORM, SCALED)


@triton.jit
def write_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, kv_scales_ptr,
    q_token, k_token, v_token, rotary_token, kv_block, kv_slot, kv_head, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
    Q_TILES: tl.constexpr, K_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Apply RMS norm and rotary embedding to queries and keys, and write keys and values to the KV cache. ``q_ptr`` (in
    place) and the caches are written, all other pointers are only read.

    Grid (tokens, Q_TILES + K_TILES): tiles of query heads (0 if they do not change), then of key heads.
    Occupancy on sm_90: at least 10 blocks per SM. NORM: 0 none, 1 over each head, 2 over all heads of a token (then one
    program handles all tiles). SCALED: keys and values are divided by the scales (2, KV_HEADS). q_token to kv_head:
    strides (rotary_token: of ``cos`` and ``sin``). BLOCK_H: heads of a tile. BLOCK_HALF, BLOCK_D: ROTARY_DIM / 2 and
    HEAD_DIM, padded to powers of two.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    REST: tl.constexpr = ROTARY_DIM < HEAD_DIM
    half_L = tl.arange(0, BLOCK_HALF)[None, :]
    cos_L, sin_L = cos_ptr + token * rotary_token + half_L, sin_ptr + token * rotary_token + half_L
    if tile < Q_TILES:
        q = q_ptr + token * q_token
        _side(
            q, q, HEAD_DIM, q_norm_ptr, kv_scales_ptr, cos_L, sin_L, eps, tile, HEADS,
            HEADS, Q_TILES, HEAD_DIM, ROTARY_DIM, NORM, REST and NORM > 0, False, BLOCK_H, BLOCK_HALF, BLOCK_D,
        )  # fmt: skip
        return
    tile -= Q_TILES
    slot = tl.load(slots_ptr + token)
    real_heads = tl.where(slot >= 0, KV_HEADS, 0)
    in_cache = slot // BLOCK_SIZE * kv_block + slot % BLOCK_SIZE * kv_slot
    for first in range(tile * BLOCK_H, KV_HEADS, K_TILES * BLOCK_H):
        head_H, lane_L = first + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
        v_HL = v_ptr + token * v_token + head_H * HEAD_DIM + lane_L
        v_cache_HL = v_cache_ptr + in_cache + head_H * kv_head + lane_L
        kv_scale_H = head_H.to(tl.float32)
        if SCALED:
            kv_scale_H = tl.load(kv_scales_ptr + KV_HEADS + head_H, mask=head_H < real_heads, other=1)
        _copy(v_HL, v_cache_HL, (head_H < real_heads) & (lane_L < HEAD_DIM), 0, v_HL, kv_scale_H, 0, SCALED)
    _side(
        k_ptr + token * k_token, k_cache_ptr + in_cache, kv_head, k_norm_ptr, kv_scales_ptr, cos_L, sin_L, eps, tile,
        real_heads, KV_HEADS, K_TILES, HEAD_DIM, ROTARY_DIM, NORM, REST, SCALED, BLOCK_H, BLOCK_HALF, BLOCK_D,
    )  # fmt: skip


@cache
def tile_options(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, norm: int = 0) -> dict[str, Any]:
    """Return tile counts, tile sizes and launch options of :func:`write_kernel`; norm: its constant NORM."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = max(1, min(triton.next_power_of_2(num_kv_heads), _TILE_LANES // block_d))
    q_tiles, k_tiles = (-(-heads // block_h) if norm < 2 else 1 for heads in (num_heads, num_kv_heads))
    return {
        "Q_TILES": q_tiles if rotary_dim or norm else 0,
        "K_TILES": k_tiles,
        "BLOCK_H": block_h,
        "BLOCK_HALF": triton.next_power_of_2(max(rotary_dim // 2, 1)),
        "BLOCK_D": block_d,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
