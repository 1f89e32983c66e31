"""Attention of ragged rows over the paged cache: one program an item of the work list and a key head.

A tile whose keys are split over programs is put together by the last of them, which a counter tells; it sets that back
to 0 for the next call, so counters are cleared once in their life. Rows with a few tokens (decodes, drafts, ends of
prompts) and longer ones have tiles of different sizes: where a batch may hold both, that is two launches.
Legend: M tile rows (tokens x query heads of one key head), D head dimension, S splits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.kernels._tile import LOG2_E, attend_range, finish
from bateleur.metadata.kernels._work import count_splits, count_tiles, find_item, oldest_key

SHORT = 16  # tokens of a row that still takes the small tiles
MIN_SPLIT_KEYS = 256  # below, starting a program costs more than its share; a multiple of every BLOCK_N
NUM_COUNTERS = 4096  # tiles times key heads that may be split at once
_PROGRAMS_PER_SM = 2  # of those that share keys: as many as fit its shared memory


@triton.jit
def _combine(
    part_ptr, lse_ptr, out_ptr, first_part, splits, token, head, num_kv_heads, begin_m, num_m,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile's rows from all of its parts, in their order. They come from other processors: past L1."""
    d = tl.arange(0, BLOCK_D)
    for m in range(0, num_m):
        acc_D = tl.zeros([BLOCK_D], tl.float32)
        peak = -float("inf")
        total = 0.0
        for start in range(0, splits, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            slot_S = ((first_part + s) * num_kv_heads + head) * BLOCK_M + m
            lse_S = tl.load(lse_ptr + slot_S, mask=s < splits, other=float("-inf"), cache_modifier=".cg")
            part_SD = tl.load(
                part_ptr + slot_S[:, None] * HEAD_DIM + d[None, :],
                mask=(s < splits)[:, None] & (d < HEAD_DIM)[None, :], other=0, cache_modifier=".cg",
            )  # fmt: skip
            highest = tl.maximum(peak, tl.max(lse_S, 0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weight_S = tl.exp2(lse_S - base)
            fade = tl.exp2(peak - base)
            acc_D = acc_D * fade + tl.sum(part_SD * weight_S[:, None], 0)
            total = total * fade + tl.sum(weight_S, 0)
            peak = highest
        acc_D = acc_D / tl.where(total > 0, total, 1.0)
        query = (begin_m + m) // GROUP
        slot = (token + query) * num_kv_heads * GROUP + head * GROUP + (begin_m + m) % GROUP
        tl.store(out_ptr + slot * HEAD_DIM + d, acc_D.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _zero_tokens(
    out_ptr, first, last, step, head, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero this key head's share of every ``step``-th piece of M tile rows, from that row on to token ``last - 1``."""
    d = tl.arange(0, BLOCK_D)[None, :]
    for begin in range(first, last * GROUP, step):
        m = begin + tl.arange(0, BLOCK_M)
        slot_M = (m // GROUP).to(tl.int64) * num_heads + head * GROUP + m % GROUP
        real_MD = (m < last * GROUP)[:, None] & (d < HEAD_DIM)
        zero_MD = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(out_ptr + slot_M[:, None] * HEAD_DIM + d, zero_MD, mask=real_MD)


@triton.jit
def _share(
    result_MD, lse_M, num_m, part_ptr, lse_ptr, counter_ptr, local, tile_from_end, splits,
    out, head, num_kv_heads, begin_m,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the part of one split; whoever is the last of its tile writes the output. ``out``: pointer, first token."""
    BLOCK_M: tl.constexpr = result_MD.shape[0]
    BLOCK_D: tl.constexpr = result_MD.shape[1]
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    slot_M = (local * num_kv_heads + head) * BLOCK_M + m
    tl.store(part_ptr + slot_M[:, None] * HEAD_DIM + d, result_MD, mask=(m < num_m)[:, None] & (d < HEAD_DIM))
    tl.store(lse_ptr + slot_M, lse_M)
    tl.debug_barrier()  # all of the part is written before it counts
    counter = counter_ptr + tile_from_end * num_kv_heads + head
    if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
        tl.store(counter, 0)
        out_ptr, token = out
        _combine(
            part_ptr, lse_ptr, out_ptr, local // splits * splits, splits, token, head, num_kv_heads, begin_m, num_m,
            GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_S,
        )  # fmt: skip


@triton.jit
def _attend_row(
    q_ptr, k_ptr, v_ptr, table_ptr, row, seq_len, token, num_queries, head, tile, split, size, scale, strides,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output (M, D) of one query tile and KV split of a row, and logarithms of the sums of weights (M,)."""
    q_token, kv_block, kv_slot, kv_head, table_row = strides
    begin_m = tile * BLOCK_M
    m, d = begin_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    q_M = q_ptr + (token + m // GROUP) * q_token + (head * GROUP + m % GROUP) * HEAD_DIM
    q_MD = tl.load(q_M[:, None] + d, mask=(m < num_queries * GROUP)[:, None] & (d < HEAD_DIM), other=0)
    at_head = head.to(tl.int64) * kv_head
    cache = (k_ptr + at_head, v_ptr + at_head, table_ptr + row.to(tl.int64) * table_row)
    origin = seq_len - num_queries  # position of the row's first query
    oldest = oldest_key(seq_len, num_queries, WINDOW)
    first = oldest // BLOCK_N * BLOCK_N + split * size
    newest = origin + tl.minimum(num_queries, tl.cdiv(begin_m + BLOCK_M, GROUP)) - 1
    state = attend_range(
        q_MD, origin, begin_m, tl.maximum(first, oldest), tl.minimum(first + size, newest + 1), cache,
        (kv_block, kv_slot), scale, GROUP, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, PRECISION,
    )  # fmt: skip
    return finish(state, scale)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, out_ptr, part_ptr, lse_ptr, counter_ptr,
    scale, num_rows, num_tokens,
    q_token, kv_block, kv_slot, kv_head, table_row,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (items and one more at least, key heads), for rows of ``LEAST`` to ``MOST`` tokens.

    An item whose tile is not split writes its output (T, Hq, D); another one its normalised part (M, D) and the
    logarithms of its sums of weights (M,), both in float32. With ``LEAST`` 1, what is no item zeroes tokens of no row.
    """
    item, head, num_kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_from_end, size, before, parts, shared = find_item(
        item, seq_lens_ptr, starts_ptr, num_rows,
        SPLITS, MIN_KEYS, LEAST, MOST, GROUP, WINDOW, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    num_heads, local = num_kv_heads * GROUP, item - before
    if row_from_end == num_rows:
        if LEAST == 1:
            first = tl.load(starts_ptr + num_rows) * GROUP + local * BLOCK_M
            step = (tl.num_programs(0) - before) * BLOCK_M
            _zero_tokens(out_ptr, first, num_tokens, step, head, num_heads, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
        return
    row = num_rows - 1 - row_from_end
    token = tl.load(starts_ptr + row).to(tl.int64)
    num_queries = (tl.load(starts_ptr + row + 1) - token).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + row)
    splits = count_splits(seq_len - oldest_key(seq_len, num_queries, WINDOW) // BLOCK_N * BLOCK_N, size)
    tile_from_end = local // splits
    tile = count_tiles(num_queries, LEAST, MOST, GROUP, BLOCK_M) - 1 - tile_from_end
    result_MD, lse_M = _attend_row(
        q_ptr, k_ptr, v_ptr, table_ptr, row, seq_len, token, num_queries, head,
        tile, local % splits, size, scale, (q_token, kv_block, kv_slot, kv_head, table_row),
        GROUP, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    begin_m = tile * BLOCK_M
    num_m = tl.minimum(num_queries * GROUP - begin_m, BLOCK_M)
    if splits == 1:
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
        slot_M = (token + (begin_m + m) // GROUP) * num_heads + head * GROUP + (begin_m + m) % GROUP
        out_MD = out_ptr + slot_M[:, None] * HEAD_DIM + d
        tl.store(out_MD, result_MD.to(out_ptr.dtype.element_ty), mask=(m < num_m)[:, None] & (d < HEAD_DIM))
        return
    parts_of_row = parts.to(tl.int64) * num_kv_heads * BLOCK_M
    _share(
        result_MD, lse_M, num_m, part_ptr + parts_of_row * HEAD_DIM, lse_ptr + parts_of_row,
        counter_ptr + shared * num_kv_heads, local, tile_from_end, splits,
        (out_ptr, token), head, num_kv_heads, begin_m,
        GROUP, HEAD_DIM, BLOCK_S,
    )  # fmt: skip


class Batch(NamedTuple):
    """The tensors of an attention call, as :data:`bateleur.metadata.ops.paged_attention` has them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    def strides(self) -> tuple[int, ...]:
        """Of a token's queries; of a block, a slot and a head of the caches; of a row of the block table."""
        return (self.q.stride(0), *self.k_cache.stride()[:3], self.block_table.stride(0))


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and shared memory of a block of threads: 227 KiB on sm_90, 163 on sm_80, 99 on sm_86 and 120."""
    if device.type != "cuda":  # Triton's interpreter
        return 1, 227 << 10
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin


def split_limit(num_kv_heads: int, num_sms: int) -> int:
    """Splits of one key head that fill the device: of all rows together, so that the batch plays no part."""
    return min(max(_PROGRAMS_PER_SM * num_sms // num_kv_heads, 1), NUM_COUNTERS // num_kv_heads)


def tile_options(tile_rows: int, head_dim: int, dtype: torch.dtype, shared_bytes: int) -> dict[str, Any]:
    """Tile sizes and launch options for tiles of about ``tile_rows``: 128 at most, which are two warp groups.

    float32 has no tensor cores of its precision, so its steps are small. The queries of 128 rows of 256 lanes take
    64 KiB, which is too much for a device with ``shared_bytes`` below 112 KiB.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    full = dtype == torch.float32
    most = 32 if full else 64 if head_dim > 128 and shared_bytes < 112 << 10 else 128
    block_m = min(max(16, triton.next_power_of_2(tile_rows)), most)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 16 if full else max(32, min(8192 // block_d, 128)),  # 16 KiB of keys a step
        "BLOCK_D": block_d,
        "BLOCK_S": max(4096 // block_d, 8),
        "MIN_KEYS": max(MIN_SPLIT_KEYS, 4 * block_m),  # parts are a fraction of the keys behind them
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 8 if full or block_m * block_d > 8192 or block_m > 64 else 4,
        "num_stages": 2 if full else 3,
        "enable_fp_fusion": True,
    }


def launches_of(max_query_len: int, group: int) -> list[tuple[int, int, int]]:
    """(fewest tokens of a row, most of them or 0, tile rows) of each launch that a batch takes."""
    if max_query_len <= SHORT:
        return [(1, 0, max_query_len * group)]
    return [(1, SHORT, min(SHORT * group, 64)), (SHORT + 1, 0, 128)]


def attend(
    batch: Batch,
    out: Tensor,
    counters: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
) -> None:
    """Write ``out`` (T, Hq, D), contiguous, for R rows of at most ``max_query_len`` tokens; 0 for tokens of no row."""
    num_tokens, num_heads, head_dim = batch.q.shape
    num_rows, (_, block_size, num_kv_heads, _) = batch.seq_lens.shape[0], batch.k_cache.shape
    group, (num_sms, shared_bytes) = num_heads // num_kv_heads, _device(batch.q.device)
    splits = split_limit(num_kv_heads, num_sms)
    for least, most, tile_rows in launches_of(max(max_query_len, 1), group):
        options = tile_options(tile_rows, head_dim, batch.q.dtype, shared_bytes)
        block_m = options["BLOCK_M"]
        rows = min(num_rows, num_tokens // least)
        tiles = num_tokens * group // block_m + rows
        if most:
            tiles = min(tiles, rows * -(-most * group // block_m))
        # Rows with several splits have fewer than 2 * splits of them; see kernels/_work.py.
        parts = 2 * splits * num_kv_heads * block_m if max_seq_len > options["MIN_KEYS"] else 0
        part = torch.empty(parts, head_dim, dtype=torch.float32, device=batch.q.device)
        lse = torch.empty(parts, dtype=torch.float32, device=batch.q.device)
        attention_kernel[(tiles + splits + 1, num_kv_heads)](
            *batch, out, part, lse, counters, scale * LOG2_E, num_rows, num_tokens, *batch.strides(),
            GROUP=group, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, WINDOW=window,
            SPLITS=splits, LEAST=least, MOST=most, **options,
        )  # fmt: skip
