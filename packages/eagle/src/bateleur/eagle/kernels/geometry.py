"""Triton kernels of the ids, positions, lengths and slots of draft passes, one launch per function. The PyTorch
implementation in `bateleur.eagle.geometry` is the specification.

Legend: T tokens or N rows (requests) of a tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from bateleur.eagle.buffers import DraftBuffers
from bateleur.metadata import CommonAttentionMetadata

_TILE = 256


@triton.jit(do_not_specialize=["num_rows", "num_given"])
def first_kernel(
    ids_ptr, positions_ptr, starts_ptr, seq_lens_ptr, computed_ptr, slots_ptr, next_ptr, valid_ptr,
    new_ids_ptr, new_positions_ptr, new_slots_ptr, new_starts_ptr, new_seq_lens_ptr, new_computed_ptr, last_ptr,
    token_positions_ptr, tokens_ptr, step_ptr,
    num_rows, num_given, limit, max_rows, max_tokens,
    DRAFTS: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stage the first draft pass as `geometry.stage_first`: ids shifted by one, positions, lengths and slots.

    Grid (tiles of the entries of `query_start_loc` or of the tokens of the buffers, whichever are more).
    Occupancy on sm_90: at least 16 blocks per SM. Reads the target's step (ids_ptr to slots_ptr), and for num_given
    requests the next token (next_ptr) and the number of kept tokens (valid_ptr). Writes the tensors of `DraftBuffers`
    from new_ids_ptr to step_ptr. limit: `max_model_len`. DRAFTS: drafts per request. SEARCH: iterations of the binary
    search for the request of a token.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owned = tl.load(starts_ptr + num_rows)

    # Rows of the tile, padding included.
    start_N = tl.load(starts_ptr + index, mask=index < num_rows, other=owned)
    length_N = tl.load(starts_ptr + index + 1, mask=index < num_rows, other=owned) - start_N
    live_N = length_N > 0
    valid_N = tl.load(valid_ptr + index, mask=live_N & (index < num_given), other=0)
    valid_N = tl.minimum(tl.maximum(valid_N, 1), length_N)
    last_N = tl.where(live_N, start_N + valid_N - 1, 0).to(tl.int64)
    position_N = tl.load(positions_ptr + last_N, mask=live_N, other=-2)
    row_N = index < max_rows
    tl.store(new_starts_ptr + index, start_N, mask=index <= max_rows)
    tl.store(last_ptr + index, last_N, mask=row_N)
    tl.store(token_positions_ptr + index, position_N + 2, mask=row_N)
    seq_len_N = tl.load(seq_lens_ptr + index, mask=live_N, other=0)
    computed_N = tl.load(computed_ptr + index, mask=live_N, other=0)
    tl.store(new_seq_lens_ptr + index, seq_len_N, mask=row_N)
    tl.store(new_computed_ptr + index, computed_N, mask=row_N)
    for draft in tl.static_range(DRAFTS):
        tl.store(tokens_ptr + index * DRAFTS + draft, tl.full([BLOCK], -1, tl.int64), mask=row_N)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.zeros([], tl.int64))

    # Tokens of the tile: the row of each is the number of rows that end at or before it.
    low_T, high_T = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_rows
    for _ in tl.static_range(SEARCH):
        open_T = low_T < high_T
        middle_T = (low_T + high_T) // 2
        ended_T = tl.load(starts_ptr + middle_T + 1, mask=open_T, other=0) <= index
        low_T = tl.where(open_T & ended_T, middle_T + 1, low_T)
        high_T = tl.where(open_T & (ended_T == 0), middle_T, high_T)
    owned_T = index < owned
    start_T = tl.load(starts_ptr + low_T, mask=owned_T, other=0)
    end_T = tl.load(starts_ptr + low_T + 1, mask=owned_T, other=0)
    valid_T = tl.load(valid_ptr + low_T, mask=owned_T & (low_T < num_given), other=0)
    valid_T = tl.minimum(valid_T, end_T - start_T)
    kept_T = owned_T & (index - start_T < valid_T)
    drawing_T = kept_T & (index - start_T == valid_T - 1)
    next_T = tl.maximum(tl.load(next_ptr + low_T, mask=drawing_T, other=0), 0).to(tl.int32)
    shifted_T = tl.load(ids_ptr + index + 1, mask=kept_T & ~drawing_T, other=0)
    position_T = tl.load(positions_ptr + index, mask=owned_T, other=0)
    slot_T = tl.load(slots_ptr + index, mask=kept_T & (position_T < limit), other=-1)
    token_T = index < max_tokens
    tl.store(new_ids_ptr + index, tl.where(drawing_T, next_T, shifted_T), mask=token_T)
    tl.store(new_positions_ptr + index, tl.minimum(position_T, limit - 1), mask=token_T)
    tl.store(new_slots_ptr + index, slot_T, mask=token_T)


@triton.jit(do_not_specialize=["num_given"])
def chain_kernel(
    token_ptr, table_ptr,
    ids_ptr, positions_ptr, slots_ptr, starts_ptr, seq_lens_ptr, computed_ptr, last_ptr, token_positions_ptr,
    tokens_ptr, step_ptr,
    num_given, table_row, block_size, limit, max_rows, max_tokens,
    FIRST: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Record the drafts of a pass, and stage the next one, with one token per request, as `geometry.stage_next`.

    Grid (1), because there is one counter and one number of rows. Occupancy on sm_90: at least 2 blocks per SM. Reads
    token_ptr, the drafts of num_given requests, and table_ptr, the block table. Updates the tensors of `DraftBuffers`
    from ids_ptr to step_ptr. FIRST: the rows come from the first pass. limit: `max_model_len`. DRAFTS: drafts per
    request.
    """
    tile = tl.arange(0, BLOCK)
    num_rows, end = tl.load(starts_ptr + max_rows), num_given
    if FIRST:
        num_rows, end = tl.zeros([], tl.int32), max_tokens + 1
        for first in range(0, max_rows, BLOCK):
            start_N = tl.load(starts_ptr + first + tile, mask=first + tile < max_rows, other=0)
            end_N = tl.load(starts_ptr + first + tile + 1, mask=first + tile < max_rows, other=0)
            num_rows += tl.sum((end_N > start_N).to(tl.int32), 0)
    step = tl.load(step_ptr)
    tl.debug_barrier()  # both are read before they are written

    num_live = tl.minimum(num_rows, num_given)
    num_recorded = tl.where(step < DRAFTS, num_given, 0)
    for first in range(0, end, BLOCK):
        index = first + tile
        live_N = index < num_live
        drawn_at_N = tl.load(token_positions_ptr + index, mask=live_N, other=0) - 2
        token_N = tl.load(token_ptr + index, mask=live_N & (drawn_at_N < limit), other=-1).to(tl.int64)
        held_N = tl.where(live_N, tl.minimum(drawn_at_N + 1, limit - 1), 0)
        block_ptr_N = table_ptr + index.to(tl.int64) * table_row + held_N // block_size
        block_N = tl.load(block_ptr_N, mask=live_N & (drawn_at_N + 1 < limit), other=0).to(tl.int64)
        slot_N = tl.where(block_N != 0, block_N * block_size + held_N % block_size, -1)
        tl.store(tokens_ptr + index * DRAFTS + step, token_N, mask=index < num_recorded)
        tl.store(token_positions_ptr + index, drawn_at_N + 3, mask=live_N)
        if FIRST:
            last_N = tl.where(index < num_rows, index, 0).to(tl.int64)
            tl.store(starts_ptr + index, tl.minimum(index, num_rows), mask=index <= max_rows)
            tl.store(last_ptr + index, last_N, mask=index < max_rows)
        token_N = tl.maximum(token_N, 0).to(tl.int32)
        tl.store(ids_ptr + index, token_N, mask=index < tl.minimum(end, max_tokens))
        tl.store(positions_ptr + index, held_N, mask=index < tl.minimum(end, max_tokens))
        tl.store(slots_ptr + index, slot_N, mask=index < tl.minimum(end, max_tokens))
        seq_len_N = tl.where(live_N, held_N + 1, 0).to(tl.int32)
        tl.store(computed_ptr + index, held_N.to(tl.int32), mask=index < tl.minimum(end, max_rows))
        tl.store(seq_lens_ptr + index, seq_len_N, mask=index < tl.minimum(end, max_rows))
    tl.store(step_ptr, step + 1)


