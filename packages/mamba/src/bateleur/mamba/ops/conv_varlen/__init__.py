"""The causal convolution of prompts: row by row, each behind its initial window."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import activate, compute, load, slide


@operator(mutates=("conv_state", "live"), like="x", native="conv")
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
    keep, dtype = weight.shape[1] - 1, compute(x)
    taps = weight.to(dtype).t().contiguous().t()  # a tap's weights side by side: a third of the time
    starts, lines = query_start_loc.tolist(), []
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    y[starts[-1] :].zero_()
    for row, window in enumerate(load(conv_state[:, :keep], read, dtype)):
        tokens = slice(starts[row], starts[row + 1])
        lines.append(torch.cat((window, x[tokens].to(dtype))))
        slide(lines[row], taps, bias, 0, out=y[tokens])
    chunks = zip(chunk_write.tolist(), chunk_row.tolist(), chunk_start_loc.tolist()[1:], strict=True)
    for slot, row, end in chunks:
        if slot:
            conv_state[slot, :keep] = lines[row][end - starts[row] :][:keep]
    if live is not None and live_write is not None:
        for slot, line in zip(live_write.tolist(), lines, strict=True):
            if slot and len(line) > keep:
                live[slot, :keep] = line[len(line) - keep :]
    return activate(y, activation).to(x.dtype)
