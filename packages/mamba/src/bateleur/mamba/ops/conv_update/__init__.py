"""The causal convolution of few tokens a row.

Shapes: T tokens, R rows, C conv channels, W taps, L = W - 1, M tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import (
    activate,
    all_long,
    compute,
    load,
    neighbours,
    pad_rows,
    query_lens,
    slide,
    store,
    unpad,
)


def _windows(conv_state: Tensor, read: Tensor, offset: Tensor, keep: int, dtype: torch.dtype) -> Tensor:
    """The `keep` entries from `offset` on of each row's slot, (R, L, C)."""
    window = load(conv_state, read, dtype)
    if conv_state.shape[1] == keep:
        return window
    at = offset[:, None] + torch.arange(keep, device=conv_state.device)
    return window.gather(1, at[:, :, None].expand(-1, -1, window.shape[2]))


def _own(
    conv_state: Tensor, read: Tensor, write: Tensor, offset: Tensor, keep: int, dtype: torch.dtype
) -> Tensor | None:
    """A view of the windows, (R, L, C), where rows own neighbouring slots and have nothing rejected in them."""
    own = neighbours(conv_state, read, write, dtype)
    if own is None or conv_state.shape[1] == keep:
        return own
    return None if offset.numpy().any() else own[:, :keep]


@operator(mutates=("conv_state",), like="x", native="conv")
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
    """Depthwise causal convolution of 1 to 1 + K tokens per row, of which a suffix may be rejected later.

    x, weight, bias and activation as for `causal_conv1d_varlen`, read and write (R,). The initial window is
    conv_state[read, offset : offset + W - 1], offset (R,) being the number of tokens accepted by the previous step
    minus one, and a row of q tokens leaves all but the oldest of its window and tokens in
    conv_state[write, : W - 2 + q]; entries behind them are unspecified. max_query_len bounds q.

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
    """
    keep, dtype = weight.shape[1] - 1, compute(x)
    if x.shape[0] == 0 or read.shape[0] == 0:
        return torch.zeros_like(x)
    if max_query_len == 1 and x.shape[0] == read.shape[0]:
        own = _own(conv_state, read, write, offset, keep, dtype)
        window = _windows(conv_state, read, offset, keep, dtype) if own is None else own
        full = torch.cat([window, x[:, None].to(dtype)], 1)
        if own is None:
            store(conv_state[:, :keep], write, full[:, 1:])
        else:
            own.copy_(full[:, 1:])
        y = (full * weight.T.to(dtype).contiguous()).sum(1)
        if bias is not None:
            y += bias
        return activate(y, activation).to(x.dtype)
    window = _windows(conv_state, read, offset, keep, dtype)
    if all_long(query_start_loc, max_query_len, x.shape[0]):
        full = torch.cat([window, x.view(len(window), max_query_len, -1).to(dtype)], 1)
        store(conv_state[:, : keep - 1 + max_query_len], write, full[:, 1:])
        return activate(slide(full, weight, bias, 1), activation).flatten(0, 1).to(x.dtype)
    tokens, place = pad_rows(query_start_loc, max_query_len, x.shape[0])
    full = torch.cat([window, x[tokens].to(dtype)], 1)
    live_write = torch.where(query_lens(query_start_loc) > 0, write, 0)
    store(conv_state[:, : keep - 1 + max_query_len], live_write, full[:, 1:])
    y = activate(slide(full, weight, bias, 1), activation)
    return unpad(y.flatten(0, 1), place.view(-1), x)
