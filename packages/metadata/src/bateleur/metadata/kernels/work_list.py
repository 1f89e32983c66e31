"""Kernel that computes the work list of paged attention: one entry for each (row, query tile, KV split); a row is a
request.

One list serves all key heads and all layers with equal heads and windows. The device computes it once in each forward
pass. Its size depends on host numbers only, so that a CUDA graph can record the launch that computes the list and the
launches that read it. Each program of the kernel reads one entry. Programs of padding entries end at once.

All splits of a launch have the same number of keys, so that about ``splits`` of them hold all keys of the launch. A
long row among short rows gets programs in proportion to its keys. Split sizes are ``min_keys`` times a power of two, so
that one more token rarely changes the order of sums. The last row and its last tile come first, because the last tile
of a prompt has the most keys.

Item: (row, token, queries, seq_len, tile, first, end, part).
    row: index in the batch. token: its first token. queries, seq_len: its tokens and keys. tile: its query tile.
    first, end: keys ``first`` to ``end - 1`` are read. part: index of the partial output, -1 if the tile has one split.
Padding of items: (-1, token, count, 0, index, 0, 0, -1).
    Item ``index`` of ``count``. Together these items zero the outputs from ``token`` on, which belong to no row. If
    another launch zeroes them, ``token`` is the number of tokens.
Join: (token, begin, lines, splits, first line, stride, 0, 0), for each tile with several splits.
    token: first token of its row. begin, lines: the tile's first line in the row, and its number of lines. Partial
    output of line ``m``, split ``s`` and key head ``h`` is number
    ``first line + (s * key heads + h) * stride + m``.
Padding of joins: zeros.

Shapes: J rows (requests), the last one first; I items.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.backends._launch_config import ENTRY_SIZE, work_shape

_BLOCK = 256  # rows, and items, of a loop iteration


@triton.jit
def _rows(row_J, there_J, lengths, kind):
    """Return first token, tokens, keys, first visible key and tiles of each row, for one launch of attention.

    A batch may take two launches: one for short rows, one for long rows. Rows of the other launch get 0 tiles.
    row_J, there_J: row indices, and whether they exist. lengths: pointers to ``seq_lens`` and ``query_start_loc``.
    kind: (least, most, group, window, M, N) of the launch: fewest and most tokens of its rows (most 0: no limit), query
    heads of a key head, sliding window in keys (0: none), lines of a tile, and keys of a loop iteration.
    """
    seq_lens_ptr, starts_ptr = lengths
    least, most, group, window, block_m, _ = kind
    token_J = tl.load(starts_ptr + row_J, mask=there_J, other=0)
    num_queries_J = tl.load(starts_ptr + row_J + 1, mask=there_J, other=0) - token_J
    seq_len_J = tl.load(seq_lens_ptr + row_J, mask=there_J, other=0)
    oldest_J = tl.where(window > 0, tl.maximum(seq_len_J - num_queries_J - window + 1, 0), 0)
    taken_J = (num_queries_J >= least) & ((num_queries_J <= most) | (most == 0))
    tiles_J = tl.where(taken_J, tl.cdiv(num_queries_J * group, block_m), 0)
    return token_J, num_queries_J, seq_len_J, oldest_J, tiles_J


@triton.jit
def _count_splits(num_keys, size):
    """Return the number of splits of ``size`` keys each; 1 without keys, because a program must write its output."""
    return tl.maximum(tl.cdiv(num_keys, size), 1)


@triton.jit
def _store(entry_ptr, mask, a, b, c, d, e, f, g, h):
    """Store an entry of eight numbers, a to h, at each pointer of ``entry_ptr`` where ``mask`` is True."""
    tl.store(entry_ptr, a, mask=mask)
    tl.store(entry_ptr + 1, b, mask=mask)
    tl.store(entry_ptr + 2, c, mask=mask)
    tl.store(entry_ptr + 3, d, mask=mask)
    tl.store(entry_ptr + 4, e, mask=mask)
    tl.store(entry_ptr + 5, f, mask=mask)
    tl.store(entry_ptr + 6, g, mask=mask)
    tl.store(entry_ptr + 7, h, mask=mask)


@triton.jit
def _count_items(ends_ptr, num_rows, lengths, kind, splits, min_keys, BLOCK: tl.constexpr):
    """Return the keys per split of a launch, and its number of items (query tiles with one split of the keys each).

    Writes cumulative item counts to ``ends_ptr``. lengths, kind: see `_rows`. splits: about how many splits to make.
    """
    block_n, work = kind[5], tl.zeros([], tl.int64)
    for begin in range(0, num_rows, BLOCK):
        row_J = num_rows - 1 - begin - tl.arange(0, BLOCK)
        _, _, seq_len_J, oldest_J, tiles_J = _rows(row_J, row_J >= 0, lengths, kind)
        work += tl.sum(tiles_J.to(tl.int64) * (seq_len_J - oldest_J // block_n * block_n), 0)
    size = tl.zeros([], tl.int64) + min_keys
    while size * splits < work:
        size *= 2
    size, total = size.to(tl.int32), 0
    for begin in range(0, num_rows, BLOCK):
        row_J = num_rows - 1 - begin - tl.arange(0, BLOCK)
        _, _, seq_len_J, oldest_J, tiles_J = _rows(row_J, row_J >= 0, lengths, kind)
        items_J = tiles_J * _count_splits(seq_len_J - oldest_J // block_n * block_n, size)
        tl.store(ends_ptr + begin + tl.arange(0, BLOCK), total + tl.cumsum(items_J, 0), mask=row_J >= 0)
        total += tl.sum(items_J, 0)
    tl.debug_barrier()  # threads read what other threads stored
    return size, total


@triton.jit
def _row_of(ends_ptr, index_I, real_I, num_rows, search):
    """Return the row of each item, 0 for the last row of the batch, and the number of items of rows after this row.

    A binary search in ``ends_ptr`` (cumulative item counts) takes ``search`` steps. index_I, real_I: items and mask.
    """
    low_I, high_I = tl.zeros_like(index_I), tl.zeros_like(index_I) + num_rows
    for _ in range(search):
        open_I = real_I & (low_I < high_I)
        middle_I = (low_I + high_I) // 2
        over_I = tl.load(ends_ptr + middle_I, mask=open_I, other=0) <= index_I
        low_I = tl.where(open_I & over_I, middle_I + 1, low_I)
        high_I = tl.where(open_I & (over_I == 0), middle_I, high_I)
    return low_I, tl.load(ends_ptr + low_I - 1, mask=real_I & (low_I > 0), other=0)


@triton.jit
def _write_items(
    items_ptr, joins_ptr, ends_ptr, num_rows, num_items, search, lengths, kind, size, total, last, first_line,
    num_kv_heads, splits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a launch's items, padded to ``num_items``, and joins (tiles with several splits). Returns number of joins.

    lengths, kind: see `_rows`. ends_ptr, size, total: results of `_count_items`. search: steps of a binary search for a
    row. last: token from which padding items zero the output. first_line: index of the launch's first partial output.
    """
    _, _, group, _, block_m, block_n = kind
    parts, joins = 0, 0
    for begin in range(0, num_items, BLOCK):
        index_I = begin + tl.arange(0, BLOCK)
        real_I = index_I < total
        from_end_I, before_I = _row_of(ends_ptr, index_I, real_I, num_rows, search)
        row_I = num_rows - 1 - from_end_I
        token_I, num_queries_I, seq_len_I, oldest_I, tiles_I = _rows(row_I, real_I, lengths, kind)
        base_I = oldest_I // block_n * block_n
        splits_I = _count_splits(seq_len_I - base_I, size)
        tile_I, split_I = tiles_I - 1 - (index_I - before_I) // splits_I, (index_I - before_I) % splits_I
        first_I, begin_m = base_I + split_I * size, tile_I * block_m
        newest_I = seq_len_I - num_queries_I + tl.minimum(num_queries_I, tl.cdiv(begin_m + block_m, group))
        several_I = real_I & (splits_I > 1)
        part_I = parts + tl.cumsum(several_I.to(tl.int32), 0) - 1
        _store(
            items_ptr + index_I * 8, index_I < num_items,
            tl.where(real_I, row_I, -1), tl.where(real_I, token_I, last),
            tl.where(real_I, num_queries_I, num_items - total), seq_len_I,
            tl.where(real_I, tile_I, index_I - total), tl.where(real_I, tl.maximum(first_I, oldest_I), 0),
            tl.where(real_I, tl.minimum(first_I + size, newest_I), 0), tl.where(several_I, part_I, -1),
        )  # fmt: skip
        opens_I = several_I & (split_I == 0)
        join_I = joins + tl.cumsum(opens_I.to(tl.int32), 0) - 1
        _store(
            joins_ptr + join_I * 8, opens_I & (join_I < splits),
            token_I, begin_m, tl.minimum(num_queries_I * group - begin_m, block_m), splits_I,
            first_line + part_I * num_kv_heads * block_m, tl.zeros_like(index_I) + block_m, 0, 0,
        )  # fmt: skip
        parts += tl.sum(several_I.to(tl.int32), 0)
        joins += tl.sum(opens_I.to(tl.int32), 0)
    return joins


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "search", "group", "num_kv_heads", "window", "block_n", "splits", "joins_at",
        "least_0", "most_0", "block_m_0", "min_keys_0", "items_0", "least_1", "most_1", "block_m_1", "min_keys_1",
        "items_1",
    ]
)  # fmt: skip
def work_kernel(
    work_ptr, ends_ptr, seq_lens_ptr, starts_ptr,
    num_rows, num_tokens, search, group, num_kv_heads, window, block_n, splits, joins_at,
    least_0, most_0, block_m_0, min_keys_0, items_0,
    least_1, most_1, block_m_1, min_keys_1, items_1,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the work list of attention launches: items (query tiles with one KV split each), joins (tiles with
    several splits), and padding. Grid (launches of attention).

    Occupancy on sm_90: at least 9 blocks per SM. Reads ``seq_lens_ptr`` and ``starts_ptr`` (query_start_loc), writes
    ``work_ptr`` (entries, 8). ``ends_ptr``: scratch memory (launches, num_rows). search: steps of a binary search for a
    row. group: query heads of a key head. window: in keys, 0 for none. block_n: keys of a loop iteration. splits: about
    how many splits a launch has. joins_at: index of the first join. Of the first launch (``_0``) and the second
    (``_1``): fewest and most tokens of a row, lines of a tile, fewest keys of a split, number of items.
    """
    which = tl.program_id(0)
    least, most = tl.where(which == 0, least_0, least_1), tl.where(which == 0, most_0, most_1)
    block_m, min_keys = (tl.where(which == 0, block_m_0, block_m_1), tl.where(which == 0, min_keys_0, min_keys_1))
    num_items = tl.where(which == 0, items_0, items_1)
    lengths, kind = (seq_lens_ptr, starts_ptr), (least, most, group, window, block_m, block_n)
    ends_ptr += which * num_rows
    size, total = _count_items(ends_ptr, num_rows, lengths, kind, splits, min_keys, BLOCK)
    last = tl.where(least == 1, tl.load(starts_ptr + num_rows), num_tokens)
    first_line = which * 2 * splits * num_kv_heads * block_m_0
    joins_ptr = work_ptr + (joins_at + which * splits) * 8
    joins = _write_items(
        work_ptr + which * items_0 * 8, joins_ptr, ends_ptr, num_rows, num_items, search, lengths, kind, size, total,
        last, first_line, num_kv_heads, splits, BLOCK,
    )  # fmt: skip
    for begin in range(0, splits, BLOCK):
        index_I = begin + tl.arange(0, BLOCK)
        _store(joins_ptr + index_I * 8, (index_I >= joins) & (index_I < splits), 0, 0, 0, 0, 0, 0, 0, 0)


def attention_work(
    k_cache: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_heads: int, num_tokens: int, max_query_len: int,
    sliding_window: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute the work list (query tiles and KV splits) of paged attention, (n, 8) int32, as ``ops.attention_work``."""
    num_rows = seq_lens.shape[0]
    shape = work_shape(num_heads, k_cache, num_rows, num_tokens, max_query_len, sliding_window, dtype)
    work = torch.empty(shape.num_entries, ENTRY_SIZE, dtype=torch.int32, device=seq_lens.device)
    ends = torch.empty(len(shape.launches), num_rows, dtype=torch.int32, device=seq_lens.device)
    work_kernel[(len(shape.launches),)](
        work, ends, seq_lens, query_start_loc, num_rows, num_tokens, *shape.work_sizes,
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return work
