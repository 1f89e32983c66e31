"""The delta rules over prefills, in two kernels over tiles of 16 tokens of a chunk.

1. pairs: the products of keys and queries with the keys of their tile, for all tiles in parallel, and the inverse of
   the triangular system of corrected values, which does not depend on the state (Yang et al., 2024).
2. walk: the tiles of a request in order, with the state in registers; writes states to the slots `chunk_write`.

The gated delta rule in bfloat16 uses `delta_tiles` instead of walk, with tiles of 64 tokens, if keys are aligned.

Legend: T tokens of a tile, V value channels of a head's tile, K key channels, D decays of a head (1 or K).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.triton.delta_rule import (
    betas,
    block_options,
    log_decays,
    product,
    shape_options,
    solve,
    to_unit,
    unit,
    zero_tokens,
)
from bateleur.mamba.ops.triton.delta_tiles import scan_tiles, takes_tiles, token_distances
from bateleur.mamba.ops.triton.tiles import (
    INDICES,
    LAUNCH,
    load_tile,
    precision,
    require_dense,
    state_tile,
    store_tile,
    unless_null,
)
from bateleur.metadata.dispatch import cdiv

_TILE = 16  # tokens: the minimum of a matrix product, and few enough for forward substitution


@triton.jit
def _decayed_pairs(k_TK, q_TK, g_TK, t, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """Return decayed products of keys and queries with earlier keys, (T, T) each, with one decay per key channel.

    The tile is halved recursively. The decay from a token of the earlier half to a token of the later half is split at
    the border into two factors that are at most 1, so the products are a matrix product. ``g_TK``: log decays. ``t``:
    indices of the tokens. PRECISION, EXACT: input precision of ``tl.dot`` for the products of queries, and all others.
    """
    i_T, j_T = t[:, None], t[None, :]
    key_TT = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    query_TT = tl.where(i_T == j_T, tl.sum(q_TK * k_TK, 1)[:, None], 0.0)
    for level in range(4):  # not unrolled, which would spill registers
        half = 8 >> level
        border_T = i_T // (2 * half) * (2 * half) + half - 1
        between_TT = (j_T > tl.minimum(i_T, border_T)) & (j_T <= tl.maximum(i_T, border_T))
        left_TK = tl.exp(product(between_TT.to(tl.float32), g_TK, EXACT))
        early_TK = tl.trans(k_TK * left_TK)
        seen_TT = (i_T // (2 * half) == j_T // (2 * half)) & (i_T // half > j_T // half)
        key_TT = tl.where(seen_TT, product(k_TK * left_TK, early_TK, EXACT), key_TT)
        query_TT = tl.where(seen_TT, product(q_TK * left_TK, early_TK, PRECISION), query_TT)
    return key_TT, query_TT


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def pairs_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, chunk_starts_ptr, sum_ptr, rest_ptr, inverse_ptr, query_ptr,
    scale_ptr, num_tokens, beta_scale, q_token, q_group, k_token, k_group, a_token, a_head, b_token,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the products of keys and queries with the keys of their tile, and the inverse of the triangular system.

    Grid (chunks x tiles of tokens, heads). Occupancy on sm_90: at least 3 blocks per SM. Reads arguments of
    `ops.delta_scan_varlen` (bias: `dt_bias`, chunk_starts: first token of each chunk). Writes for each head and token:

    * ``sum_ptr``, ``rest_ptr``: sum of the log decays of the tile's tokens up to the token, and after it, (D,) each;
    * ``inverse_ptr``, ``query_ptr``: its row (T,) of the inverse times beta, and its query's weights (T,) for keys;
    * ``scale_ptr``: the factors that normalize its key and query, in the first two of four entries.

    Every sum of log decays is added up from its own tokens, because a difference of sums would lose digits after a
    strong decay.
    """
    chunk, head = tl.program_id(0) // TILES, tl.program_id(1)
    first = tl.load(chunk_starts_ptr + chunk) + tl.program_id(0) % TILES * BLOCK_T
    count = tl.minimum(tl.load(chunk_starts_ptr + chunk + 1) - first, BLOCK_T)
    if count <= 0:
        return
    t = tl.arange(0, BLOCK_T)
    real_T, token_T = t < count, (first + t).to(tl.int64)
    line, A = head.to(tl.int64) * num_tokens + first, tl.load(A_ptr + head).to(tl.float32)
    line_T, later_TT = line + t, (t[None, :] > t[:, None]).to(tl.float32)
    # Before normalization, because products of bfloat16 values are exact.
    key_TT, query_TT = tl.zeros([BLOCK_T, BLOCK_T], tl.float32), tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    k_T, q_T = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    for begin in range(0, KEY_DIM, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        real_K = k < KEY_DIM
        k_TK = load_tile(k_ptr + head // GROUP * k_group + k, token_T * k_token, real_T, real_K).to(tl.float32)
        q_TK = load_tile(q_ptr + head // GROUP * q_group + k, token_T * q_token, real_T, real_K).to(tl.float32)
        k_T += tl.sum(k_TK * k_TK, 1)
        q_T += tl.sum(q_TK * q_TK, 1)
        if DECAYS == 1:
            key_TT += product(k_TK, tl.trans(k_TK), PRECISION)
            query_TT += product(q_TK, tl.trans(k_TK), PRECISION)
        else:
            a_K, bias_K = a_ptr + head * a_head + k, bias_ptr + head * DECAYS + k
            g_TK = log_decays(a_K, token_T * a_token, A, bias_K, real_T, real_K)
            sum_TK, rest_TK = product(1.0 - later_TT, g_TK, EXACT), product(later_TT, g_TK, EXACT)
            store_tile(sum_ptr + k, line_T * DECAYS, sum_TK, real_T, real_K)
            store_tile(rest_ptr + k, line_T * DECAYS, rest_TK, real_T, real_K)
            more = _decayed_pairs(k_TK, q_TK, g_TK, t, BLOCK_T, PRECISION, EXACT)
            key_TT, query_TT = key_TT + more[0], query_TT + more[1]
    if DECAYS == 1:
        d = tl.arange(0, BLOCK_D)
        a_D, bias_D = a_ptr + head * a_head + d, bias_ptr + head * DECAYS + d
        g_T = tl.sum(log_decays(a_D, token_T * a_token, A, bias_D, real_T, d < DECAYS), 1)
        g_TT = tl.where(t[:, None] > t[None, :], g_T[:, None], 0.0)
        tl.store(sum_ptr + line_T, tl.cumsum(g_T, 0), mask=real_T)
        tl.store(rest_ptr + line_T, tl.sum(g_TT, 0), mask=real_T)
        left_TT = tl.exp(product(1.0 - later_TT, g_TT, EXACT))
        key_TT, query_TT = key_TT * left_TT, query_TT * left_TT
    beta_T = betas(b_ptr + token_T * b_token + head, real_T, beta_scale)
    k_T, q_T = to_unit(k_T), to_unit(q_T) * KEY_DIM**-0.5
    key_TT *= (beta_T * k_T)[:, None] * k_T[None, :]
    query_TT = tl.where(t[:, None] >= t[None, :], query_TT * q_T[:, None] * k_T[None, :], 0.0)
    inverse_TT = solve(key_TT, tl.where(t[:, None] == t[None, :], beta_T[:, None], 0.0), t, count)
    store_tile(inverse_ptr + t, line_T * BLOCK_T, tl.trans(inverse_TT), real_T, t < BLOCK_T)
    store_tile(query_ptr + t, line_T * BLOCK_T, query_TT, real_T, t < BLOCK_T)
    tl.store(scale_ptr + line_T * 4, k_T, mask=real_T)
    tl.store(scale_ptr + line_T * 4 + 1, q_T, mask=real_T)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=INDICES)
def walk_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, sum_ptr, rest_ptr, inverse_ptr, query_ptr,
    starts_ptr, chunk_starts_ptr, row_chunk_ptr, read_ptr, chunk_write_ptr, o_ptr,
    num_rows, num_tokens, state_slot, q_token, q_group, k_token, k_group, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Run the tiles of each request in order: compute outputs, and write the state after each chunk to its slot.

    Grid (heads x tiles of values, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 1 block per SM. Reads ``sum_ptr`` to ``query_ptr``, which `pairs_kernel` wrote, and
    arguments of `ops.delta_scan_varlen` (starts: `query_start_loc`; row_chunk: first chunk of each row; read,
    chunk_write: state slots). Writes ``o_ptr`` and ``state_ptr``.
    """
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    v = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    t, k, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    real_V, real_K, real_D = v < VALUE_DIM, k < KEY_DIM, d < DECAYS
    lane_V = head * VALUE_DIM + v
    if row == num_rows:
        zero_tokens(o_ptr + lane_V, tl.load(starts_ptr + row), num_tokens, HEADS * VALUE_DIM, t, real_V)
        return
    slot = tl.load(read_ptr + row).to(tl.int64)
    read_K = k < unless_null(slot, KEY_DIM)
    state_VK = load_tile(state_ptr + slot * state_slot + k, lane_V * KEY_DIM, real_V, read_K).to(tl.float32)
    tl.debug_barrier()  # a chunk may write the slot that its row reads
    q_K, k_K = q_ptr + head // GROUP * q_group + k, k_ptr + head // GROUP * k_group + k
    line = head.to(tl.int64) * num_tokens
    for chunk in range(tl.load(row_chunk_ptr + row), tl.load(row_chunk_ptr + row + 1)):
        begin, end = tl.load(chunk_starts_ptr + chunk), tl.load(chunk_starts_ptr + chunk + 1)
        for first in range(begin, end, BLOCK_T):
            token_T, real_T = (first + t).to(tl.int64), first + t < end
            line_T, last = line + token_T, line + tl.minimum(first + BLOCK_T, end) - 1
            k_TK = unit(load_tile(k_K, token_T * k_token, real_T, real_K))
            q_TK = unit(load_tile(q_K, token_T * q_token, real_T, real_K)) * KEY_DIM**-0.5
            v_TV = load_tile(v_ptr + head * v_head + v, token_T * v_token, real_T, real_V)
            sum_TD = load_tile(sum_ptr + d, line_T * DECAYS, real_T, real_D)
            rest_TD = load_tile(rest_ptr + d, line_T * DECAYS, real_T, real_D)
            sum_D = tl.load(sum_ptr + last * DECAYS + d, mask=real_D, other=0)
            inverse_TT = load_tile(inverse_ptr + t, line_T * BLOCK_T, real_T, t < BLOCK_T)
            query_TT = load_tile(query_ptr + t, line_T * BLOCK_T, real_T, t < BLOCK_T)
            fade_TD = tl.exp(sum_TD)
            u_TV = v_TV.to(tl.float32) - product(k_TK * fade_TD, tl.trans(state_VK), EXACT)
            u_TV = product(inverse_TT, u_TV, EXACT)
            o_TV = product(q_TK * fade_TD, tl.trans(state_VK), PRECISION) + product(query_TT, u_TV, PRECISION)
            store_tile(o_ptr + lane_V, token_T * (HEADS * VALUE_DIM), o_TV, real_T, real_V)
            k_TK *= tl.exp(rest_TD)
            state_VK = state_VK * tl.exp(sum_D)[None, :] + product(tl.trans(u_TV), k_TK, EXACT)
        slot = tl.load(chunk_write_ptr + chunk).to(tl.int64)
        write_K = k < unless_null(slot, tl.where(end > begin, KEY_DIM, 0))
        store_tile(state_ptr + slot * state_slot + k, lane_V * KEY_DIM, state_VK, real_V, write_K)


def delta_scan_varlen(
    q, k, v, a, b, A, dt_bias, state, query_start_loc, chunk_start_loc, chunk_row, row_chunk_loc,
    max_chunks_per_row, chunk_size, read, chunk_write, beta_scale,
):  # fmt: skip
    """A delta rule over prefills, in two or three launches; same arguments and result as `ops.delta_scan_varlen`.

    read, chunk_write: slots of states before requests, and after chunks. No request may write a slot another reads.
    """
    del max_chunks_per_row
    require_dense(1, q=q, k=k, v=v, a=a, b=b, A=A)
    require_dense(dt_bias.dim(), dt_bias=dt_bias)
    require_dense(3, state=state)
    num_tokens, num_rows, num_chunks = v.shape[0], read.shape[0], chunk_row.shape[0]
    if num_tokens == 0 or num_chunks == 0:
        return torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    shape = shape_options(q, v, a)
    heads, value_dim, key_dim, decays = (shape[name] for name in ("HEADS", "VALUE_DIM", "KEY_DIM", "DECAYS"))
    exact = v.dtype == torch.float32
    shared = LAUNCH | {"BLOCK_T": _TILE, "PRECISION": precision(v.dtype), "EXACT": precision(v.dtype, state=True)}
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # Two tensors, not parts of one, are aligned for any number of tokens.
    total, rest = (torch.empty((heads, num_tokens, decays), dtype=torch.float32, device=v.device) for _ in range(2))
    inverse, query = torch.empty((2, heads, num_tokens, _TILE), dtype=torch.float32, device=v.device)
    scale = torch.empty((heads, num_tokens, 4), dtype=torch.float32, device=v.device)
    keys = {name: shape[name] for name in ("GROUP", "KEY_DIM", "DECAYS")}
    tiles = cdiv(chunk_size, _TILE)
    # One warp needs no barriers. With decays per channel it has fewer channels, so that no registers are spilled.
    pairs = block_options(key_dim, decays, most=32 if decays == 1 else 16) | {"num_warps": 4 if exact else 1}
    pairs_kernel[(num_chunks * tiles, heads)](
        q, k, a, b, A, dt_bias, chunk_start_loc, total, rest, inverse, query, scale,
        num_tokens, beta_scale, *q.stride()[:2], *k.stride()[:2], *a.stride()[:2], b.stride(0),
        **keys, TILES=tiles, **shared | pairs,
    )  # fmt: skip
    distances = token_distances(q, k, v)
    if takes_tiles(q, k, distances, decays, chunk_size):
        scan_tiles(
            state, q, k, v, total, rest, inverse, query, scale, shape, distances,
            query_start_loc, chunk_start_loc, row_chunk_loc, chunk_size, read, chunk_write, o,
        )  # fmt: skip
        return o
    # The tiles of tokens of a request run in order, so narrow tiles of value channels are needed to fill a GPU.
    walk = block_options(key_dim, decays) | {"BLOCK_V": state_tile(value_dim, 16 if exact else 32), "num_warps": 8}
    walk_kernel[(heads * cdiv(value_dim, walk["BLOCK_V"]), num_rows + 1)](
        state, q, k, v, total, rest, inverse, query,
        query_start_loc, chunk_start_loc, row_chunk_loc, read, chunk_write, o,
        num_rows, num_tokens, state.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        **shape, **shared | walk,
    )  # fmt: skip
    return o
