"""Geometry of a draft: which token, position, length and slot every row of a draft pass has.

A draft row at position p holds the token of index p + 1 and the target's feature of p, and draws the token of index
p + 2. So the first pass runs on the target's own rows with the ids shifted left by one, rejected rows included: no
host has to know how many drafts were accepted. Each pass after it has one row a request, one position further.

All functions write into `DraftBuffers`, read no value on the host, and have static shapes, so they may be captured.
What is a real row they find on the device, and every entry behind the real ones gets a defined value. With `eager`,
which says that nothing is being captured, a CPU runs them in numpy, to the same results.

Legend for shapes: R rows and T tokens of the batch with padding, N rows and M tokens of the buffers, K drafts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import _host_geometry
from bateleur.metadata import NULL_BLOCK, PAD_SLOT, BatchLimits, CommonAttentionMetadata, SeqLenBound

_NO_TOKEN = -1
_NAMES = (
    "input_ids",
    "positions",
    "slot_mapping",
    "query_start_loc",
    "seq_lens",
    "num_computed_tokens",
    "last_index",
    "token_positions",
    "tokens",
    "step",
)


class DraftBuffers:
    """What draft passes read, at addresses that never change. Padding: 0, slots -1, `query_start_loc` repeats.

    input_ids: (M,) int32. positions: (M,) int64, below `max_model_len`. slot_mapping: (M,) int64, -1 stores nothing.
    query_start_loc: (N + 1,) int32. seq_lens, num_computed_tokens: (N,) int32.
    last_index: (N,) int64, token of the row that draws: its features and outputs are the ones to gather.
    token_positions: (N,) int64, index in its sequence of the token that the row draws; never clamped, so a key of
        noise made of it is never used twice.
    tokens: (N, K) int64, the drafts so far, -1 where there is none.
    step: () int64, the column that the next drawn token goes to.
    on_host: eager passes run in numpy, by default on a CPU. False keeps to torch's operators, so that a check on a CPU
        sees whether other devices would wait.
    """

    def __init__(self, limits: BatchLimits, num_speculative_tokens: int, device: torch.device | str) -> None:
        """Allocate for batches within `limits`, defined as an empty batch.

        limits: sizes of the largest batch of the target. `max_model_len` is what the *draft* can hold, its own
            maximum if that is smaller: rows beyond it store nothing and draft nothing.
        num_speculative_tokens: K; `ValueError` below 1.
        """
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.limits = limits
        self.num_speculative_tokens = num_speculative_tokens
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        rows, tokens = limits.max_num_reqs, max(limits.max_num_tokens, limits.max_num_reqs)

        def new(*shape: int, dtype: torch.dtype = torch.int64, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=self.device)

        self.input_ids = new(tokens, dtype=torch.int32)
        self.positions = new(tokens)
        self.slot_mapping = new(tokens, fill=PAD_SLOT)
        self.query_start_loc = new(rows + 1, dtype=torch.int32)
        self.seq_lens = new(rows, dtype=torch.int32)
        self.num_computed_tokens = new(rows, dtype=torch.int32)
        self.last_index = new(rows)
        self.token_positions = new(rows)
        self.tokens = new(rows, num_speculative_tokens, fill=_NO_TOKEN)
        self.step = new()
        self._arrays: dict[str, NDArray[np.integer[Any]]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def arrays(self) -> dict[str, NDArray[np.integer[Any]]]:
        """The buffers of this class by name as numpy sees them, on a CPU: the same memory."""
        if not self._arrays:
            self._arrays = {name: getattr(self, name).numpy() for name in _NAMES}
        return self._arrays

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name; constant for life."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors().items()}

    def poison(self) -> None:
        """Fill every buffer with values that no consumer survives unnoticed; `stage_first` defines all of them."""
        for tensor in self.tensors().values():
            tensor.fill_(torch.iinfo(tensor.dtype).max - 6)


def draft_max_seq_len(bound: SeqLenBound, num_speculative_tokens: int, max_model_len: int) -> int:
    """Host bound of every draft pass's `seq_lens`: min(largest bound of the target's step + K, max_model_len)."""
    return min(bound.max() + num_speculative_tokens, max_model_len)


def stage_first(
    buffers: DraftBuffers,
    batch: CommonAttentionMetadata,
    group: int,
    next_token: Tensor,
    num_valid: Tensor,
    *,
    eager: bool = False,
) -> None:
    """Stage the first draft pass, on the rows and tokens of the target's step; forgets earlier drafts.

    Token j of a row gets the id of token j + 1, the last valid one gets `next_token`; rejected tokens and padding get
    id 0 and slot -1. Positions, starts and lengths are the target's.

    A pass with the target's attention metadata stores rejected tokens, too, in the target's slots; one with metadata
    over `buffers.slot_mapping` does not, and what these slots held before must then be finite. Later steps write them
    before a token that stays can see them.

    batch: the target's step. Rows without a token are padding, whatever the other arguments hold for them.
    group: KV-cache group of `batch` in which the draft's layers are.
    next_token: (n,) integer, the token behind the last valid one; n rows, at least all real ones.
    num_valid: (n,) integer, tokens of the row that stay, at least 1 and at most its query length.

    `ValueError` if `batch` is larger than the buffers, or n is not the same for both or larger than the batch.
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
    _form("stage_first", buffers, eager)(buffers, batch, batch.slot_mappings[group], next_token, num_valid)


