"""Attention of ragged rows over the paged cache: one program a tile of a row's tokens and key head.

The grid follows from host scalars alone: with Q tokens a tile, ``T // Q + R + 1`` tiles hold T tokens of any R rows and
the tail of no row. A program finds its row on the device, by counting the rows that begin before its tile.
Legend: M tile rows (tokens x query heads of one key head), D head dimension, R rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.kernels import _tile
from bateleur.metadata.kernels._tile import LOG2_E, Batch, attend_keys, empty_state, finish, zero_tokens


@triton.jit
def _find_row(starts_ptr, tile, first_row, num_rows, TILE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Row of a tile, and the row's first tile: each row begins a tile of its own; row ``num_rows`` is the tail."""
    origin = tl.load(starts_ptr + first_row)
    row = first_row - 1
    first_tile = 0
    for begin in range(first_row, num_rows + 1, BLOCK_R):
        row_R = begin + tl.arange(0, BLOCK_R)
        start_R = tl.load(starts_ptr + row_R, mask=row_R <= num_rows, other=0)
        tile_R = (start_R - origin) // TILE + row_R - first_row
        begun_R = (row_R <= num_rows) & (tile_R <= tile)
        row += tl.sum(begun_R.to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(begun_R, tile_R, 0), 0))
    return row, first_tile


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, out_ptr,
    scale, first_row, num_rows, num_tokens,
    q_token, kv_block, kv_slot, kv_head, table_row,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, key heads), the last tiles first: they have the most keys."""
    TILE: tl.constexpr = BLOCK_M // GROUP
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    row, first_tile = _find_row(starts_ptr, tile, first_row, num_rows, TILE, 256)
    offset = (tile - first_tile) * TILE
    begin = tl.load(starts_ptr + row)
    if row == num_rows:
        zero_tokens(
            out_ptr, begin + offset, tl.minimum(begin + offset + TILE, num_tokens), TILE,
            head, num_heads, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        return
    num_queries = tl.load(starts_ptr + row + 1) - begin
    if offset >= num_queries:
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    query_M = offset + m // GROUP
    head_M = head * GROUP + m % GROUP
    token_M = begin.to(tl.int64) + query_M
    real_MD = ((query_M < num_queries) & (m < TILE * GROUP))[:, None] & (d < HEAD_DIM)
    q_MD = tl.load(q_ptr + (token_M * q_token + head_M * HEAD_DIM)[:, None] + d, mask=real_MD, other=0)
    at_head = head.to(tl.int64) * kv_head
    cache = (k_ptr + at_head, v_ptr + at_head, table_ptr + row.to(tl.int64) * table_row)
    lowest = tl.load(seq_lens_ptr + row) - num_queries + offset  # position of the tile's first query
    last = lowest + tl.minimum(num_queries - offset, TILE)
    position_M = lowest + m // GROUP
    state = empty_state(BLOCK_M, BLOCK_D)
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0)
    else:  # keys that all queries see need no masks
        first = tl.maximum(lowest + 1, 0) // BLOCK_N * BLOCK_N
        state = attend_keys(
            q_MD, state, position_M, 0, first, cache, (kv_block, kv_slot),
            scale, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    state = attend_keys(
        q_MD, state, position_M, first, last, cache, (kv_block, kv_slot),
        scale, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    result_MD, _ = finish(state, scale)
    target_MD = (token_M * num_heads + head_M)[:, None] * HEAD_DIM + d
    tl.store(out_ptr + target_MD, result_MD.to(out_ptr.dtype.element_ty), mask=real_MD)


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of threads may have: 227 KiB on sm_90, 163 on sm_80, 99 on sm_86, 89 and 120."""
    if device.type != "cuda":  # Triton's interpreter
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def tile_options(head_dim: int, group: int, dtype: torch.dtype, shared_bytes: int) -> dict[str, Any]:
    """Tile sizes and launch options of :func:`prefill_kernel`: two warp groups with 64 rows each.

    float32 takes small tiles. The queries of 128 rows of 256 lanes take 64 KiB, which is too much for a device with
    ``shared_bytes`` below 112 KiB.
    """
    rows = 64 if head_dim > 128 and shared_bytes < 112 << 10 else 128
    return _tile.tile_options(max(32 if dtype == torch.float32 else rows, group), 8, head_dim, dtype)


def attend(batch: Batch, out: Tensor, first_row: int, scale: float, sliding_window: int) -> None:
    """Write ``out`` (T, Hq, D), contiguous, for the rows from ``first_row`` on; 0 for the tokens of no row."""
    q, num_rows, num_kv_heads = batch.q, batch.seq_lens.shape[0], batch.k_cache.shape[2]
    constants = batch.constants(sliding_window)
    options = tile_options(q.shape[2], constants["GROUP"], q.dtype, _shared_bytes(q.device))
    tiles = q.shape[0] // (options["BLOCK_M"] // constants["GROUP"]) + num_rows - first_row + 1
    prefill_kernel[(tiles, num_kv_heads)](
        *batch, out, scale * LOG2_E, first_row, num_rows, q.shape[0], *batch.strides(), **constants, **options
    )
