"""The specification: the whole ring again for each token."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared.reference import compute, load, replay, show, step_size


def replay_update(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Append each token to the ring, and run the recurrence from the slot over all entries up to it."""
    del max_query_len
    y = torch.zeros_like(x)
    for row, base in enumerate(load(ssm_state, slot, compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        ring, length = int(ring_row[row]), int(ring_len[row])
        if ring == 0:
            continue
        for token in range(start, end):
            at = (int(ring_start[row]) + length + token - start) % ring_x.shape[1]
            ring_x[ring, at] = x[token].to(ring_x.dtype)
            ring_dt[ring, at] = step_size(dt[token], dt_bias, (dt_min, dt_max), base.dtype).to(ring_dt.dtype)
            ring_B[ring, at] = B[token].to(ring_B.dtype)
            rings = (ring_x[ring], ring_dt[ring], ring_B[ring])
            state = replay(base, rings, int(ring_start[row]), length + token - start + 1, A)
            y[token] = show(state, x[token], C[token], D).to(x.dtype)
    return y
