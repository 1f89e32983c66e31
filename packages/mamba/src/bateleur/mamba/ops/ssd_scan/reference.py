"""The specification: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared.reference import advance, compute, kept_pages, load, show, step_size


def ssd_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    query_start_loc: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    row_chunk_loc: Tensor,
    max_chunks_per_row: int,
    chunk_size: int,
    read: Tensor,
    chunk_write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The recurrence over all tokens of each row; chunks only say which states to keep."""
    del chunk_row, row_chunk_loc, max_chunks_per_row, chunk_size
    pages = kept_pages(chunk_start_loc, chunk_write)
    y = torch.zeros_like(x)
    for row, state in enumerate(load(ssm_state, read, compute(x))):
        for token in range(int(query_start_loc[row]), int(query_start_loc[row + 1])):
            step = step_size(dt[token], dt_bias, (dt_min, dt_max), state.dtype)
            state = advance(state, x[token], step, A, B[token])
            y[token] = show(state, x[token], C[token], D).to(x.dtype)
            if slot := pages.get(token + 1):
                ssm_state[slot] = state.to(ssm_state.dtype)
    return y
