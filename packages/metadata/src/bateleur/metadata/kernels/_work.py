"""The work of an attention call as one list of (row, query tile, KV split), the same for every key head.

Nothing is built for it: each program finds its item by sums over the rows, whose lengths it reads on the device. So a
grid follows from the numbers of rows and tokens alone, a graph may bake it, and what a grid has too many ends at once.

All rows have splits of one size, such that about ``SPLITS`` of them hold all keys: a long row among short ones gets as
many programs as its keys are worth. Sizes are powers of two from ``MIN_KEYS`` on, so that a step more or less seldom
changes the order of sums. The list begins with the last row's last tile: in prompts that has the most keys.
Legend: J rows, the last one first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

_ROWS = tl.constexpr(256)  # looked at at once


@triton.jit
def oldest_key(seq_len, num_queries, WINDOW: tl.constexpr):
    """The first key that some query of a row sees; works on numbers and on vectors of them."""
    if WINDOW > 0:
        return tl.maximum(seq_len - num_queries - WINDOW + 1, 0)
    return seq_len * 0


@triton.jit
def count_tiles(
    num_queries, LEAST: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Query tiles of rows that have ``LEAST`` to ``MOST`` queries; 0 of others. ``MOST`` 0: of any number."""
    taken = num_queries >= LEAST
    if MOST > 0:
        taken = taken & (num_queries <= MOST)
    return tl.where(taken, tl.cdiv(num_queries * GROUP, BLOCK_M), 0)


@triton.jit
def count_splits(num_keys, size):
    """Splits of a row: at least one, so that somebody writes its output."""
    return tl.maximum(tl.cdiv(num_keys, size), 1)


@triton.jit
def _rows(
    seq_lens_ptr, starts_ptr, begin, num_rows,
    LEAST: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles and keys, from a multiple of N on, of the rows ``begin`` to ``begin + J - 1`` from the end."""
    row_J = num_rows - 1 - begin - tl.arange(0, _ROWS)
    there_J = row_J >= 0
    end_J = tl.load(starts_ptr + row_J + 1, mask=there_J, other=0)
    num_queries_J = end_J - tl.load(starts_ptr + row_J, mask=there_J, other=0)
    seq_len_J = tl.load(seq_lens_ptr + row_J, mask=there_J, other=0)
    first_J = oldest_key(seq_len_J, num_queries_J, WINDOW) // BLOCK_N * BLOCK_N
    return count_tiles(num_queries_J, LEAST, MOST, GROUP, BLOCK_M), seq_len_J - first_J


@triton.jit
def find_item(
    wanted, seq_lens_ptr, starts_ptr, num_rows,
    SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where the item ``wanted`` is: its row from the end, and keys of a split; then of what lies before that row the
    items, and the items and tiles of rows with several splits. For no item the row is ``num_rows``.
    """
    work = tl.zeros([], tl.int64)
    for begin in range(0, num_rows, _ROWS):
        tiles_J, keys_J = _rows(
            seq_lens_ptr, starts_ptr, begin, num_rows, LEAST, MOST, GROUP, WINDOW, BLOCK_M, BLOCK_N
        )
        work += tl.sum(tiles_J.to(tl.int64) * keys_J, 0)
    size = tl.full([], MIN_KEYS, tl.int64)
    while size * SPLITS < work:
        size *= 2
    size = size.to(tl.int32)
    row, items, parts, shared, seen = 0, 0, 0, 0, 0
    for begin in range(0, num_rows, _ROWS):
        tiles_J, keys_J = _rows(
            seq_lens_ptr, starts_ptr, begin, num_rows, LEAST, MOST, GROUP, WINDOW, BLOCK_M, BLOCK_N
        )
        splits_J = count_splits(keys_J, size)
        items_J = tiles_J * splits_J
        over_J = (seen + tl.cumsum(items_J, 0) <= wanted) & (begin + tl.arange(0, _ROWS) < num_rows)
        shared_J = over_J & (splits_J > 1)
        row += tl.sum(over_J.to(tl.int32), 0)
        items += tl.sum(tl.where(over_J, items_J, 0), 0)
        parts += tl.sum(tl.where(shared_J, items_J, 0), 0)
        shared += tl.sum(tl.where(shared_J, tiles_J, 0), 0)
        seen += tl.sum(items_J, 0)
    return row, size, items, parts, shared
