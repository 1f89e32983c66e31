"""The delta rules over prefills, in tiles of consecutive tokens of a chunk.

Within a tile the corrected values are the solution of a unit lower triangular system (the WY form: Bischof and Van
Loan, 1987; for delta rules, Yang et al., 2024). With c the running sum of g in the tile, and S the state before the
tile:

    u_i + beta_i sum_{j<i} (e^{c_i - c_j} k_i . k_j) u_j = beta_i (v_i - S (e^{c_i} k_i))
    o_i = S (e^{c_i} q_i) + sum_{j<=i} (e^{c_i - c_j} q_i . k_j) u_j

Everything is a matrix product, and every exponent is a sum of non-positive numbers. The tiles of a row are processed in
order, and all rows in parallel, so the memory is that of one tile per row. Padding has g = 0 and beta = 0.

Shapes: as in `shared.delta_rule`, and N tiles of the longest row, Q tokens of a tile, B rows with an n-th tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import cached_on_cpu, compute_dtype, load_slots, rows_with_slot, store_slots
from bateleur.mamba.ops.shared.delta_rule import gates, of_heads, units

_TILE = 32
"""Maximum number of tokens of a tile, a power of two. 64 tokens take the same time on a CPU, and twice the memory."""
_BLOCK = 4
"""Number of tokens for which decays by channel are computed pair by pair."""


class _Tiles(NamedTuple):
    """Token indices of the tiles of each row; the first dimension is the index of the tile in its row."""

    tokens: Tensor
    """(N, R, Q) token to read; any token of the batch as padding."""
    real: Tensor
    """(N, R, Q) bool, not padding."""
    targets: Tensor
    """(N, R, Q) token to write; T as padding."""
    write: Tensor
    """(N, R) slot for the state after the tile; 0 if it is not kept."""
    rows: tuple[Tensor | None, ...]
    """N tensors of the rows that have such a tile; None stands for all rows, or for unknown (on a GPU)."""


@cached_on_cpu
def _tiles(
    chunk_start_loc: Tensor,
    row_chunk_loc: Tensor,
    chunk_write: Tensor,
    max_chunks: int,
    chunk_size: int,
    tile: int,
    num_tokens: int,
) -> _Tiles:
    """Split chunks into tiles of `tile` tokens (a power of two), or of fewer if all chunks are shorter."""
    device, num_chunks = chunk_write.device, chunk_write.shape[0]
    if device.type == "cpu":
        chunk_size = min(chunk_size, int(chunk_start_loc.diff().max()))
    length = min(tile, 1 << (chunk_size - 1).bit_length())
    parts = -(-chunk_size // length)
    chunk_tokens, chunk_real = _pad_chunks(chunk_start_loc, parts * length, num_tokens)
    rank = torch.arange(max_chunks * parts, device=device).unsqueeze(1)
    chunk = row_chunk_loc[:-1].long() + rank // parts
    there = chunk < row_chunk_loc[1:]
    chunk = torch.where(there, chunk, 0)
    at = chunk * parts + rank % parts
    tokens = chunk_tokens.view(num_chunks * parts, length)[at]
    real = chunk_real.view(num_chunks * parts, length)[at] & there.unsqueeze(2)
    write = torch.where(there & (rank % parts == parts - 1), chunk_write[chunk], 0)
    rows = tuple(rows_with_slot(some) for some in real.any(2))
    return _Tiles(tokens, real, torch.where(real, tokens, num_tokens), write, rows)


def _pad_chunks(chunk_start_loc: Tensor, chunk_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return token indices (chunks, chunk_size), padded with the chunk's first token, and a mask of real tokens."""
    bounds = chunk_start_loc.to(torch.int64)
    lane = torch.arange(chunk_size, device=bounds.device)
    real = lane < (bounds[1:] - bounds[:-1])[:, None]
    return (bounds[:-1, None] + torch.where(real, lane, 0)).clamp_(max=num_tokens - 1), real


@operator(mutates=("state",), like="v")
def delta_scan_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    row_chunk_loc: Tensor,
    max_chunks_per_row: int,
    chunk_size: int,
    read: Tensor,
    chunk_write: Tensor,
    beta_scale: float,
) -> Tensor:
    """A delta rule over prefills; row r (a request) starts from the state in state slot read[r].

    For each token and value head h, with key head h // (H / G), q and k normalized to length 1, q scaled by Dk ** -0.5,
    g = A softplus(a + dt_bias) and beta = beta_scale sigmoid(b):
    S <- exp(g) S, u = beta (v - S k), S <- S + u k^T, o = S q, where S is (Dv, Dk).

    Args:
        q, k, v: (T, G, Dk), (T, G, Dk) and (T, H, Dv); q and k before normalization.
        a, b: (T, H) each, with dt_bias (H,); or a (T, H, Dk) with dt_bias (H, Dk).
        A: (H,) float32, negative.
        state: (slots, H, Dv, Dk), updated in place.
        beta_scale: 1, or 2 to allow negative eigenvalues.
        The others: as in `ssd_scan_varlen`.

    Returns o (T, H, Dv).
    """
    del query_start_loc
    num_tokens, dtype = v.shape[0], compute_dtype(v)
    o = v.new_zeros((num_tokens + 1, *v.shape[1:]))
    if num_tokens == 0 or chunk_row.shape[0] == 0:
        return o[:-1]
    chunks = (chunk_start_loc, row_chunk_loc, chunk_write, max_chunks_per_row, chunk_size)
    tiles = _tiles(*chunks, _TILE, num_tokens)
    g, beta = gates(a, b, A, dt_bias, beta_scale, dtype)
    carry = load_slots(state, read, dtype)
    for tokens, real, targets, write, rows in zip(*tiles, strict=True):
        if rows is None or len(rows):
            which = slice(None) if rows is None else rows
            at, dead = tokens[which], ~real[which].unsqueeze(2).unsqueeze(3)
            kq = units(q[at].flatten(0, 1), k[at].flatten(0, 1), k.shape[1], dtype)
            kq = kq.unflatten(0, at.shape).permute(0, 2, 3, 1, 4)  # (B, G, 2, Q, Dk); others (B, H, Q, ...)
            total, strength = (x[at].masked_fill_(dead, 0).transpose(1, 2) for x in (g, beta))
            states = carry[which]
            vs = v[at].to(dtype).transpose(1, 2)
            values = _run_tile(states, kq.contiguous(), vs, total.cumsum(2), strength)
            if rows is not None:
                carry.index_copy_(0, rows, states)
            o.index_copy_(0, targets[which].view(-1), values.transpose(1, 2).flatten(0, 1).to(o.dtype))
        kept = rows_with_slot(write)
        store_slots(state, *((write, carry) if kept is None else (write[kept], carry[kept])))
    return o[:-1]


