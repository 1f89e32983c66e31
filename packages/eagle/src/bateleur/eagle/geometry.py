"""Token id, position, length and slot of every token of the draft passes.

The input token at position p of a draft pass is the one of index p + 1, with the target's feature of p; it predicts the
token of index p + 2. So the first pass runs on the tokens of the target's step with ids shifted left by one, rejected
tokens included: the host need not know how many drafts were accepted. Each later pass has one token per request, one
position further.

All functions write into `DraftBuffers`, read no value on the host, and have static shapes, so they can be captured.
They find the number of real requests on the device, and fill all entries after them with padding values.

On CUDA each function is one Triton kernel. The code here is its PyTorch implementation.

Legend for shapes: R requests and T tokens of the batch with padding, N requests and M tokens of the buffers, K drafts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bateleur.eagle.buffers import NO_TOKEN, DraftBuffers
from bateleur.metadata import NULL_BLOCK, PAD_SLOT, CommonAttentionMetadata
from bateleur.metadata.dispatch import Implementations


def stage_first(
    buffers: DraftBuffers, batch: CommonAttentionMetadata, group: int, next_token: Tensor, num_valid: Tensor
) -> None:
    """Stage the first draft pass on the requests and tokens of the target's step; drops earlier drafts.

    Token j of a request gets the id of token j + 1, the last valid one gets `next_token`; rejected tokens and padding
    get id 0 and slot -1. Positions, starts and lengths are the target's.

    A pass with the target's attention metadata stores keys and values of rejected tokens, too. A pass with metadata
    over `buffers.slot_mapping` does not, and then the slots of rejected tokens keep their old contents. The caller must
    ensure that these contents are finite until later steps overwrite them, because attention reads and masks them.

    batch: the target's step. Rows without a token are padding, whatever the other arguments hold for them.
    group: KV-cache group of `batch` for the draft's layers.
    next_token: (n,) integer, the token after the last valid one; n rows, at least all real ones.
    num_valid: (n,) integer, kept tokens of the request, at least 1 and at most its query length.

    Raises `ValueError` if `batch` is larger than the buffers, or n differs between both arguments or is larger than
    the batch.
    """
    rows, tokens, limits = batch.num_reqs, batch.num_tokens, buffers.limits
    if rows > limits.max_num_reqs or tokens > limits.max_num_tokens:
        raise ValueError(
            f"batch: {rows} rows and {tokens} tokens are more than the buffers hold, {limits.max_num_reqs} and "
            f"{limits.max_num_tokens}"
        )
    if next_token.shape != num_valid.shape or next_token.dim() != 1 or next_token.shape[0] > rows:
        raise ValueError(
            f"next_token {tuple(next_token.shape)} and num_valid {tuple(num_valid.shape)} must both be (n,) with at "
            f"most the {rows} rows of the batch"
        )
    FORMS["stage_first"].on(buffers.seq_lens)(buffers, batch, batch.slot_mappings[group], next_token, num_valid)


def stage_next(
    buffers: DraftBuffers, token: Tensor, block_table: Tensor, block_size: int, *, first: bool = False
) -> None:
    """Record the drafts sampled in a pass, and stage the next pass, with one token for each request.

    token: (n,) integer, drafts of requests 0 .. n - 1, at least all real ones. -1 is recorded as no draft.
    block_table: (at least n, max_blocks) int32, block table of the draft's KV-cache group; a null block stores nothing.
    block_size: tokens of a block.
    first: whether the drafts are those of the first pass, in which a request has any number of tokens.

    A request whose position is `max_model_len` or more stores nothing, keeps its length, and gets no draft. Called
    after the last draft, too, although the staged pass is not run. Once K drafts are recorded, a call records nothing.
    Raises `ValueError` if n is larger than the buffers or the table.
    """
    most = min(buffers.limits.max_num_reqs, block_table.shape[0])
    if token.dim() != 1 or token.shape[0] > most:
        raise ValueError(
            f"token: has shape {tuple(token.shape)}, must be (n,) with at most {buffers.limits.max_num_reqs} rows "
            f"of the buffers and {block_table.shape[0]} of block_table"
        )
    FORMS["stage_next"].on(buffers.seq_lens)(buffers, token, block_table, block_size, first)


def _stage_first(
    x: DraftBuffers, batch: CommonAttentionMetadata, slots: Tensor, next_token: Tensor, num_valid: Tensor
) -> None:
    count, limit = len(next_token), x.limits.max_model_len
    starts = batch.query_start_loc.long()
    first_R, lengths_R = starts[:-1], starts.diff()
    live_R = lengths_R > 0
    valid_R, next_R = torch.zeros_like(lengths_R), torch.zeros_like(lengths_R)
    valid_R[:count], next_R[:count] = num_valid, next_token
    valid_R = torch.minimum(valid_R.clamp_(min=0), lengths_R)
    last_R = (first_R + (valid_R - 1).clamp_(min=0)) * live_R

    _put(x.query_start_loc, starts, starts[-1])
    _put(x.seq_lens, batch.seq_lens * live_R)
    _put(x.num_computed_tokens, batch.num_computed_tokens * live_R)
    _put(x.last_index, last_R)
    x.tokens.fill_(NO_TOKEN)
    x.step.zero_()
    if not len(live_R) or not batch.num_tokens:
        _clear(x, x.token_positions)
        return

    ids_T, positions_T = batch.input_ids, batch.positions
    _put(x.token_positions, (positions_T[last_R] + 2) * live_R)
    index_T = torch.arange(batch.num_tokens, device=x.device)
    row_T = torch.searchsorted(starts[1:], index_T, right=True).clamp_(max=len(live_R) - 1)
    valid_T = index_T < (first_R + valid_R)[row_T]
    ids_T = torch.where(index_T == last_R[row_T], next_R.clamp_(min=0)[row_T], ids_T.roll(-1))
    _put(x.input_ids, ids_T * valid_T)
    _put(x.positions, positions_T.clamp(max=limit - 1) * (index_T < starts[-1]))
    stored_T = valid_T & (positions_T < limit)
    _put(x.slot_mapping, torch.where(stored_T, slots, PAD_SLOT), PAD_SLOT)


def _stage_next(x: DraftBuffers, token: Tensor, block_table: Tensor, block_size: int, first: bool) -> None:
    if first:
        starts = x.query_start_loc
        num_rows = (starts[1:] > starts[:-1]).sum()
        index = torch.arange(len(starts), device=x.device)
        starts.copy_(torch.minimum(index, num_rows))
        x.last_index.copy_(index[:-1] * (index[:-1] < num_rows))
        _clear(x, x.seq_lens, x.num_computed_tokens)

    count, limit = len(token), x.limits.max_model_len
    index_n = torch.arange(count, device=x.device)
    live_n = index_n < x.query_start_loc[-1]
    position_n = x.token_positions[:count] - 2
    token_n = torch.where(live_n & (position_n < limit), token, NO_TOKEN)
    here_K = torch.arange(x.tokens.shape[1], device=x.device) == x.step
    x.tokens[:count] = torch.where(here_K, token_n.unsqueeze(1), x.tokens[:count])
    x.step += 1

    position_n += 1
    held_n = position_n.clamp(max=limit - 1) * live_n
    x.token_positions[:count] += live_n
    x.input_ids[:count] = token_n.clamp(min=0)
    x.positions[:count] = held_n
    x.num_computed_tokens[:count] = held_n
    x.seq_lens[:count] = (held_n + 1) * live_n
    block_n = block_table[index_n, held_n // block_size].long()
    stored_n = live_n & (position_n < limit) & (block_n != NULL_BLOCK)
    slot_n = block_n * block_size + held_n % block_size
    x.slot_mapping[:count] = torch.where(stored_n, slot_n, PAD_SLOT)


def _clear(x: DraftBuffers, *zeroed: Tensor) -> None:
    """Set token ids, positions and the buffers `zeroed` to 0, and all slots to -1, so that a pass stores nothing."""
    for each in (x.input_ids, x.positions, *zeroed):
        each.zero_()
    x.slot_mapping.fill_(PAD_SLOT)


def _put(buffer: Tensor, values: Tensor, tail: Tensor | int = 0) -> None:
    """Write `values` to the leading entries of `buffer`, and `tail` to all entries after them."""
    buffer[: len(values)] = values
    buffer[len(values) :] = tail


FORMS: dict[str, Implementations[Callable[..., None]]] = {
    name: Implementations(form, triton=f"bateleur.eagle.kernels.geometry:{name}")
    for name, form in (("stage_first", _stage_first), ("stage_next", _stage_next))
}
