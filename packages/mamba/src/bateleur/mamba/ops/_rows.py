"""What the vectorised operators share: slots of a state, rows of a flat batch.

Slot 0 is scratch: it takes the writes that are dropped, and it is set to zero before every read, which costs one
slot of traffic where masking would cost one per row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FEW_ENTRIES = 4096
"""Writes of up to this many entries are too small for the wide copy on CPU to pay."""


def compute(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def load(state: Tensor, read: Tensor, dtype: torch.dtype) -> Tensor:
    state[0].zero_()
    return state.index_select(0, read).to(dtype)


def neighbours(state: Tensor, read: Tensor, write: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A view of the slots if the rows own neighbouring ones, in order, and keep them; else None.

    On CPU, where looking costs a few microseconds, the update then works in place: at 64 rows of 128 KiB that saves
    copying 16 MiB. On a GPU looking would be a synchronisation, and the gather is not what costs.
    """
    if state.device.type != "cpu" or state.dtype != dtype:
        return None
    slots = read.numpy()
    first = int(slots[0])
    if first == 0 or slots[-1] - first != len(slots) - 1:
        return None
    if (slots != np.arange(first, first + len(slots))).any() or not torch.equal(read, write):
        return None
    return state[first : first + len(slots)]


def store(state: Tensor, write: Tensor, values: Tensor) -> None:
    """Scatter whole slots; duplicates are allowed in slot 0 only."""
    values = values.to(state.dtype)
    wide = state.device.type == "cpu" and values.numel() > _FEW_ENTRIES
    if wide and _in_16_bytes(state) and _in_16_bytes(values):
        # The scatter moves one element at a time on CPU: 16-byte elements make it six times as fast (30 us, not 200,
        # for 8 slots of 128 KiB), and copy the same bits.
        state, values = state.view(torch.complex128), values.view(torch.complex128)
    state.index_put_((write,), values)


def _in_16_bytes(x: Tensor) -> bool:
    """Whether `x` can be viewed as 16-byte elements."""
    ratio = 16 // x.element_size()
    outer = x.stride()[:-1]
    return x.stride(-1) == 1 and not (
        x.shape[-1] % ratio or x.storage_offset() % ratio or any(s % ratio for s in outer)
    )


def query_lens(query_start_loc: Tensor) -> Tensor:
    return query_start_loc[1:] - query_start_loc[:-1]


def pad_rows(query_start_loc: Tensor, max_query_len: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Two (R, M) maps: the token to read (some token where a row has ended), and to write (T where it has)."""
    starts = query_start_loc.to(torch.int64)
    tokens = starts[:-1, None] + torch.arange(max_query_len, device=starts.device)
    live = tokens < starts[1:, None]
    return tokens.clamp(max=num_tokens - 1), torch.where(live, tokens, num_tokens)


def unpad(y: Tensor, place: Tensor, like: Tensor) -> Tensor:
    """Scatter (entries, ...) to tokens; tokens of no row get zeros."""
    out = like.new_zeros((like.shape[0] + 1, *like.shape[1:]))
    return out.index_copy_(0, place, y.to(like.dtype))[:-1]