def stage_chain(
    buffers: DraftBuffers, token: Tensor, block_table: Tensor, block_size: int, *, eager: bool = False
) -> None:
    """Record what the first pass drew, and stage the second: one token for each row of the first.

    token: (n,) integer, what rows 0 .. n - 1 drew; n rows, at least all real ones. -1 is recorded as no draft.
    block_table: (at least n, max_blocks) int32, blocks of the draft's group; a null block stores nothing.
    block_size: tokens of a block.

    A row whose position is `max_model_len` or more stores nothing, its length stays, and what it draws is no draft.

    `ValueError` if n is larger than the buffers or the table.
    """
    _check_chain(buffers, token, block_table)
    _form("stage_chain", buffers, eager)(buffers, token, block_table, block_size)


def advance(
    buffers: DraftBuffers, token: Tensor, block_table: Tensor, block_size: int, *, eager: bool = False
) -> None:
    """Record what a pass of the chain drew, and stage the next one; arguments as for `stage_chain`.

    Also for the last draft, behind which the staged pass is not run; a call after that one records nothing.
    """
    _check_chain(buffers, token, block_table)
    _form("advance", buffers, eager)(buffers, token, block_table, block_size)


def _check_chain(buffers: DraftBuffers, token: Tensor, block_table: Tensor) -> None:
    most = min(buffers.limits.max_num_reqs, block_table.shape[0])
    if token.dim() != 1 or token.shape[0] > most:
        raise ValueError(
            f"token: has shape {tuple(token.shape)}, must be (n,) with at most {buffers.limits.max_num_reqs} rows "
            f"of the buffers and {block_table.shape[0]} of block_table"
        )


def _form(name: str, buffers: DraftBuffers, eager: bool = False) -> Any:
    """The Triton kernel on CUDA; numpy for an eager pass on the host; otherwise torch."""
    if buffers.device.type == "cuda":
        return getattr(import_module("bateleur.eagle.kernels.geometry"), name)
    if eager and buffers.on_host:
        return getattr(_host_geometry, name)
    return _FORMS[name]


