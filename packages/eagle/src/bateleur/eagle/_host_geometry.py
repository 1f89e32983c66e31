"""The geometry in numpy, for passes that run eagerly on a CPU: there the buffers are the host's own memory.

A step of one request is some fifty operators on a handful of numbers, and one of numpy's takes a quarter of the time.
The torch forms of `bateleur.eagle.geometry` are the specification.
"""

# Shape letters are those of `bateleur.eagle.geometry`.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import NULL_BLOCK, PAD_SLOT, CommonAttentionMetadata

if TYPE_CHECKING:
    from bateleur.eagle.geometry import DraftBuffers

_NO_TOKEN = -1


def stage_first(
    buffers: DraftBuffers,
    batch: CommonAttentionMetadata,
    slots_T: Tensor,
    next_n: Tensor,
    num_valid_n: Tensor,
) -> None:
    """See `bateleur.eagle.geometry.stage_first`."""
    x, count, limit = buffers.arrays(), len(next_n), buffers.limits.max_model_len
    starts = batch.query_start_loc.numpy().astype(np.int64)
    first_R, lengths_R, total = starts[:-1], np.diff(starts), int(starts[-1])
    live_R = lengths_R > 0
    valid_R, next_R = np.zeros_like(lengths_R), np.zeros_like(lengths_R)
    valid_R[:count], next_R[:count] = num_valid_n.numpy(), next_n.numpy()
    valid_R = np.minimum(np.maximum(valid_R, 0), lengths_R)
    last_R = (first_R + np.maximum(valid_R - 1, 0)) * live_R

    _put(x["query_start_loc"], starts, total)
    _put(x["seq_lens"], batch.seq_lens.numpy() * live_R)
    _put(x["num_computed_tokens"], batch.num_computed_tokens.numpy() * live_R)
    _put(x["last_index"], last_R)
    x["tokens"].fill(_NO_TOKEN)
    x["step"].fill(0)
    positions = batch.positions.numpy()[:total]
    last_positions = positions[last_R] if total else last_R
    _put(x["token_positions"], (last_positions + 2) * live_R)

    ids = np.zeros(total, np.int64)
    ids[:-1] = batch.input_ids.numpy()[1:total]
    ids[last_R[live_R]] = np.maximum(next_R[live_R], 0)
    valid = np.arange(total) < np.repeat(first_R + valid_R, lengths_R)
    _put(x["input_ids"], ids * valid)
    _put(x["positions"], np.minimum(positions, limit - 1))
    _put(
        x["slot_mapping"], np.where(valid & (positions < limit), slots_T.numpy()[:total], PAD_SLOT), PAD_SLOT
    )


def stage_chain(buffers: DraftBuffers, token_n: Tensor, block_table: Tensor, block_size: int) -> None:
    """See `bateleur.eagle.geometry.stage_chain`."""
    x = buffers.arrays()
    starts = x["query_start_loc"]
    num_rows = np.count_nonzero(starts[1:] > starts[:-1])
    index = np.arange(len(starts))
    np.minimum(index, num_rows, out=starts, casting="same_kind")
    np.multiply(index[:-1], index[:-1] < num_rows, out=x["last_index"])
    for name in ("input_ids", "positions", "seq_lens", "num_computed_tokens"):
        x[name].fill(0)
    x["slot_mapping"].fill(PAD_SLOT)
    advance(buffers, token_n, block_table, block_size)


def advance(buffers: DraftBuffers, token_n: Tensor, block_table: Tensor, block_size: int) -> None:
    """See `bateleur.eagle.geometry.advance`."""
    x, count, limit = buffers.arrays(), len(token_n), buffers.limits.max_model_len
    index_n, step = np.arange(count), int(x["step"])
    live_n = index_n < x["query_start_loc"][-1]
    position_n = x["token_positions"][:count] - 2
    tokens_n = np.where(live_n & (position_n < limit), token_n.numpy(), _NO_TOKEN)
    if step < x["tokens"].shape[1]:
        x["tokens"][:count, step] = tokens_n
    x["step"].fill(step + 1)

    position_n += 1
    held_n = np.minimum(position_n, limit - 1) * live_n
    x["token_positions"][:count] += live_n
    x["input_ids"][:count] = np.maximum(tokens_n, 0)
    x["positions"][:count] = held_n
    x["num_computed_tokens"][:count] = held_n
    x["seq_lens"][:count] = (held_n + 1) * live_n
    block_n = block_table.numpy()[index_n, held_n // block_size].astype(np.int64)
    stored_n = live_n & (position_n < limit) & (block_n != NULL_BLOCK)
    x["slot_mapping"][:count] = np.where(stored_n, block_n * block_size + held_n % block_size, PAD_SLOT)


def _put(buffer: NDArray[Any], values: NDArray[Any], tail: int = 0) -> None:
    buffer[: len(values)] = values
    buffer[len(values) :] = tail
