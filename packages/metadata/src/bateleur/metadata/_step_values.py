"""Checks a step and computes the values that it stages, on the host in numpy, without a loop over requests."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import I32Array
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows


class StepLengths(NamedTuple):
    """Lengths of a step. ``upper``: (R,) upper bounds of sequence lengths after the step. ``longest``: the largest of
    them, 0 without rows. ``starts``: (R + 1,) index of each row's first token, then the token count.
    """

    upper: I32Array
    longest: int
    starts: I32Array


def check_arrays(
    rows: StepRows, shape: BatchShape, limits: BatchLimits, groups: Sequence[KVCacheGroup], tables: Sequence[BlockTable]
) -> None:
    """Raise ValueError if the sizes or dtypes of a step do not fit the buffers or each other."""
    if shape.padded_reqs > limits.max_num_reqs:
        raise ValueError(f"padded_reqs: {shape.padded_reqs} is above max_num_reqs {limits.max_num_reqs}")
    if shape.padded_tokens > limits.max_num_tokens:
        raise ValueError(f"padded_tokens: {shape.padded_tokens} is above max_num_tokens {limits.max_num_tokens}")
    per_row, sampled = (shape.num_reqs,), rows.sampled_token_ids
    _expect("query_lens", rows.query_lens, per_row, np.int32)
    _expect("num_computed_tokens", rows.num_computed_tokens, per_row, np.int32)
    _expect("is_prefilling", rows.is_prefilling, per_row, np.bool_)
    _expect("token_ids", rows.token_ids, (shape.num_tokens,), np.int32)
    if rows.num_computed_is_exact is not None:
        _expect("num_computed_is_exact", rows.num_computed_is_exact, per_row, np.bool_)
    if rows.num_computed_tokens_device is not None:
        _expect("num_computed_tokens_device", rows.num_computed_tokens_device, per_row)
    if sampled is not None and (sampled.dim() != 1 or len(sampled) > shape.num_tokens):
        raise ValueError(
            f"sampled_token_ids: has shape {tuple(sampled.shape)}, must be (n,) with n <= {shape.num_tokens}"
        )
    if rows.block_table_rows is not None:
        if not tables:
            raise ValueError("block_table_rows: names rows, but the buffers were made without tables")
        _expect("block_table_rows", rows.block_table_rows, per_row, np.int64)
        num_rows = len(tables[0].ids)
        if ((rows.block_table_rows < 0) | (rows.block_table_rows >= num_rows)).any():
            raise ValueError(f"block_table_rows: {rows.block_table_rows} must be rows of tables of {num_rows} rows")
        return
    if len(rows.block_tables) != len(groups):
        raise ValueError(f"block_tables: has {len(rows.block_tables)} tables for {len(groups)} KV-cache groups")
    for table, group in zip(rows.block_tables, groups, strict=True):
        _expect("block_tables", table, (shape.num_reqs, group.max_blocks), np.int32)


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: type[np.generic] | None = None) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: has shape {tuple(array.shape)}, must be {shape}")
    if dtype is not None and array.dtype != dtype:
        raise ValueError(f"{name}: has dtype {array.dtype}, must be {np.dtype(dtype)}")


def step_lengths(rows: StepRows, shape: BatchShape, max_model_len: int) -> StepLengths:
    """Return a step's lengths. Raises ValueError if too low, above ``max_model_len`` or in conflict with ``shape``."""
    query_lens, computed = rows.query_lens, rows.num_computed_tokens
    starts = np.zeros(shape.num_reqs + 1, np.int32)
    query_lens.cumsum(out=starts[1:])
    if starts[-1] != shape.num_tokens:
        raise ValueError(f"query_lens: sum to {query_lens.sum()}, but the shape has num_tokens {shape.num_tokens}")
    if not shape.num_reqs:
        return StepLengths(computed, 0, starts)
    row = query_lens.argmin()
    if query_lens[row] < 1:
        raise ValueError(f"query_lens: {query_lens[row]} in row {row}; must be at least 1")
    if query_lens.max() > shape.max_query_len:
        raise ValueError(f"query_lens: {query_lens.max()} is above the promised max_query_len {shape.max_query_len}")
    row = computed.argmin()
    if computed[row] < 0:
        raise ValueError(f"num_computed_tokens: {computed[row]} in row {row}; must not be negative")
    upper = computed.astype(np.int64) + query_lens
    row = upper.argmax()
    if upper[row] > max_model_len:
        raise ValueError(
            f"num_computed_tokens: row {row} would hold {upper[row]} tokens, above max_model_len {max_model_len}"
        )
    return StepLengths(upper.astype(np.int32), int(upper[row]), starts)


def check_blocks(
    rows: StepRows, lengths: StepLengths, groups: Sequence[KVCacheGroup], tables: Sequence[BlockTable]
) -> None:
    """Raise ValueError if the first or last token of a request has no KV block. Blocks are allocated in order."""
    for index, group in enumerate(groups):
        if not group.has_slots or not len(lengths.upper):
            continue
        named = rows.block_table_rows is not None
        table = tables[index].ids if named else rows.block_tables[index]
        where = rows.block_table_rows if named else np.arange(len(lengths.upper))
        for positions in (rows.num_computed_tokens, lengths.upper - 1):
            block = table[where, np.minimum(positions // group.block_size, group.max_blocks - 1)]
            row = int((block <= NULL_BLOCK).argmax())
            if block[row] <= NULL_BLOCK:
                raise ValueError(
                    f"block_tables: group {index} has block {block[row]} for position {positions[row]} of row "
                    f"{row}, which this step writes; must be above {NULL_BLOCK}"
                )


def used_table(table: I32Array, group: KVCacheGroup, lengths: StepLengths) -> I32Array:
    """Copy the leading columns of a group's block table that this step may use: (R, columns) int32.

    Columns after each row's last block become the null block. Kernels may read a row up to `max_seq_len`, the bound of
    all rows, and stale ids there would make them read blocks of other requests. The table of a group whose
    ``has_slots`` is False (recurrent states) is copied unchanged.
    """
    if not group.has_slots:
        return table.copy()
    width = min(-(-(lengths.longest + group.lookahead_tokens) // group.block_size), group.max_blocks)
    column_starts = np.arange(width) * group.block_size - group.lookahead_tokens
    return np.where(column_starts < lengths.upper[:, None], table[:, :width], NULL_BLOCK)


def dummy_rows(shape: BatchShape, groups: Sequence[KVCacheGroup], context_len: int, is_prefilling: bool) -> StepRows:
    """Return rows of ``shape`` with null blocks and ``context_len`` computed tokens; prompts if ``is_prefilling``."""
    num_reqs = shape.num_reqs
    query_lens = np.full(num_reqs, shape.num_tokens // max(num_reqs, 1), np.int32)
    if num_reqs:
        query_lens[num_reqs - shape.num_tokens % num_reqs :] += 1
    return StepRows(
        query_lens=query_lens,
        num_computed_tokens=np.full(num_reqs, context_len, np.int32),
        is_prefilling=np.full(num_reqs, is_prefilling, np.bool_),
        token_ids=np.zeros(shape.num_tokens, np.int32),
        block_tables=tuple(np.full((num_reqs, group.max_blocks), NULL_BLOCK, np.int32) for group in groups),
    )
