"""The recurrence over prompts by state-space duality (Dao and Gu, 2024).

It is matrix products inside pieces of chunks, and a recurrence over pieces. With c the running sum of A * dt inside a
piece, token i sees token j <= i of its piece through exp(c_i - c_j) (C_i . B_j), and everything before the piece
through exp(c_i) times the state that enters it. Every exponent is a sum of non-positive numbers.

Pieces follow each other, those of all rows: what one needs stays in a core's cache, and nothing is padded. That takes a
third of the time of all chunks side by side, and a tenth where rows are short.

Shapes: T tokens, R rows, H heads, G groups, J = H / G heads per group, P head channels, N state entries, Q tokens of a
piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, load, steps

_PIECE = 32
"""Tokens taken at once at most: with more of them decays of pairs take longer, with fewer the states between them."""


@operator(mutates=("ssm_state",), like="x", native="update")
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
    """The Mamba-2 recurrence over prompts, each continuing the state in its `read` slot, by chunks.

    For each token and head, with step = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = h // (H / G):
    S <- exp(A step) S + step x B_g^T, y = S C_g + D x. The S after chunk k goes to
    ssm_state[chunk_write[k]]: 0 for a chunk whose state is not kept; a row's last chunk leaves its final state.

    x (T, H, P), dt (T, H) raw, A (H,) float32 and negative, B and C (T, G, N), D and dt_bias (H,), read (R,),
    chunk_write (chunks,).
    Chunks hold at most chunk_size tokens and never cross rows: chunk k is tokens chunk_start_loc[k] to
    chunk_start_loc[k + 1] of row chunk_row[k], row r has chunks row_chunk_loc[r] to row_chunk_loc[r + 1] and at most
    max_chunks_per_row; all int32 on the device, as `MambaMetadataBuilder` makes them. Returns y (T, H, P).
    """
    del query_start_loc, max_chunks_per_row, chunk_size
    bounds, writes, ends = chunk_start_loc.tolist(), chunk_write.tolist(), row_chunk_loc.tolist()
    dtype = compute(x)
    xs, B, C = x.to(dtype), B.to(dtype), C.to(dtype)
    step = steps(dt, dt_bias, (dt_min, dt_max), dtype)
    decay = step * A
    u = xs * step[..., None]
    y = torch.empty_like(u)
    y[bounds[-1] :].zero_()
    lower = torch.ones(_PIECE, _PIECE, dtype=dtype, device=x.device).tril_()
    carry = load(ssm_state, read, dtype)
    for row, state in enumerate(carry):
        for k in range(ends[row], ends[row + 1]):
            lo, hi = bounds[k], bounds[k + 1]
            for at in range(lo, hi, _PIECE):
                part = slice(at, min(at + _PIECE, hi))
                seen = _advance(state, decay[part], u[part], B[part], C[part], lower)
                torch.addcmul(seen, xs[part], D[:, None], out=y[part])
            if writes[k]:
                ssm_state[writes[k]].copy_(state)
    return y.to(x.dtype)


def _advance(state: Tensor, decay: Tensor, u: Tensor, B: Tensor, C: Tensor, lower: Tensor) -> Tensor:
    """Take Q tokens at once: their outputs (Q, H, P), but for D x; `state` (H, P, N) becomes that behind them.

    decay (Q, H), u (Q, H, P), B and C (Q, G, N), lower at least (Q, Q): ones up to the diagonal.
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