def _stage_first(
    buffers: DraftBuffers,
    batch: CommonAttentionMetadata,
    slots_T: Tensor,
    next_n: Tensor,
    num_valid_n: Tensor,
) -> None:
    count, limit = len(next_n), buffers.limits.max_model_len
    starts = batch.query_start_loc.to(torch.int64)
    lengths_R = starts[1:] - starts[:-1]
    live_R = lengths_R > 0
    valid_R, next_R = torch.zeros_like(lengths_R), torch.zeros_like(lengths_R)
    valid_R[:count], next_R[:count] = num_valid_n, next_n
    valid_R = torch.minimum(valid_R.clamp_(min=0), lengths_R)
    last_R = (starts[:-1] + (valid_R - 1).clamp_(min=0)) * live_R

    _put(buffers.query_start_loc, batch.query_start_loc, batch.query_start_loc[-1])
    _put(buffers.seq_lens, batch.seq_lens * live_R)
    _put(buffers.num_computed_tokens, batch.num_computed_tokens * live_R)
    _put(buffers.last_index, last_R)
    buffers.tokens.fill_(_NO_TOKEN)
    buffers.step.zero_()
    if not len(live_R) or not batch.num_tokens:
        _clear(buffers, buffers.input_ids, buffers.positions, buffers.token_positions)
        return

    _put(buffers.token_positions, (batch.positions[last_R] + 2) * live_R)
    index_T = torch.arange(batch.num_tokens, device=buffers.device)
    row_T = torch.searchsorted(starts[1:], index_T, right=True).clamp_(max=len(live_R) - 1)
    valid_T = index_T < (starts[:-1] + valid_R)[row_T]
    shifted_T = batch.input_ids.roll(-1).to(torch.int64)
    ids_T = torch.where(index_T == last_R[row_T], next_R.clamp_(min=0)[row_T], shifted_T)
    _put(buffers.input_ids, ids_T * valid_T)
    _put(buffers.positions, batch.positions.clamp(max=limit - 1) * (index_T < starts[-1]))
    stored_T = valid_T & (batch.positions < limit)
    _put(buffers.slot_mapping, torch.where(stored_T, slots_T, PAD_SLOT), PAD_SLOT)


def _stage_chain(buffers: DraftBuffers, token_n: Tensor, block_table: Tensor, block_size: int) -> None:
    starts = buffers.query_start_loc
    num_rows = (starts[1:] > starts[:-1]).sum()
    index = torch.arange(len(starts), device=buffers.device)
    starts.copy_(torch.minimum(index, num_rows))
    buffers.last_index.copy_(index[:-1] * (index[:-1] < num_rows))
    _clear(buffers, buffers.input_ids, buffers.positions, buffers.seq_lens, buffers.num_computed_tokens)
    _advance(buffers, token_n, block_table, block_size)


def _advance(buffers: DraftBuffers, token_n: Tensor, block_table: Tensor, block_size: int) -> None:
    count, limit = len(token_n), buffers.limits.max_model_len
    live_n = torch.arange(count, device=buffers.device) < buffers.query_start_loc[-1]
    position_n = buffers.token_positions[:count] - 2
    token_n = torch.where(live_n & (position_n < limit), token_n, _NO_TOKEN)
    tokens_nK = buffers.tokens[:count]
    here_K = torch.arange(tokens_nK.shape[1], device=buffers.device) == buffers.step
    tokens_nK.copy_(torch.where(here_K, token_n.unsqueeze(1), tokens_nK))
    buffers.step.add_(1)

    position_n += 1
    held_n = position_n.clamp(max=limit - 1) * live_n
    buffers.token_positions[:count] += live_n
    buffers.input_ids[:count] = token_n.clamp_(min=0)
    buffers.positions[:count] = held_n
    buffers.num_computed_tokens[:count] = held_n
    buffers.seq_lens[:count] = (held_n + 1) * live_n
    block_n = block_table[:count].gather(1, (held_n // block_size).unsqueeze(1)).squeeze(1).to(torch.int64)
    stored_n = live_n & (position_n < limit) & (block_n != NULL_BLOCK)
    slot_n = block_n * block_size + held_n % block_size
    buffers.slot_mapping[:count] = torch.where(stored_n, slot_n, PAD_SLOT)


def _clear(buffers: DraftBuffers, *zeroed: Tensor) -> None:
    """Zero some buffers, and let nothing be stored."""
    for tensor in zeroed:
        tensor.zero_()
    buffers.slot_mapping.fill_(PAD_SLOT)


def _put(buffer: Tensor, values: Tensor, tail: Tensor | int = 0) -> None:
    """Write the leading entries, and `tail` to all behind them."""
    buffer[: len(values)] = values
    buffer[len(values) :] = tail


_FORMS = {"stage_first": _stage_first, "stage_chain": _stage_chain, "advance": _advance}
