"""The delta rules: prefills, decodes under the state policies SLOTS and FOLD, and folds (ring entries added to states).

The state S (Dv, Dk) of a value head is updated as S <- exp(g) S + u k^T, with the corrected value u = beta (v - exp(g)
S k) and the output o = S q. The gated delta rule (Yang, Kautz and Hatamizadeh, 2024) has one decay per head, and Kimi
delta attention (Moonshot AI, 2025) one per key channel. The last dimension of g is therefore 1 or Dk.

A ring stores the corrected values u, so the state after its entries is a plain sum.

Letters as in `ops`, H value heads, G key heads, Dk and Dv channels of a key and of a value, L entries of a ring, Q
tokens of a tile.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.slots import (
    all_rows_full,
    append_to_rings,
    by_row,
    compute_dtype,
    decays_after,
    load_slots,
    pad_rows,
    pair_decays,
    ring_entries,
    rows_with_slot,
    scan_tiles,
    store_slots,
    to_rows,
    unpad,
)
from bateleur.mamba.ops.states import copy_windows

_TILE = 16
"""Maximum number of tokens of a tile. The decays of all pairs of tokens in it are computed, for each key channel."""


def unit(x: Tensor, heads: int) -> Tensor:
    """Normalize vectors (..., G, Dk) to length 1, and repeat them for H = `heads` value heads: (..., H, Dk)."""
    x = x * x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()
    return x.repeat_interleave(heads // x.shape[-2], -2)


def gates(
    a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, beta_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return log decays A softplus(a + dt_bias), (T, H, 1 or Dk), and beta_scale sigmoid(b), (T, H, 1), in `dtype`."""
    g = F.softplus(a.to(dtype) + dt_bias)
    g = (g * A).unsqueeze(2) if a.dim() == 2 else g * A[:, None]
    return g, b.to(dtype).sigmoid().unsqueeze(2) * beta_scale


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, beta_scale: float
) -> tuple[Tensor, ...]:
    """Return normalized k and q (T, H, 2, Dk), v, log decays, beta, in the compute dtype; q is scaled by Dk ** -0.5."""
    dtype = compute_dtype(v)
    kq = unit(torch.stack((k, q), 1).to(dtype), v.shape[1])
    kq[:, 1].mul_(q.shape[2] ** -0.5)
    return kq.transpose(1, 2), v.to(dtype), *gates(a, b, A, dt_bias, beta_scale, dtype)


@operator("delta_scan", fake="v", mutates=("state",))
def delta_scan_varlen(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, chunk_start_loc: Tensor, chunk_row: Tensor, row_chunk_loc: Tensor,
    max_chunks_per_row: int, chunk_size: int, read: Tensor, chunk_write: Tensor, beta_scale: float,
) -> Tensor:  # fmt: skip
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
    inputs, o = _inputs(q, k, v, a, b, A, dt_bias, beta_scale), torch.zeros_like(v)
    tiles = scan_tiles(state, read, chunk_start_loc, row_chunk_loc, chunk_write, _TILE, compute_dtype(v))
    for own, tokens in tiles:
        o[tokens] = _run_tile(own, *(each[tokens].transpose(0, 1) for each in inputs)).transpose(0, 1)
    return o


