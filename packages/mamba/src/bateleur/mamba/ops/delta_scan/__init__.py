"""The delta rules over prompts, by pieces of chunks.

Within a piece the corrected values are one unit lower triangular system (the WY form: Bischof and Van Loan, 1987; for
delta rules, Yang et al., 2024): with c the running sum of g from the piece's begin on, and S the state that enters it,

    u_i + beta_i sum_{j<i} (e^{c_i - c_j} k_i . k_j) u_j = beta_i (v_i - S (e^{c_i} k_i))
    o_i = S (e^{c_i} q_i) + sum_{j<=i} (e^{c_i - c_j} q_i . k_j) u_j

All that is matrix products, and every exponent a sum of numbers that are not positive. Pieces of a row follow each
other, those of all rows side by side; memory is that of one piece a row. What pads a piece has g = 0 and beta = 0.

Shapes: as in `shared.delta`, and N pieces of the longest row, Q tokens of each, B rows that have one of some rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import by_content, compute, load, pad_chunks, store, written
from bateleur.mamba.ops.shared.delta import gates, of_heads, units

_PIECE = 32
"""Tokens of a piece at most, a power of two: twice as many take as long on CPU, and the products twice the memory."""
_BLOCK = 4
"""Tokens whose decays by channel are formed pair by pair."""


class Pieces(NamedTuple):
    """The pieces of each row, by rank."""

    tokens: Tensor
    """(N, R, Q) token to read; the chunk's first, or that of another chunk, where there is none."""
    live: Tensor
    """(N, R, Q) bool: there is one."""
    targets: Tensor
    """(N, R, Q) token to write; T where there is none."""
    write: Tensor
    """(N, R) slot for the state after the piece; 0 where it is not kept."""
    rows: tuple[Tensor | None, ...]
    """Rows that have a token, for each rank; None stands for all, or for "any of them may", as on a GPU."""