def _written(x: DraftBuffers) -> tuple[Tensor, ...]:
    """Return the buffers that both kernels write, in the order of their arguments."""
    rows = x.query_start_loc, x.seq_lens, x.num_computed_tokens, x.last_index, x.token_positions, x.tokens, x.step
    return x.input_ids, x.positions, x.slot_mapping, *rows


def stage_first(
    buffers: DraftBuffers, batch: CommonAttentionMetadata, slots: Tensor, next_token: Tensor, num_valid: Tensor
) -> None:
    """Fill `buffers` for the first draft pass after the target's step `batch`, in one launch.

    slots: (T,) int64, slot mapping of the draft's KV-cache group. next_token, num_valid: (n,) integer, the token after
    the last kept one of each request, and its number of kept tokens.
    """
    max_rows, max_tokens = len(buffers.seq_lens), len(buffers.input_ids)
    first_kernel[(triton.cdiv(max(max_rows + 1, max_tokens), _TILE),)](
        batch.input_ids, batch.positions, batch.query_start_loc, batch.seq_lens, batch.num_computed_tokens, slots,
        next_token.contiguous(), num_valid.contiguous(), *_written(buffers),
        batch.num_reqs, len(next_token), buffers.limits.max_model_len, max_rows, max_tokens,
        DRAFTS=buffers.num_speculative_tokens, SEARCH=max_rows.bit_length(), BLOCK=_TILE, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def stage_next(buffers: DraftBuffers, token: Tensor, block_table: Tensor, block_size: int, first: bool) -> None:
    """Record the drafts `token` (n,) in `buffers`, and fill them for the next draft pass, in one launch.

    block_table, block_size: of the draft's KV-cache group. first: whether the drafts are those of the first pass.
    """
    max_rows, max_tokens = len(buffers.seq_lens), len(buffers.input_ids)
    block = min(max(128, triton.next_power_of_2(max_rows)), 1024)
    chain_kernel[(1,)](
        token.contiguous(), block_table, *_written(buffers),
        len(token), block_table.stride(0), block_size, buffers.limits.max_model_len, max_rows, max_tokens,
        FIRST=first, DRAFTS=buffers.num_speculative_tokens, BLOCK=block, num_warps=block // 128, enable_fp_fusion=True,
    )  # fmt: skip
