"""Attention of rows with few tokens over long contexts: the keys of a row are split over programs, then reduced.

The host bounds how many programs a row may get; each takes its share from the row's length on the device, and
one without a share ends at once. So a bound far above the truth, as captured graphs have it, costs next to nothing and
changes no bit. Legend: M tile rows (tokens x query heads of one key head), D head dimension, S splits.
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

MIN_SPLIT_KEYS = 512  # below, starting a program costs more than its share; a multiple of every BLOCK_N
_MAX_SPLITS = 128
_LEAST_SPLITS = 4  # however many rows: one long row among short ones must not run alone
_PROGRAMS_PER_SM = 4


@triton.jit
def _oldest_key(seq_len, num_queries, WINDOW: tl.constexpr):
    if WINDOW > 0:
        return tl.maximum(seq_len - num_queries - WINDOW + 1, 0)
    return seq_len * 0


@triton.jit
def _split_keys(num_keys, num_splits, MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of one split. Fewer splits than the limit are enough for ``MIN_KEYS`` each: the bound plays no part."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_N) * BLOCK_N, MIN_KEYS)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, out_ptr, part_ptr, lse_ptr,
    scale, num_rows, num_tokens,
    q_token, kv_block, kv_slot, kv_head, table_row,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    MIN_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows + 1, key heads, splits): the last row zeroes the tokens of no row.

    A row that needs one program writes its output (T, Hq, D), another one its normalised parts (T, Hq, S, D) and the
    logarithms of their sums of weights (T, Hq, S), both in float32.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(1) * GROUP, tl.num_programs(2)
    begin = tl.load(starts_ptr + row)
    if row == num_rows:
        tile: tl.constexpr = BLOCK_M // GROUP
        begin += split * tile
        zero_tokens(
            out_ptr, begin, num_tokens, num_splits * tile, head, num_heads, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
        )
        return
    num_queries = tl.load(starts_ptr + row + 1) - begin
    seq_len = tl.load(seq_lens_ptr + row)
    oldest = _oldest_key(seq_len, num_queries, WINDOW)
    size = _split_keys(seq_len - oldest, num_splits, MIN_KEYS, BLOCK_N)
    first = oldest + split * size
    if (num_queries == 0) | ((split > 0) & (first >= seq_len)):
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    query_M = m // GROUP
    head_M = head * GROUP + m % GROUP
    token_M = begin.to(tl.int64) + query_M
    real_MD = (query_M < num_queries)[:, None] & (d < HEAD_DIM)
    q_MD = tl.load(q_ptr + (token_M * q_token + head_M * HEAD_DIM)[:, None] + d, mask=real_MD, other=0)
    at_head = head.to(tl.int64) * kv_head
    state = attend_keys(
        q_MD,
        empty_state(BLOCK_M, BLOCK_D),
        seq_len - num_queries + query_M,
        first,
        tl.minimum(first + size, seq_len),
        (k_ptr + at_head, v_ptr + at_head, table_ptr + row.to(tl.int64) * table_row),
        (kv_block, kv_slot),
        scale, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    result_MD, lse_M = finish(state, scale)
    slot_M = token_M * num_heads + head_M
    if seq_len - oldest <= size:
        out_MD = out_ptr + slot_M[:, None] * HEAD_DIM + d
        tl.store(out_MD, result_MD.to(out_ptr.dtype.element_ty), mask=real_MD)
    else:
        slot_M = slot_M * num_splits + split
        tl.store(part_ptr + slot_M[:, None] * HEAD_DIM + d, result_MD, mask=real_MD)
        tl.store(lse_ptr + slot_M, lse_M, mask=query_M < num_queries)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    part_ptr, lse_ptr, seq_lens_ptr, starts_ptr, out_ptr, num_splits,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, MIN_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (rows, query heads, queries of a row): outputs of rows with several splits."""
    row, head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + row)
    num_queries = tl.load(starts_ptr + row + 1) - begin
    seq_len = tl.load(seq_lens_ptr + row)
    num_keys = seq_len - _oldest_key(seq_len, num_queries, WINDOW)
    size = _split_keys(num_keys, num_splits, MIN_KEYS, BLOCK_N)
    if (query >= num_queries) | (num_keys <= size):
        return
    slot = (begin + query).to(tl.int64) * tl.num_programs(1) + head
    d = tl.arange(0, BLOCK_D)
    used = tl.cdiv(num_keys, size)
    acc_D = tl.zeros([BLOCK_D], tl.float32)
    peak = -float("inf")
    total = 0.0
    for start in range(0, used, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        lse_S = tl.load(lse_ptr + slot * num_splits + s, mask=s < used, other=float("-inf"))
        part_ptr_SD = part_ptr + (slot * num_splits + s)[:, None] * HEAD_DIM + d[None, :]
        part_SD = tl.load(part_ptr_SD, mask=(s < used)[:, None] & (d < HEAD_DIM)[None, :], other=0)
        highest = tl.maximum(peak, tl.max(lse_S, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight_S = tl.exp2(lse_S - base)
        fade = tl.exp2(peak - base)
        acc_D = acc_D * fade + tl.sum(part_SD * weight_S[:, None], 0)
        total = total * fade + tl.sum(weight_S, 0)
        peak = highest
    acc_D = acc_D / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + slot * HEAD_DIM + d, acc_D.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_limit(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Programs one row and key head may get, so that the batch fills the device.

    Rows count as the next power of two: padding a batch to a captured size seldom changes the sums' order.
    """
    others = int(triton.next_power_of_2(max(1, num_rows))) * num_kv_heads
    return min(max(-(-_PROGRAMS_PER_SM * num_sms // others), _LEAST_SPLITS), _MAX_SPLITS)


def max_tile_rows(dtype: torch.dtype) -> int:
    """Most rows of a tile, tokens of a row times query heads of a key head, that fit the registers."""
    return 32 if dtype == torch.float32 else 64


def tile_options(head_dim: int, tile_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch options of :func:`split_kernel` for ``tile_rows`` tokens times heads of a group."""
    return _tile.tile_options(max(16, tile_rows), 8 if dtype == torch.float32 else 4, head_dim, dtype)


def reduce_options(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch options of :func:`reduce_kernel` for parts of any number of rows."""
    shared = tile_options(head_dim, 1, dtype)
    return {key: shared[key] for key in ("BLOCK_N", "BLOCK_D", "enable_fp_fusion")} | {
        "BLOCK_S": 16,
        "num_warps": 4,
    }


def attend(
    batch: Batch,
    out: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int,
) -> None:
    """Write ``out`` (T, Hq, D), contiguous, for R rows of at most ``max_query_len`` tokens; 0 for tokens of no row."""
    q, num_rows, num_kv_heads = batch.q, batch.seq_lens.shape[0], batch.k_cache.shape[2]
    num_tokens, num_heads, head_dim = q.shape
    constants = batch.constants(sliding_window)
    bound = min(max_seq_len, sliding_window + max_query_len - 1) if sliding_window else max_seq_len
    limit = split_limit(num_rows, num_kv_heads, _num_sms(q.device))
    num_splits = min(limit, max(1, -(-bound // MIN_SPLIT_KEYS)))
    options = tile_options(head_dim, constants["GROUP"] * max_query_len, q.dtype)
    part = torch.empty(num_tokens, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_tokens, num_heads, num_splits, dtype=torch.float32, device=q.device)
    split_kernel[(num_rows + 1, num_kv_heads, num_splits)](
        *batch, out, part, lse, scale * LOG2_E, num_rows, num_tokens, *batch.strides(),
        **constants, MIN_KEYS=MIN_SPLIT_KEYS, **options,
    )  # fmt: skip
    if num_splits > 1:
        reduce_kernel[(num_rows, num_heads, max_query_len)](
            part, lse, batch.seq_lens, batch.query_start_loc, out, num_splits, HEAD_DIM=head_dim,
            WINDOW=sliding_window, MIN_KEYS=MIN_SPLIT_KEYS, **reduce_options(head_dim, q.dtype),
        )  # fmt: skip
