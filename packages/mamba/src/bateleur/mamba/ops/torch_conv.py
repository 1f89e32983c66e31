"""The causal convolution in vectorised torch: no loop over requests, no synchronisation with the device.

Shapes: T tokens, R rows, C conv channels, W taps, L = W - 1, M tokens of the longest row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops._rows import (
    compute,
    load,
    neighbours,
    pad_rows,
    query_lens,
    store,
    store_lines,
    unpad,
)


def _activate(y: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(y, inplace=True)
    if activation == "none":
        return y
    raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'none'")


def _slide(full: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    """Convolve along `dim` of (..., C): one output for each run of W inputs."""
    width = weight.shape[1]
    count = full.shape[dim] - width + 1
    y = full.narrow(dim, 0, count) * weight[:, 0].to(full.dtype)
    for tap in range(1, width):
        y.addcmul_(full.narrow(dim, tap, count), weight[:, tap].to(full.dtype))
    return y if bias is None else y.add_(bias)


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
    """Lay the rows out one after the other, each behind its initial window, and convolve the whole line at once."""
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
    y = _slide(line, weight, bias, 0).index_select(0, token + row * keep)
    return _activate(y, activation).to(x.dtype)


def _windows(conv_state: Tensor, read: Tensor, offset: Tensor, keep: int, dtype: torch.dtype) -> Tensor:
    """The `keep` entries from `offset` on of each row's slot, (R, L, C)."""
    window = load(conv_state, read, dtype)
    if conv_state.shape[1] == keep:
        return window
    at = offset[:, None] + torch.arange(keep, device=conv_state.device)
    return window.gather(1, at[:, :, None].expand(-1, -1, window.shape[2]))


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
    """Slide over the window at `offset` and the new tokens, and store all but the oldest input."""
    keep, dtype = weight.shape[1] - 1, compute(x)
    if x.shape[0] == 0 or read.shape[0] == 0:
        return torch.zeros_like(x)
    if max_query_len == 1 and x.shape[0] == read.shape[0]:
        own = neighbours(conv_state, read, write, dtype) if conv_state.shape[1] == keep else None
        window = _windows(conv_state, read, offset, keep, dtype) if own is None else own
        full = torch.cat([window, x[:, None].to(dtype)], 1)
        if own is None:
            store(conv_state[:, :keep], write, full[:, 1:])
        else:
            own.copy_(full[:, 1:])
        y = (full * weight.T.to(dtype).contiguous()).sum(1)
        if bias is not None:
            y += bias
        return _activate(y, activation).to(x.dtype)
    window = _windows(conv_state, read, offset, keep, dtype)
    tokens, place = pad_rows(query_start_loc, max_query_len, x.shape[0])
    full = torch.cat([window, x[tokens].to(dtype)], 1)
    live_write = torch.where(query_lens(query_start_loc) > 0, write, 0)
    store(conv_state[:, : keep - 1 + max_query_len], live_write, full[:, 1:])
    y = _activate(_slide(full, weight, bias, 1), activation)
    return unpad(y.flatten(0, 1), place.view(-1), x)
