"""Launches, tile sizes and work-list sizes of the Triton attention kernels. This module does not import Triton.

Shapes: M lines of a tile (tokens x query heads of one key head), N keys of a loop iteration, D head dimension.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from bateleur.metadata.dispatch import cdiv, next_power_of_2

MAX_SHORT_QUERY_LEN = 16
"""Rows of up to this many tokens use small tiles, if other rows of the batch may be longer."""
ENTRY_SIZE = 8  # int32 numbers in an entry of a work list
_PROGRAMS_PER_SM = 2  # programs of one split each that fit the shared memory of a multiprocessor


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the attention kernel, with its part of the work list.

    Attributes:
        least, most: the launch handles requests of ``least`` to ``most`` tokens; ``most`` 0 means no limit.
        block_m, min_keys: M, lines of a tile, and fewest keys of a KV split.
        num_items, first_item: number of items (one query tile with one KV split each), at least one of them padding,
            and index of the first one in the list.
        first_line: index of the launch's first line among the partial outputs of all launches.
        options: tile sizes and launch options of the kernel.
    """

    least: int
    most: int
    block_m: int
    min_keys: int
    num_items: int
    first_item: int
    first_line: int
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Sizes of the work list of a batch, and launch options of the kernels that read it, computed on the host.

    The list is an int32 tensor (``num_entries``, 8): the items (one query tile with one KV split each) of each
    launch, then ``splits`` joins (sums over the splits of a tile) of each launch. Entries are described in
    :mod:`bateleur.metadata.kernels.work_list`.

    Attributes:
        group, num_kv_heads: query heads of a key head, and key heads.
        window: sliding window in keys, 0 for none.
        block_n: N, keys of a loop iteration; the largest of all launches, a multiple of each.
        splits: about this many KV splits per key head hold the keys of all tiles of a launch. Fewer than ``splits``
            tiles have several splits and need a join, so ``splits`` joins per launch are enough.
        launches: one launch, or one for short and one for long queries.
        num_items, num_lines: number of items, and of lines of partial outputs, of all launches.
        num_entries: number of items and joins of all launches.
        unsplit_keys: requests with at most this many keys are not split.
        join_grid: launch grid of the join kernel: joins, parts of a tile, key heads.
        join_options: tile sizes and launch options of the join kernel, see :func:`join_options`.
        work_sizes: integer arguments of the kernel that computes the list.
    """

    group: int
    num_kv_heads: int
    window: int
    block_n: int
    splits: int
    launches: tuple[Launch, ...]
    num_items: int
    num_entries: int
    num_lines: int
    unsplit_keys: int
    join_grid: tuple[int, int, int]
    join_options: dict[str, Any]
    work_sizes: tuple[int, ...]


@cache
def device_sizes(device: torch.device) -> tuple[int, int]:
    """Return the number of SMs, and bytes of shared memory per block: 227 KiB on sm_90, 163 on sm_80, 99 on sm_86."""
    if device.type != "cuda":  # Triton's interpreter
        return 1, 227 << 10
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin


def split_limit(num_kv_heads: int, num_sms: int) -> int:
    """Return the number of KV splits per key head, over all requests together, whose programs fill the device."""
    return max(_PROGRAMS_PER_SM * num_sms // num_kv_heads, 1)


def min_split_keys(block_m: int) -> int:
    """Return the fewest keys of a KV split for tiles of M = ``block_m`` lines; a multiple of every N.

    Starting a program costs as much as reading 256 keys. The float32 partial output of M lines takes at most half of
    the bytes of ``4 * M`` keys and values.
    """
    return max(256, 4 * block_m)


def tile_options(
    tile_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    shared_bytes: int,
    converts: bool = False,
    long_queries: bool = False,
) -> dict[str, Any]:
    """Return tile sizes and launch options of the attention kernel, for tiles of about ``tile_rows`` lines.

    BLOCK_M: lines of a tile, at most 128 (two warp groups), 32 in float32. It is at most 64 above head dimension 128 if
    ``shared_bytes`` (shared memory per block) is below 112 KiB: 128 lines of head dimension 256 alone take 64 KiB.

    BLOCK_N: keys of a loop iteration, in [32, 128]: 8192 // BLOCK_D. If all requests have more than MAX_SHORT_QUERY_LEN
    tokens (``long_queries``), 16384 // BLOCK_D, so that sums are rescaled less often. This needs 200 KiB of shared
    memory, keys that are not converted, and a head dimension up to 128: larger heads would spill registers. Short
    queries keep the value of decodes, so that a draft adds its keys in the same order as a decoded token. In float32,
    which has no tensor cores of its precision, it is 16.

    BLOCK_D: head dimension, padded to a power of two from 16 on.

    num_stages: 3 pipeline stages, 2 in float32. If the kernel ``converts`` keys to the ``dtype`` of the queries, fewer
    registers are left to fetch keys ahead: 2 stages above head dimension 128, and 1 in float32.

    The other options are PRECISION (input precision of products), num_warps and enable_fp_fusion.
    """
    block_d = max(16, next_power_of_2(head_dim))
    full = dtype == torch.float32
    most = 32 if full else 64 if head_dim > 128 and shared_bytes < 112 << 10 else 128
    block_m = min(max(16, next_power_of_2(tile_rows)), most)
    wide = long_queries and block_d <= 128 and not converts and shared_bytes >= 200 << 10
    keys = 16384 if wide else 8192  # times block_d
    stages = 2 if full or (converts and block_d > 128) else 3
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 16 if full else max(32, min(keys // block_d, 128)),
        "BLOCK_D": block_d,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 8 if full or block_m * block_d > 8192 or block_m > 64 else 4,
        "num_stages": 1 if full and converts else stages,
        "enable_fp_fusion": True,
    }


def join_options(block_m: int, head_dim: int) -> dict[str, Any]:
    """Return tile sizes and launch options of a join, which adds up the partial outputs of a tile's splits: BLOCK_L
    lines and BLOCK_S splits at once, BLOCK_D (padded head dimension), num_warps and enable_fp_fusion.

    A thread loads 4 x 16 bytes at once. A tile of a decode has a few lines and up to some dozen splits, a tile of a
    prompt 128 lines and a few splits.
    """
    block_d = max(16, next_power_of_2(head_dim))
    block_l, lanes = (1, 2048) if block_m <= 32 else (8, 4096)  # float32 lanes at once
    return {
        "BLOCK_L": block_l,
        "BLOCK_D": block_d,
        "BLOCK_S": lanes // (block_l * block_d),
        "num_warps": lanes // 512,
        "enable_fp_fusion": True,
    }


def launches_of(max_query_len: int, group: int) -> list[tuple[int, int, int]]:
    """Return (shortest query, longest or 0 for no limit, tile lines) per launch. group: query heads of a key head."""
    if max_query_len <= MAX_SHORT_QUERY_LEN:
        return [(1, 0, max_query_len * group)]
    return [(1, MAX_SHORT_QUERY_LEN, min(MAX_SHORT_QUERY_LEN * group, 64)), (MAX_SHORT_QUERY_LEN + 1, 0, 128)]


def work_shape(
    q_heads: int, k_cache: Tensor, num_rows: int, num_tokens: int, max_query_len: int, window: int,
    dtype: torch.dtype | None = None,
) -> WorkShape:  # fmt: skip
    """Return how attention with ``q_heads`` over this cache is divided for ``num_rows`` requests, padding included.

    num_tokens: tokens of the batch, padded ones included. max_query_len: upper bound of the tokens of a request.
    window: sliding window in keys, 0 for none. dtype: dtype of the queries; None: that of the cache.
    """
    _, _, num_kv_heads, head_dim = k_cache.shape
    sizes = num_kv_heads, head_dim, dtype or k_cache.dtype, k_cache.dtype, k_cache.device
    return _work_shape(q_heads, *sizes, num_rows, num_tokens, max(max_query_len, 1), window)


@lru_cache(maxsize=1024)
def _work_shape(
    q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device,
    num_rows: int, num_tokens: int, max_query_len: int, window: int,
) -> WorkShape:  # fmt: skip
    num_sms, shared_bytes = device_sizes(device)
    group, splits = q_heads // num_kv_heads, split_limit(num_kv_heads, num_sms)
    launches: list[Launch] = []
    first_item = first_line = tile_lines = 0
    for least, most, tile_rows in launches_of(max_query_len, group):
        long_queries = least > MAX_SHORT_QUERY_LEN
        options = tile_options(tile_rows, head_dim, dtype, shared_bytes, dtype != kv_dtype, long_queries)
        block_m = options["BLOCK_M"]
        rows = min(num_rows, num_tokens // least)
        lines = (most or max_query_len) * group  # of a row, at most
        tiles = min(num_tokens * group // block_m + rows, rows * cdiv(lines, block_m))
        # Beyond one for each tile there are fewer than `splits` items, because `splits` splits hold all keys.
        num_items = tiles + splits + 1
        min_keys = min_split_keys(block_m)
        launches.append(Launch(least, most, block_m, min_keys, num_items, first_item, first_line, options))
        first_item += num_items
        first_line += 2 * splits * num_kv_heads * block_m  # split tiles have fewer than 2 * splits splits
        tile_lines = max(tile_lines, min(lines, block_m))
    joins = join_options(max(launch.block_m for launch in launches), head_dim)
    num_joins = splits * len(launches)  # a launch has fewer than `splits` split tiles
    block_n = max(launch.options["BLOCK_N"] for launch in launches)
    work_sizes = [num_rows.bit_length(), group, num_kv_heads, window, block_n, splits, first_item]
    for launch in (launches[0], launches[-1]):
        work_sizes += [launch.least, launch.most, launch.block_m, launch.min_keys, launch.num_items]
    return WorkShape(
        group=group, num_kv_heads=num_kv_heads, window=window, block_n=block_n, splits=splits,
        launches=tuple(launches), num_items=first_item, num_entries=first_item + num_joins, num_lines=first_line,
        unsplit_keys=min(launch.min_keys for launch in launches),
        join_grid=(num_joins, cdiv(tile_lines, joins["BLOCK_L"]), num_kv_heads),
        join_options=joins, work_sizes=tuple(work_sizes),
    )  # fmt: skip
