"""The causal convolution of prompts: all rows in one line, each behind its initial window."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import activate, compute, load, query_lens, slide, store_lines


@operator(mutates=("conv_state", "live"), like="x")
def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    live: Tensor | None,
    query_start_loc: Tensor,
    read: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    chunk_write: Tensor,
    live_write: Tensor | None,
    activation: str,
) -> Tensor:
    """Depthwise causal convolution of prompts, each continuing the window in its `read` slot.

    x (T, C), weight (C, W), bias (C,) or None, read (R,), chunks as for `ssd_scan_varlen`; activation is "silu" or
    "none". Leaves the W - 1 raw inputs up to the end of chunk k in conv_state[chunk_write[k], : W - 1], and those up to
    the end of row r in live[live_write[r], : W - 1], where live is (live rows, W - 1 + K, C) with null row 0, or None.
    Where a row has fewer inputs, the end of its initial window stands before them. Further entries of what is written
    are not touched. Returns (T, C).

    Raises ValueError for an unknown activation.
    """
    num_tokens, num_rows, keep = x.shape[0], read.shape[0], weight.shape[1] - 1
    if num_tokens == 0 or num_rows == 0:
        return torch.empty_like(x)
    starts = query_start_loc.to(torch.int64)
    rows = torch.arange(num_rows, device=x.device)
    taps = torch.arange(keep, device=x.device)
    token = torch.arange(num_tokens, device=x.device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=num_rows - 1)
    window_at = (starts[:-1] + rows * keep)[:, None] + taps
    line = x.new_empty((num_tokens + num_rows * keep, x.shape[1]), dtype=compute(x))
    line.index_copy_(0, window_at.view(-1), load(conv_state[:, :keep], read, line.dtype).flatten(0, 1))
    line.index_copy_(0, token + (row + 1) * keep, x.to(line.dtype))
    # The L inputs before token t of row r begin at t + r * L. Before a row's first tokens lies its initial window, and
    # never the row before.
    store_lines(conv_state[:, :keep], chunk_write, line, chunk_start_loc[1:] + chunk_row * keep)
    if live is not None and live_write is not None:
        final = torch.where(query_lens(starts) > 0, live_write, 0)
        store_lines(live[:, :keep], final, line, starts[1:] + rows * keep)
    y = slide(line, weight, bias, 0).index_select(0, token + row * keep)
    return activate(y, activation).to(x.dtype)