@by_content
def pieces(
    chunk_start_loc: Tensor,
    row_chunk_loc: Tensor,
    chunk_write: Tensor,
    max_chunks: int,
    chunk_size: int,
    piece: int,
    num_tokens: int,
) -> Pieces:
    """Chunks in parts of `piece` tokens, a power of two, or of less where no chunk has so many."""
    device, num_chunks = chunk_write.device, chunk_write.shape[0]
    if device.type == "cpu":
        chunk_size = min(chunk_size, int(chunk_start_loc.diff().max()))
    length = min(piece, 1 << (chunk_size - 1).bit_length())
    parts = -(-chunk_size // length)
    chunk_tokens, chunk_live = pad_chunks(chunk_start_loc, parts * length, num_tokens)
    rank = torch.arange(max_chunks * parts, device=device).unsqueeze(1)
    chunk = row_chunk_loc[:-1].long() + rank // parts
    there = chunk < row_chunk_loc[1:]
    chunk = torch.where(there, chunk, 0)
    at = chunk * parts + rank % parts
    tokens = chunk_tokens.view(num_chunks * parts, length)[at]
    live = chunk_live.view(num_chunks * parts, length)[at] & there.unsqueeze(2)
    write = torch.where(there & (rank % parts == parts - 1), chunk_write[chunk], 0)
    rows = tuple(written(some) for some in live.any(2))
    return Pieces(tokens, live, torch.where(live, tokens, num_tokens), write, rows)


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
    """A delta rule over prompts, each continuing the state in its `read` slot, by chunks.

    For each token and value head, with key head h // (H / G), q and k of length 1 and q times Dk ** -0.5,
    g = A softplus(a + dt_bias), beta = beta_scale sigmoid(b):
    S <- S exp(g), u = beta (v - S k), S <- S + u k^T, o = S q. S is (Dv, Dk), and g one number or one for each of its
    Dk columns. The S after chunk k goes to state[chunk_write[k]]: 0 for a chunk whose state is not kept; a row's last
    chunk leaves its final state.

    q and k (T, G, Dk), v (T, H, Dv), raw; a (T, H) with dt_bias (H,), or (T, H, Dk) with dt_bias (H, Dk); b (T, H); A
    (H,) float32 and negative; state (slots, H, Dv, Dk). The others as for `ssd_scan_varlen`. Returns o (T, H, Dv).
    """
    del query_start_loc
    num_tokens, dtype = v.shape[0], compute(v)
    o = v.new_zeros((num_tokens + 1, *v.shape[1:]))
    if num_tokens == 0 or chunk_row.shape[0] == 0:
        return o[:-1]
    cut = pieces(
        chunk_start_loc, row_chunk_loc, chunk_write, max_chunks_per_row, chunk_size, _PIECE, num_tokens
    )
    g, beta = gates(a, b, A, dt_bias, beta_scale, dtype)
    carry = load(state, read, dtype)
    for tokens, live, targets, write, rows in zip(*cut, strict=True):
        if rows is None or len(rows):
            which = slice(None) if rows is None else rows
            at, dead = tokens[which], ~live[which].unsqueeze(2).unsqueeze(3)
            kq = units(q[at].flatten(0, 1), k[at].flatten(0, 1), k.shape[1], dtype)
            kq = kq.unflatten(0, at.shape).permute(
                0, 2, 3, 1, 4
            )  # (B, G, 2, Q, Dk), and below (B, H, Q, ...)
            total, strength = (x[at].masked_fill_(dead, 0).transpose(1, 2) for x in (g, beta))
            states = carry[which]
            values = _piece(
                states, kq.contiguous(), v[at].to(dtype).transpose(1, 2), total.cumsum(2), strength
            )
            if rows is not None:
                carry.index_copy_(0, rows, states)
            o.index_copy_(0, targets[which].view(-1), values.transpose(1, 2).flatten(0, 1).to(o.dtype))
        kept = written(write)
        store(state, *((write, carry) if kept is None else (write[kept], carry[kept])))
    return o[:-1]


def _piece(state: Tensor, kq: Tensor, v: Tensor, total: Tensor, beta: Tensor) -> Tensor:
    """Outputs (B, H, Q, Dv) of a piece, and its state (B, H, Dv, Dk) advanced in place.

    kq (B, G, 2, Q, Dk), v (B, H, Q, Dv), total (B, H, Q, 1 or Dk), the running sum of g, beta (B, H, Q, 1).
    """
    num_rows, heads, lanes, size = state.shape
    flat, length = state.view(-1, lanes, size), kq.shape[3]
    scores = _scores_by_channel(of_heads(kq, heads), total) if total.shape[3] > 1 else _scores(kq, total)
    kq = of_heads(kq, heads)
    probes = (kq * total.exp().unsqueeze(2)).view(-1, 2 * length, size)
    seen = torch.bmm(probes, flat.mT).view(num_rows, heads, 2, length, lanes)
    of_keys, of_queries = scores.unbind(2)
    one = torch.eye(length, dtype=v.dtype, device=v.device).expand_as(of_keys)
    # Inverse and product are twice as fast on CPU as the solution for Dv columns.
    inverse = torch.linalg.solve_triangular(of_keys * beta, one, upper=False, unitriangular=True)
    u = torch.matmul(inverse, torch.sub(v, seen.select(2, 0)).mul_(beta)).flatten(0, 1)
    o = torch.baddbmm(seen.select(2, 1).flatten(0, 1), of_queries.flatten(0, 1), u)
    last = total.narrow(2, length - 1, 1)
    kept = kq.select(2, 0) * (last - total).exp_()
    state.mul_(last.exp())
    flat.baddbmm_(u.mT, kept.view(-1, length, size))
    return o.view(num_rows, heads, length, lanes)


def _scores(kq: Tensor, total: Tensor) -> Tensor:
    """What keys and queries take of the tokens up to their own, (B, H, 2, Q, Q), decayed by head."""
    num_rows, groups, _, length, _ = kq.shape
    # Mask before the exponential: above the diagonal the difference is positive, and could overflow.
    left = (total - total.mT).masked_fill_(_future(length, total.device), float("-inf")).exp_()
    scores = torch.matmul(kq.flatten(2, 3), kq.select(2, 0).mT).view(num_rows, groups, 1, 2, length, length)
    return (scores * left.view(num_rows, groups, -1, 1, length, length)).flatten(1, 2)


def _scores_by_channel(kq: Tensor, total: Tensor) -> Tensor:
    """The same decayed by key channel: kq (B, H, 2, Q, Dk), total (B, H, Q, Dk).

    By halves: where the later one looks at the earlier one, the decay is cut at the border between them into one that
    its tokens have and one that the other's have, neither of which can overflow, and there is a product of matrices.
    Blocks of a few tokens are left, whose decays are formed pair by pair.
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
    """The blocks on the diagonal as a view: (..., Q, Q) to (..., blocks, size, size)."""
    blocks: Tensor = scores.unflatten(4, (-1, size)).unflatten(3, (-1, size))
    return blocks.diagonal(dim1=3, dim2=5).movedim(5, 3)


def _future(length: int, device: torch.device) -> Tensor:
    """(Q, Q) bool: the second token comes after the first."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