def _run_tile(state: Tensor, kq: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs (H, Q, Dv) of Q tokens, and update `state` (H, Dv, Dk). Inputs are (H, Q, ...).

    The corrected values are the solution of a unit lower triangular system (the WY form: Bischof and Van Loan, 1987;
    for delta rules, Yang et al., 2024). With c the running sum of g, and S the state before the tile:

    u_i + beta_i sum_{j<i} (e^{c_i - c_j} k_i . k_j) u_j = beta_i (v_i - S (e^{c_i} k_i))
    o_i = S (e^{c_i} q_i) + sum_{j<=i} (e^{c_i - c_j} q_i . k_j) u_j
    """
    total = g.cumsum(1)
    (k, q), (of_keys, of_queries) = kq.unbind(2), _scores(kq, total).unbind(2)
    fade, last = total.exp(), total[:, -1:]
    known = beta * (v - (k * fade) @ state.mT)
    u = torch.linalg.solve_triangular(beta * of_keys, known, upper=False, unitriangular=True)
    o: Tensor = (q * fade) @ state.mT + of_queries @ u
    state.mul_(last.exp()).add_(u.mT @ (k * (last - total).exp()))
    return o


def _scores(kq: Tensor, total: Tensor) -> Tensor:
    """Return the products of key and query i with key j, decayed from j to i, (..., i, 2, j); 0 if j is later.

    kq: keys and queries (..., Q, 2, Dk). total: running sums of the log decays, (..., Q, 1 or Dk).
    """
    keys, decay = kq.select(-2, 0), pair_decays(total)
    if total.shape[-1] > 1:
        return kq @ (decay * keys.unsqueeze(-3)).mT
    scores: Tensor = (kq.flatten(-3, -2) @ keys.mT).unflatten(-2, (-1, 2))
    return scores * decay.mT


@operator("delta_rule", fake="v", mutates=("state",))
def delta_state_update(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor,
    query_start_loc: Tensor, max_query_len: int, read: Tensor, write: Tensor, beta_scale: float,
) -> Tensor:  # fmt: skip
    """A delta rule over 1 to 1 + K tokens (K drafts) per row (request); writes the state after each to a state slot.

    Args:
        write: (R, 1 + K) int64; the state after token i of row r is written to state[write[r, i]].
        max_query_len: maximum number of tokens of a row.
        The others: as in `delta_scan_varlen`.

    Returns o (T, H, Dv).
    """
    if not (v.shape[0] and read.shape[0]):
        return torch.zeros_like(v)
    tokens, targets = pad_rows(query_start_loc, max_query_len, v.shape[0])
    full, inputs = all_rows_full(targets, v.shape[0]), _inputs(q, k, v, a, b, A, dt_bias, beta_scale)
    kq, v_, g, beta = (to_rows(each, tokens, full).transpose(1, 2).contiguous() for each in inputs)
    y = by_row(lambda *row: _apply(state, *row), read, _probes(kq, g))
    u, o = _corrected(y, kq, v_, g, beta)
    slots = torch.where(targets < v.shape[0], write[:, :max_query_len], 0)
    _update_states(state, read, slots, g.exp(), u, kq.select(3, 0))
    return unpad(o.transpose(1, 2), targets, v)


def _apply(state: Tensor, slot: Tensor, x: Tensor) -> Tensor:
    """Return the states in slots (R,) times N vectors x (R, H, N, Dk) each: (R, H, N, Dv); zeros for slot 0.

    On a CPU, R is 1, and the state is not copied.
    """
    if slot.device.type != "cpu":
        y = x @ state.index_select(0, slot).to(x.dtype).mT
        return y.masked_fill_((slot == 0)[:, None, None, None], 0)
    if not (at := int(slot)):
        return x.new_zeros((*x.shape[:3], state.shape[2]))
    own = state[at, None].to(x.dtype)
    # Matrix times columns is twice as fast for one token if the state is not in the cache, and slower for more.
    return (own @ x.mT).mT if x.shape[2] == 2 else x @ own.mT


def _update_states(state: Tensor, read: Tensor, write: Tensor, decay: Tensor, u: Tensor, k: Tensor) -> None:
    """Write the state after each of M tokens to the slots `write` (R, M), from the states in slots `read` (R,).

    decay, u, k: (R, H, M, ...) decay factors, corrected values and keys. Rows with fewer than M tokens are padded with
    other tokens, whose `write` is slot 0.
    """
    decay, u, k = decay.unsqueeze(3), u.unsqueeze(4), k.unsqueeze(3)
    if state.device.type != "cpu":
        states = load_slots(state, read, u.dtype)
        for t in range(write.shape[1]):
            states.mul_(decay[:, :, t]).addcmul_(u[:, :, t], k[:, :, t])
            store_slots(state, write[:, t], states)
        return
    reads, writes = read.tolist(), write.tolist()
    writer = {dst: row for row, slots in enumerate(writes) for dst in slots}
    # The states that an earlier row overwrites.
    kept = {src: state[src].clone() for row, src in enumerate(reads) if src and writer.get(src, row) < row}
    # Row by row, so that a state stays in the cache, and in place, unless the state has another dtype.
    for row, (src, slots) in enumerate(zip(reads, writes, strict=True)):
        own = kept.get(src, state[src]).to(u.dtype) if src else u.new_zeros(state.shape[1:])
        for t, dst in enumerate(slots):
            own = torch.mul(own, decay[row, :, t], out=state[dst].to(u.dtype)).addcmul_(u[row, :, t], k[row, :, t])
            state[dst] = own


def _probes(kq: Tensor, g: Tensor) -> Tensor:
    """Return key and query of each of M tokens, (R, H, 2 M, Dk), times the decays up to that token. g: log decays."""
    return (kq * g.cumsum(2).exp_().unsqueeze(3)).flatten(2, 3)


def _corrected(y: Tensor, kq: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return corrected values and outputs of M tokens per row, (R, H, M, Dv) each; y: the state times `_probes`.

    Solved by forward substitution, so no token depends on a later one, even if that is NaN. y is overwritten.
    """
    u, o = y[:, :, ::2], y[:, :, 1::2]
    torch.sub(v, u, out=u).mul_(beta)
    if v.shape[2] == 1:
        return u, o.addcmul_(torch.linalg.vecdot(*kq.unbind(3))[..., None], u)
    scores = _scores(kq, g.cumsum(2))
    scores.select(3, 0).mul_(-beta)
    scores = scores.flatten(2, 3)
    for t in range(v.shape[2]):
        after = slice(2 * t + 1, None)  # its own query, and all later tokens
        y[:, :, after].addcmul_(scores[:, :, after, t, None], u[:, :, t, None])
    return u, o


@operator("delta_replay", fake="v", mutates=("ring_k", "ring_u", "ring_g"))
def delta_replay_update(
    state: Tensor, ring_k: Tensor, ring_u: Tensor, ring_g: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
    b: Tensor, A: Tensor, dt_bias: Tensor, query_start_loc: Tensor, max_query_len: int, slot: Tensor,
    ring_row: Tensor, ring_start: Tensor, ring_len: Tensor, beta_scale: float,
) -> Tensor:  # fmt: skip
    """A delta rule over 1 to 1 + K tokens (K drafts) per row (request), from a saved state and a ring of later tokens.

    The state before a row's tokens is state[slot] updated with ring_len entries of ring `ring_row`. Entry j is at
    (ring_start + j) % L. The row's tokens are appended to the ring. The caller counts the accepted ones, and the next
    step overwrites the others, so a rejected token never reaches a state.

    Args:
        ring_k: (ring rows, L entries, G key heads, Dk) raw keys, contiguous, in the dtype of k or a wider one.
        ring_u: (ring rows, L, H value heads, Dv) corrected values, contiguous, float32 (float64 for float64 inputs).
        ring_g: (ring rows, L, H) or (ring rows, L, H, Dk) log decays, contiguous, in the dtype of ring_u.
        slot, ring_row, ring_start, ring_len: (R,) int64. ring_len plus the row's tokens is at most L. No two rows share
            a ring row, except row 0, which is null: its rows store nothing, and their outputs are unspecified.
        The others: as in `delta_state_update`.

    Returns o (T, H, Dv).
    """
    if not (v.shape[0] and slot.shape[0]):
        return torch.zeros_like(v)
    dtype, rings = compute_dtype(v), (ring_k, ring_u, ring_g)
    tokens, targets = pad_rows(query_start_loc, max_query_len, v.shape[0])
    full, inputs = all_rows_full(targets, v.shape[0]), _inputs(q, k, v, a, b, A, dt_bias, beta_scale)
    kq, new_v, g, beta = (to_rows(each, tokens, full).transpose(1, 2).contiguous() for each in inputs)

    def before(slot: Tensor, row: Tensor, start: Tensor, count: Tensor, probes: Tensor) -> Tensor:
        if count.device.type == "cpu" and int(count) <= 0:  # an empty ring
            return _apply(state, slot, probes)
        old_k, old_u, under = _entries(rings, row, start, count, dtype)
        return _apply(state, slot, probes * under).add_((probes @ old_k.mT) @ old_u)

    y = by_row(before, slot, ring_row, ring_start, ring_len, _probes(kq, g))
    u, o = _corrected(y, kq, new_v, g, beta)
    new = (to_rows(k, tokens, full), u.transpose(1, 2), g.transpose(1, 2).reshape(*tokens.shape, *ring_g.shape[2:]))
    append_to_rings(rings, new, ring_row, ring_start + ring_len, targets < v.shape[0])
    return unpad(o.transpose(1, 2), targets, v)


def _entries(
    rings: Sequence[Tensor], row: Tensor, start: Tensor, count: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys (R, H, L, Dk) times the decays of later entries, values (R, H, L, Dv), and the product of all decays.

    The product, (R, H, 1, 1 or Dk), is the factor of the saved state. Arguments as in `ring_entries`.
    """
    k, u, g = ring_entries(rings, row, start, count, dtype)
    g = g if g.dim() == 4 else g.unsqueeze(3)
    k = unit(k, u.shape[2]) * decays_after(g)
    return k.transpose(1, 2), u.transpose(1, 2), g.sum(1).exp_()[:, :, None]


@operator("delta_rule", mutates=("state", "conv_state"))
def delta_fold_ring(
    state: Tensor, conv_state: Tensor, request_conv: Tensor, ring_k: Tensor, ring_u: Tensor, ring_g: Tensor,
    ring_row: Tensor, ring_start: Tensor, count: Tensor, src: Tensor, dst: Tensor, page_offset: Tensor,
) -> None:  # fmt: skip
    """Update saved states with the first `count` entries of the rings of later tokens, in several layers at once.

    Args:
        state: (layers, slots, heads, Dv, Dk) for values of Dv and keys of Dk channels, updated in place.
        ring_k, ring_u, ring_g: as in `delta_replay_update`, with a leading dimension of layers.
        The others: as in `fold_ring`.
    """
    dst, row, start, count, src, offset = rows_with_slot(dst, ring_row, ring_start, count, src, page_offset)
    if not dst.shape[0]:
        return
    copy_windows(conv_state, request_conv, row, dst, offset)
    for pages, *rings in zip(state, ring_k, ring_u, ring_g, strict=True):
        k, u, under = _entries(rings, row, start, count, compute_dtype(ring_u))
        store_slots(pages, dst, load_slots(pages, src, k.dtype).mul_(under).add_(u.mT @ k))
