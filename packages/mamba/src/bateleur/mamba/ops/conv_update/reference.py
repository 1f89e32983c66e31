"""The specification: a window that begins anywhere in its slot."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared.reference import compute, convolve, load


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    offset: Tensor,
    write: Tensor,
    activation: str,
) -> Tensor:
    """Start from the window at `offset`, and store all that a later offset may ask for."""
    del max_query_len
    keep = weight.shape[1] - 1
    y = torch.zeros_like(x)
    for row, entries in enumerate(load(conv_state, read, compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        window = entries[int(offset[row]) :][:keep]
        for token in range(start, end):
            window = torch.cat([window, x[token : token + 1].to(window.dtype)])
            y[token] = convolve(window[-keep - 1 :], weight, bias, activation)
        if end > start and int(write[row]):
            conv_state[int(write[row]), : keep - 1 + end - start] = window[1:].to(conv_state.dtype)
    return y