def _run_tile(state: Tensor, kq: Tensor, v: Tensor, total: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of a tile of Q tokens of B requests and H heads; update state (B, H, Dv, Dk) in place.

    kq (B, key heads, 2, Q, Dk); v and result (B, H, Q, Dv); total (B, H, Q, 1 or Dk) log decay sums; beta (B, H, Q, 1).
    """
    num_rows, heads, lanes, size = state.shape
    flat, length = state.view(-1, lanes, size), kq.shape[3]
    scores = _scores_by_channel(of_heads(kq, heads), total) if total.shape[3] > 1 else _scores(kq, total)
    kq = of_heads(kq, heads)
    probes = (kq * total.exp().unsqueeze(2)).view(-1, 2 * length, size)
    seen = torch.bmm(probes, flat.mT).view(num_rows, heads, 2, length, lanes)
    of_keys, of_queries = scores.unbind(2)
    one = torch.eye(length, dtype=v.dtype, device=v.device).expand_as(of_keys)
    # Inverse and product are twice as fast on a CPU as solving for Dv columns.
    inverse = torch.linalg.solve_triangular(of_keys * beta, one, upper=False, unitriangular=True)
    u = torch.matmul(inverse, torch.sub(v, seen.select(2, 0)).mul_(beta)).flatten(0, 1)
    o = torch.baddbmm(seen.select(2, 1).flatten(0, 1), of_queries.flatten(0, 1), u)
    last = total.narrow(2, length - 1, 1)
    kept = kq.select(2, 0) * (last - total).exp_()
    state.mul_(last.exp())
    flat.baddbmm_(u.mT, kept.view(-1, length, size))
    return o.view(num_rows, heads, length, lanes)


def _scores(kq: Tensor, total: Tensor) -> Tensor:
    """Return a tile's decayed products of keys and queries with keys, (B, heads, 2, Q, Q); one decay per head."""
    num_rows, groups, _, length, _ = kq.shape
    # Mask before the exponential: above the diagonal the difference is positive, and could overflow.
    left = (total - total.mT).masked_fill_(_future(length, total.device), float("-inf")).exp_()
    scores = torch.matmul(kq.flatten(2, 3), kq.select(2, 0).mT).view(num_rows, groups, 1, 2, length, length)
    return (scores * left.view(num_rows, groups, -1, 1, length, length)).flatten(1, 2)


def _scores_by_channel(kq: Tensor, total: Tensor) -> Tensor:
    """Return decayed products as `_scores`, with one decay per key channel: total (B, heads, Q, Dk).

    The tile is halved recursively. The decay from a token of the earlier half to a token of the later half is the
    product of a decay to the border and a decay from the border. Neither can overflow, and the scores are a matrix
    product. In blocks of `_BLOCK` tokens, decays are computed pair by pair.
    """
    length = kq.shape[3]
    scores = kq.new_zeros((*kq.shape[:4], length))
    half = length // 2
    while half >= _BLOCK:
        late, early = (x.unflatten(3, (-1, 2, half)).select(4, i) for x, i in ((kq, 1), (kq[:, :, :1], 0)))
        sums = total.unflatten(2, (-1, 2, half))
        border = sums[:, :, :, 0, -1:]
        late = late * (sums.select(3, 1) - border).exp_().unsqueeze(2)
        early = early * (border - sums.select(3, 0)).exp_().unsqueeze(2)
        _diagonal(scores, 2 * half)[..., half:, :half] = late @ early.mT
        half //= 2
    block = min(_BLOCK, length)
    sums, tokens = total.unflatten(2, (-1, block)), kq.unflatten(3, (-1, block))
    future = _future(block, total.device).unsqueeze(2)
    left = (sums.unsqueeze(4) - sums.unsqueeze(3)).masked_fill_(future, float("-inf")).exp_()
    seen = left.mul_(tokens.select(2, 0).unsqueeze(3))  # (B, H, blocks, block, block, Dk)
    pairs = torch.matmul(tokens.movedim(2, 4), seen.mT)  # (B, H, blocks, block, 2, block)
    _diagonal(scores, block).copy_(pairs.movedim(4, 2))
    return scores


def _diagonal(scores: Tensor, size: int) -> Tensor:
    """Return a view of the diagonal blocks of square matrices: (..., blocks, size, size)."""
    blocks: Tensor = scores.unflatten(4, (-1, size)).unflatten(3, (-1, size))
    return blocks.diagonal(dim1=3, dim2=5).movedim(5, 3)


def _future(length: int, device: torch.device) -> Tensor:
    """Return (length, length) bool: whether the token of the column is later than the token of the row."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
