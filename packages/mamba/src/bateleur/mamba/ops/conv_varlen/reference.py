"""The specification: a window that slides over each row."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared.reference import compute, convolve, kept_pages, load


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
    """Token by token: append the raw input to the window, convolve its last W entries."""
    del chunk_row
    keep = weight.shape[1] - 1
    pages = kept_pages(chunk_start_loc, chunk_write)
    y = torch.zeros_like(x)
    for row, window in enumerate(load(conv_state[:, :keep], read, compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        for token in range(start, end):
            window = torch.cat([window[-keep:], x[token : token + 1].to(window.dtype)])
            y[token] = convolve(window, weight, bias, activation)
            if slot := pages.get(token + 1):
                conv_state[slot, :keep] = window[1:].to(conv_state.dtype)
        if live is not None and live_write is not None and end > start and int(live_write[row]):
            live[int(live_write[row]), :keep] = window[1:].to(live.dtype)
    return y
