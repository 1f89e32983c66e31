"""The recurrence over prompts by state-space duality (Dao and Gu, 2024).

It is matrix products inside chunks, and a short recurrence over chunks. With c the running sum of A * dt inside a
chunk, token i sees token j <= i of its chunk through exp(c_i - c_j) (C_i . B_j), and everything before the chunk
through exp(c_i) times the state that enters it. Every exponent is a sum of non-positive numbers. Chunks are padded to
Q tokens with dt = 0.

Shapes: T tokens, R rows, H heads, G groups, J = H / G heads per group, P head channels, N state entries, K chunks, Q
tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, load, pad_chunks, steps, store, unpad, written

_SCORE_ENTRIES = 1 << 20
"""Entries of the largest (chunks, H, Q, Q) block of decays held at a time: 4 MiB of float32, about a cache."""


@operator(mutates=("ssm_state",), like="x")
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
    del query_start_loc
    num_tokens, num_chunks, dtype = x.shape[0], chunk_row.shape[0], compute(x)
    if num_tokens == 0 or num_chunks == 0:
        return torch.zeros_like(x)
    tokens, live = pad_chunks(chunk_start_loc, chunk_size, num_tokens)
    step = torch.where(live[:, :, None], steps(dt, dt_bias, (dt_min, dt_max), dtype)[tokens], 0)
    heads, channels, groups, size = x.shape[1], x.shape[2], B.shape[1], B.shape[2]
    total = torch.cumsum(step * A, 1)  # (K, Q, H)
    xs = x[tokens].to(dtype)  # (K, Q, H, P)
    u = xs * step[..., None]
    Bs = B[tokens].to(dtype).transpose(1, 2)  # (K, G, Q, N)
    Cs = C[tokens].to(dtype).transpose(1, 2)
    # What each chunk adds to the state: sum_j exp(c_last - c_j) u_j B_j^T, one product per group.
    weighted = u * torch.exp(total[:, -1:] - total)[..., None]
    added = weighted.view(num_chunks, chunk_size, groups, -1).permute(0, 2, 3, 1) @ Bs  # (K, G, J*P, N)
    carry = load(ssm_state, read, dtype)
    added = added.reshape(-1, heads, channels, size)
    entering, final = _pass_states(added, total[:, -1], carry, row_chunk_loc, max_chunks_per_row)
    y = _within_chunks(total, u, Bs, Cs)
    seen = Cs @ entering.view(num_chunks, groups, -1, size).mT  # (K, G, Q, J*P)
    seen = seen.transpose(1, 2).reshape(u.shape)
    y.addcmul_(seen, torch.exp(total)[..., None])
    place = torch.where(live, tokens, num_tokens).view(-1)
    _store_after_chunks(ssm_state, chunk_write, row_chunk_loc, entering, final)
    y.addcmul_(xs, D[:, None])
    return unpad(y.flatten(0, 1), place, x)


def _within_chunks(total: Tensor, u: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Outputs due to the chunk's own tokens, (K, Q, H, P).

    total (K, Q, H), u (K, Q, H, P), B and C (K, G, Q, N). Few chunks at a time, for the decays take H * Q * Q each.
    """
    num_chunks, chunk_size, heads, _ = u.shape
    groups = B.shape[1]
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=u.device).triu_(1)
    y = torch.empty_like(u)
    at_once = max(1, _SCORE_ENTRIES // (heads * chunk_size * chunk_size))
    for lo in range(0, num_chunks, at_once):
        part = slice(lo, lo + at_once)
        sums = total[part].transpose(1, 2)  # (k, H, Q)
        # Mask before the exponential: above the diagonal the difference is positive, and could overflow.
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill_(future, float("-inf")).exp_()
        scores = C[part] @ B[part].mT  # (k, G, Q, Q)
        decay.unflatten(1, (groups, -1)).mul_(scores[:, :, None])
        y[part] = (decay @ u[part].transpose(1, 2)).transpose(1, 2)
    return y


def _pass_states(
    added: Tensor, log_decay: Tensor, carry: Tensor, row_chunk_loc: Tensor, max_chunks_per_row: int
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over chunks for all rows at once: the state that enters each chunk, and each row's last.

    added (K, H, P, N), log_decay (K, H) of whole chunks, carry (R, H, P, N).
    """
    num_chunks = added.shape[0]
    # Two entries more: one that adds nothing, for rows that have ended, and one that takes what they write.
    padded = torch.cat([added, added.new_zeros((2, *added.shape[1:]))])
    factor = F.pad(torch.exp(log_decay), (0, 0, 0, 1), value=1.0)
    first, end = row_chunk_loc[:-1].to(torch.int64), row_chunk_loc[1:].to(torch.int64)
    for rank in range(max_chunks_per_row):
        chunk = torch.where(first + rank < end, first + rank, num_chunks)
        after = padded[chunk].addcmul_(carry, factor[chunk][:, :, None, None])
        padded.index_copy_(0, torch.where(chunk < num_chunks, chunk, num_chunks + 1), carry)
        carry = after
    return padded[:num_chunks], carry


def _store_after_chunks(
    ssm_state: Tensor, chunk_write: Tensor, row_chunk_loc: Tensor, entering: Tensor, final: Tensor
) -> None:
    """Keep the states after some chunks: what enters the next one, or a row's last.

    entering (K, H, P, N), final (R, H, P, N).
    """
    first, end = row_chunk_loc[:-1].to(torch.int64), row_chunk_loc[1:].to(torch.int64)
    after = F.pad(chunk_write, (1, 0))  # by number of chunks done
    store(ssm_state, torch.where(first < end, after[end], 0), final)
    interior, states = after.index_fill_(0, end, 0)[1:-1], entering[1:]
    kept = written(interior)
    if kept is not None:
        interior, states = interior[kept], states[kept]
    store(ssm_state, interior, states)
