"""The specification: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared.reference import advance, compute, load, show, step_size


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The recurrence, with the state after token i of a row stored in slot write[row, i]."""
    del max_query_len
    y = torch.zeros_like(x)
    for row, state in enumerate(load(ssm_state, read, compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        for token in range(start, end):
            step = step_size(dt[token], dt_bias, (dt_min, dt_max), state.dtype)
            state = advance(state, x[token], step, A, B[token])
            y[token] = show(state, x[token], C[token], D).to(x.dtype)
            if slot := int(write[row, token - start]):
                ssm_state[slot] = state.to(ssm_state.dtype)
    return y
