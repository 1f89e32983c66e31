"""Pure functions from the rows of a step to the values its buffers get; numpy only, no loop over rows.

Shapes: R real rows, T real tokens, W columns of a block table that hold any block.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bateleur.metadata.batch import BatchShape
from bateleur.metadata.bounds import I32Array
from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.rows import KVGroup, Limits, StepRows

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]


def check_step(rows: StepRows, shape: BatchShape, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
    """Refuse a step whose sizes do not fit the buffers or each other, naming field, value and rule."""
    if shape.padded_reqs > limits.max_num_reqs:
        raise ValueError(f"padded_reqs: {shape.padded_reqs} is above max_num_reqs {limits.max_num_reqs}")
    if shape.padded_tokens > limits.max_num_tokens:
        raise ValueError(
            f"padded_tokens: {shape.padded_tokens} is above max_num_tokens {limits.max_num_tokens}"
        )
    rows.check_arrays(shape.num_reqs, shape.num_tokens, groups)
    if not shape.num_reqs:
        return
    query_lens, computed = rows.query_lens, rows.num_computed
    total = int(np.add.reduce(query_lens))
    if total != shape.num_tokens:
        raise ValueError(f"query_lens: sum to {total}, but the shape has num_tokens {shape.num_tokens}")
    if np.minimum.reduce(query_lens) < 1:
        row = int(query_lens.argmin())
        raise ValueError(f"query_lens: {int(query_lens[row])} in row {row}; must be at least 1")
    if total > shape.num_reqs and np.maximum.reduce(query_lens) > shape.max_query_len:
        raise ValueError(
            f"query_lens: {int(query_lens.max())} is above the promised max_query_len {shape.max_query_len}"
        )
    if np.minimum.reduce(computed) < 0:
        row = int(computed.argmin())
        raise ValueError(f"num_computed: {int(computed[row])} in row {row}; must not be negative")


def length_bounds(rows: StepRows, limits: Limits) -> tuple[I32Array, int]:
    """Upper bounds (R,) of the sequence lengths after the step, and the largest of them (0 for no rows)."""
    upper = rows.num_computed + rows.query_lens
    longest = int(np.maximum.reduce(upper)) if len(upper) else 0
    if longest > limits.max_model_len:
        raise ValueError(
            f"num_computed: row {int(upper.argmax())} would hold {longest} tokens, "
            f"above max_model_len {limits.max_model_len}"
        )
    return upper, longest


def row_values(
    rows: StepRows, shape: BatchShape, upper: I32Array, iota: I32Array
) -> tuple[dict[str, Any], IntArray, IntArray]:
    """Real values of every field without groups, the (T,) row of each token, and the (T,) positions.

    ``iota`` is 0, 1, 2, ... and longer than any axis of the step.
    """
    if shape.num_tokens == shape.num_reqs:  # one token a row: starts and rows are both 0, 1, 2, ...
        starts = iota[: shape.num_reqs + 1]
        token_row: IntArray = starts[:-1]
        positions: IntArray = rows.num_computed
    else:
        starts = np.zeros(shape.num_reqs + 1, np.int32)
        np.cumsum(rows.query_lens, out=starts[1:])
        token_row = iota[: shape.num_reqs].repeat(rows.query_lens)
        positions = iota[: shape.num_tokens] + (rows.num_computed - starts[:-1]).take(token_row)
    values = {
        "input_ids": rows.token_ids,
        "positions": positions,
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": upper,
        "num_computed_tokens": rows.num_computed,
        "is_prefilling": rows.is_prefilling,
        "seq_lens_cpu_upper_bound": upper,
        "seq_lens_cpu_exact": True if rows.exact is None else rows.exact,
    }
    return values, token_row, positions


def masked_table(table: I32Array, upper: I32Array, longest: int, group: KVGroup, iota: I32Array) -> I32Array:
    """Block table (R, W) of the real rows with the tail of each row null.

    A table whose owner left ids of a finished request behind the row's last block would otherwise lead
    kernels that walk to a bound into live blocks of others.
    """
    if not group.has_slots:
        return table
    reach = group.lookahead_tokens + group.block_size - 1
    width = min((longest + reach) // group.block_size, group.max_blocks)
    used = (upper + reach) // group.block_size
    return np.multiply(table[:, :width], iota[:width] < used[:, None])


def token_slots(
    table: I32Array, positions: IntArray, token_row: IntArray, group: KVGroup, index: int
) -> IntArray:
    """Slot (T,) of each real token: its block times ``block_size`` plus its offset in the block.

    Raises:
        ValueError: a token would be stored in the null block, so its row lacks a block.
    """
    column, offset = np.divmod(positions, group.block_size)
    block: npt.NDArray[np.int64] = table[token_row, column].astype(np.int64)
    if len(block) and np.minimum.reduce(block) <= NULL_BLOCK:
        token = int((block <= NULL_BLOCK).argmax())
        raise ValueError(
            f"block_tables: group {index} has block {int(block[token])} for position {int(positions[token])} "
            f"of row {int(token_row[token])}, which this step writes; must be above {NULL_BLOCK}"
        )
    block *= group.block_size
    block += offset
    return block


def dummy_rows(
    shape: BatchShape, groups: tuple[KVGroup, ...], context_len: int, is_prefilling: bool
) -> StepRows:
    """Rows without requests for the real part of ``shape``: equal query lengths, shorter ones first."""
    num_reqs = shape.num_reqs
    query_lens = np.full(num_reqs, shape.num_tokens // max(num_reqs, 1), np.int32)
    if num_reqs:
        query_lens[num_reqs - shape.num_tokens % num_reqs :] += 1
    return StepRows(
        query_lens=query_lens,
        num_computed=np.full(num_reqs, context_len, np.int32),
        is_prefilling=np.full(num_reqs, is_prefilling, np.bool_),
        token_ids=np.zeros(shape.num_tokens, np.int32),
        block_tables=tuple(np.full((num_reqs, group.max_blocks), NULL_BLOCK, np.int32) for group in groups),
    )
