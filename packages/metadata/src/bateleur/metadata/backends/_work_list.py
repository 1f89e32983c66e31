"""Work list of paged attention: one entry for each (row, query tile, KV split); a row is a request. This is the torch
implementation.

One list serves all key heads and all layers with equal heads and windows. The device computes the list once in each
forward pass. Its size depends on the numbers of rows and tokens and on `max_query_len`. A CUDA graph can therefore
record the launch that computes the list and the launches that read it. Each program of the kernel reads one entry.
Programs of padding entries end at once.

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

Shapes: R rows, the last one first; I items.
"""

from typing import Any

import torch
from torch import Tensor

from bateleur.metadata.backends._launch_config import ENTRY_SIZE, Launch, WorkShape, work_shape


def attention_work(
    k_cache: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_heads: int, num_tokens: int, max_query_len: int,
    sliding_window: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Make the work list (num_entries, 8) int32 of attention for layers with ``num_heads`` and caches like this one."""
    num_rows = seq_lens.shape[0]
    shape = work_shape(num_heads, k_cache, num_rows, num_tokens, max_query_len, sliding_window, dtype)
    lists = [_list_of(shape, launch, seq_lens, query_start_loc, num_tokens) for launch in shape.launches]
    items, joins = zip(*lists, strict=True)
    return torch.cat((*items, *joins))


def empty_work_list(k_cache: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_heads: int, *bounds: Any) -> Tensor:
    """Return an empty list of the same size, for fake tensors; arguments as for :func:`attention_work`."""
    shape = work_shape(num_heads, k_cache, seq_lens.shape[0], *bounds)
    return seq_lens.new_empty(shape.num_entries, ENTRY_SIZE, dtype=torch.int32)


def _list_of(
    shape: WorkShape, launch: Launch, seq_lens: Tensor, starts: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the items (query tile and KV split) and joins (sums over splits) of one launch: entries of the list."""
    num_rows, block_m = seq_lens.shape[0], launch.block_m
    index_I = torch.arange(launch.num_items, device=seq_lens.device)
    last = starts[-1:].long() if launch.least == 1 else index_I.new_full((1,), num_tokens)
    if not num_rows:
        starts, seq_lens = starts.new_zeros(2), seq_lens.new_zeros(1)
    begin_R, queries_R = starts[:-1].long().flip(0), starts.diff().long().flip(0)
    keys_R = seq_lens.long().flip(0)
    oldest_R = (keys_R - queries_R - shape.window + 1).clamp(min=0) * (shape.window > 0)
    base_R = oldest_R // shape.block_n * shape.block_n
    taken_R = (queries_R >= launch.least) & (queries_R <= (launch.most or num_tokens))
    tiles_R = (queries_R * shape.group + block_m - 1) // block_m * taken_R
    size = _split_size((tiles_R * (keys_R - base_R)).sum(), launch.min_keys, shape.splits)
    splits_R = ((keys_R - base_R + size - 1) // size).clamp(min=1)
    ends_R = (tiles_R * splits_R).cumsum(0)

    row_I = torch.searchsorted(ends_R, index_I, right=True).clamp(max=len(ends_R) - 1)
    real_I, local_I = index_I < ends_R[-1], index_I - (ends_R - tiles_R * splits_R)[row_I]
    begin_I, queries_I, keys_I, splits_I = (each[row_I] for each in (begin_R, queries_R, keys_R, splits_R))
    tile_I, split_I = tiles_R[row_I] - 1 - local_I // splits_I, local_I % splits_I
    first_I = base_R[row_I] + split_I * size
    newest_I = torch.minimum(queries_I, ((tile_I + 1) * block_m + shape.group - 1) // shape.group)
    several_I = real_I & (splits_I > 1)
    part_I, zero_I = several_I.cumsum(0) - 1, torch.zeros_like(index_I)
    items = (
        (num_rows - 1 - row_I, zero_I - 1),
        (begin_I, last),
        (queries_I, launch.num_items - ends_R[-1:]),
        (keys_I, zero_I),
        (tile_I, index_I - ends_R[-1:]),
        (torch.maximum(first_I, oldest_R[row_I]), zero_I),
        (torch.minimum(first_I + size, keys_I - queries_I + newest_I), zero_I),
        (torch.where(several_I, part_I, -1), zero_I - 1),
    )
    opens_I, begin_m = several_I & (split_I == 0), tile_I * block_m
    place_I = torch.where(opens_I, opens_I.cumsum(0) - 1, shape.splits).clamp(max=shape.splits)  # the last is dropped
    lines_I = (queries_I * shape.group - begin_m).clamp(max=block_m)
    first_line_I = launch.first_line + part_I * shape.num_kv_heads * block_m
    join = (begin_I, begin_m, lines_I, splits_I, first_line_I, zero_I + block_m, zero_I, zero_I)
    joins = index_I.new_zeros(shape.splits + 1, ENTRY_SIZE).index_copy_(0, place_I, torch.stack(join, 1))
    item = torch.stack([torch.where(real_I, value, padding) for value, padding in items], 1)
    return item.int(), joins[:-1].int()


def _split_size(work: Tensor, min_size: int, splits: int) -> Tensor:
    """Return the smallest split size ``min_size * 2**n``, n = 0, 1, ..., at which ``splits`` splits hold ``work``
    keys.
    """
    sizes = min_size << torch.arange(40, device=work.device)
    return sizes[torch.searchsorted(sizes * splits, work.view(1))]
