"""The Mamba-2 recurrence over prefills by state-space duality (Dao and Gu, 2024).

Chunks are split into tiles of consecutive tokens: matrix products inside a tile, and a recurrence over tiles. With c
the running sum of A * dt in a tile, token i reads token j <= i of its tile with the weight exp(c_i - c_j) (C_i . B_j),
and the state before the tile with the factor exp(c_i). Every exponent is a sum of non-positive numbers.

All tiles are processed in order, so the data of one tile stays in the cache of a core, and there is no padding.

Shapes: T tokens, R rows (requests), H heads, G groups, J = H / G heads per group, P head channels, N state entries, Q
tokens of a tile.
"""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import compute_dtype, load_slots, step_sizes

_TILE = 32
"""Maximum number of tokens of a tile (measured: larger tiles spend more time on decays, smaller ones on states)."""


@operator(mutates=("ssm_state",), like="x", native="mamba2")
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
    """The Mamba-2 recurrence over prefills; row r (a request) starts from the state in state slot read[r].

    For each token and head h, with step = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = h // (H / G):
    S <- exp(A step) S + step x B_g^T, y = S C_g + D x. The state after chunk k is written to ssm_state[chunk_write[k]].

    Args:
        x, dt, B, C: (T, H, P), (T, H), (T, G, N) and (T, G, N); dt is raw.
        A, D, dt_bias: (H,) float32; A is negative.
        ssm_state: (slots, H, P, N), updated in place.
        query_start_loc: (R + 1,) int32.
        chunk_start_loc: (chunks + 1,) int32 first token of each chunk. Chunks never cross rows.
        chunk_row: (chunks,) int32 row of each chunk.
        row_chunk_loc: (R + 1,) int32 first chunk of each row.
        max_chunks_per_row, chunk_size: maximum number of chunks of a row, and of tokens of a chunk.
        read, chunk_write: (R,) and (chunks,) int64 slots of initial states, and for states after chunks (0: none).
        dt_min, dt_max: limits of the step size.

    Returns y (T, H, P). `PrefillChunks` has the chunk tensors.
    """
    del query_start_loc, max_chunks_per_row, chunk_size
    bounds, writes, ends = chunk_start_loc.tolist(), chunk_write.tolist(), row_chunk_loc.tolist()
    dtype = compute_dtype(x)
    xs, B, C = x.to(dtype), B.to(dtype), C.to(dtype)
    step = step_sizes(dt, dt_bias, (dt_min, dt_max), dtype)
    decay = step * A
    u = xs * step[..., None]
    y = torch.empty_like(u)
    y[bounds[-1] :].zero_()
    lower = torch.ones(_TILE, _TILE, dtype=dtype, device=x.device).tril_()
    carry = load_slots(ssm_state, read, dtype)
    for row, state in enumerate(carry):
        for k in range(ends[row], ends[row + 1]):
            lo, hi = bounds[k], bounds[k + 1]
            for at in range(lo, hi, _TILE):
                tile = slice(at, min(at + _TILE, hi))
                outputs = _run_tile(state, decay[tile], u[tile], B[tile], C[tile], lower)
                torch.addcmul(outputs, xs[tile], D[:, None], out=y[tile])
            if writes[k]:
                ssm_state[writes[k]].copy_(state)
    return y.to(x.dtype)


def _run_tile(state: Tensor, decay: Tensor, u: Tensor, B: Tensor, C: Tensor, lower: Tensor) -> Tensor:
    """Return the outputs (Q, H heads, P channels) of Q tokens without D x; update `state` (H, P, N) in place.

    decay (Q, H), u = dt * x (Q, H, P), B and C (Q, G, N), lower (at least (Q, Q)): lower triangle of ones.
    """
    num_tokens, heads = u.shape[:2]
    groups, size = B.shape[1:]
    sums = torch.cumsum(decay, 0)  # (Q, H)
    by_head = sums.T.contiguous()
    # Above the diagonal the difference is positive, and its exponential could overflow.
    seen = (by_head[:, :, None] - by_head[:, None, :]).clamp_(max=0.0).exp_()
    scores = (C.transpose(0, 1) @ B.permute(1, 2, 0)).mul_(lower[:num_tokens, :num_tokens])  # (G, Q, Q)
    seen.unflatten(0, (groups, -1)).mul_(scores[:, None])
    y = seen @ u.transpose(0, 1)  # (H, Q, P)
    reached = C.transpose(0, 1)[:, None] * torch.exp(by_head).view(groups, -1, num_tokens, 1)
    y.baddbmm_(reached.view(heads, num_tokens, size), state.mT)
    left = u * torch.exp(sums[-1] - sums)[..., None]
    state.mul_(torch.exp(sums[-1])[:, None, None])
    added = left.view(num_tokens, groups, -1).permute(1, 2, 0)  # (G, J*P, Q)
    state.view(groups, -1, size).baddbmm_(added, B.transpose(0, 1))
    return y.transpose(0, 1)
