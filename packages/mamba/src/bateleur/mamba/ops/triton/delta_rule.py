"""The delta rules: decodes with the state policy SLOTS, folds (ring entries added to states), and helpers of all
delta-rule kernels.

A program of `update_kernel` has one request, head and tile of value channels. It reads its tile of the state once, and
keeps it in registers for all tokens of the request. A value channel needs all key channels but no other value channel,
so the state is split by value channels. fold is one launch for all requests and layers. Most requests have no fold
(`dst` is 0), so programs skip them: see `rows_of_share`.

A head has one decay, or one per key channel: D is 1 or K, and D decays are broadcast over K channels.
Legend: T tokens of a tile, K key channels of a head, V value channels of its tile, D decays of a head, J ring entries.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.ops.triton.tiles import (
    LAUNCH,
    fold_options,
    keep_window,
    load_tile,
    next_row,
    require_dense,
    rounded,
    row_shares,
    rows_of_share,
    sigmoid,
    softplus,
    state_tile,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.metadata.dispatch import cdiv, next_power_of_2

_UPDATE_ENTRIES = 2048  # of a state, per program: four loads of 16 bytes per thread in float32
_FOLD_ENTRIES = 8192  # of a state; half of it for float32, which has no tensor cores and would spill registers


@triton.jit
def to_unit(square_T):
    """Return the factors that normalize vectors with the squared lengths ``square_T``; zero vectors stay zero."""
    return tl.rsqrt(square_T + 1e-6)


@triton.jit
def unit(x_TK):
    """Normalize the rows of a matrix (T, K) to length 1, in float32."""
    x_TK = x_TK.to(tl.float32)
    return x_TK * to_unit(tl.sum(x_TK * x_TK, 1))[:, None]


@triton.jit
def log_decays(a_D, a_offset_T, A, bias_D, real_T, real_D):
    """Return log decays (T, D) ``A * softplus(a + bias)``, zeros where ``real_T`` (a mask of tokens) is false.

    ``a_D + a_offset_T`` are the addresses of a, ``bias_D`` those of the bias; ``real_D`` masks decays.
    """
    bias_D = tl.load(bias_D, mask=real_D, other=0).to(tl.float32)
    a_TD = load_tile(a_D, a_offset_T, real_T, real_D).to(tl.float32)
    return tl.where(real_T[:, None], A * softplus(a_TD + bias_D[None, :]), 0.0)


@triton.jit
def betas(b_T, real_T, beta_scale):
    """Return beta (T,), ``beta_scale * sigmoid(b)``; ``b_T`` are pointers to b, ``real_T`` masks tokens."""
    return beta_scale * sigmoid(tl.load(b_T, mask=real_T, other=0).to(tl.float32))


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Return the product of two float32 matrices; PRECISION: input precision of ``tl.dot``."""
    return tl.dot(rounded(x, PRECISION), rounded(y, PRECISION), input_precision=PRECISION)


@triton.jit
def sums_of_tokens(x_TD, REVERSE: tl.constexpr):
    """Return inclusive running sums over tokens, (T, D), from the last token if REVERSE.

    Triton 3.6 can scan a single column only as a vector.
    """
    if x_TD.shape[1] == 1:
        return tl.cumsum(tl.sum(x_TD, 1), 0, reverse=REVERSE)[:, None]
    return tl.cumsum(x_TD, 0, reverse=REVERSE)


@triton.jit
def solve(below_TT, x_VT, t, count):
    """Solve y (I + L)^T = x for the first ``count`` columns of x; L is ``below_TT`` below its diagonal.

    ``t``: the indices of the columns. Solved column by column, because a product of powers of L would lose digits if
    keys repeat. No column depends on a later one, even if that is NaN.
    """
    for i in range(1, count):
        line_T = tl.sum(tl.where(t[:, None] == i, below_TT, 0.0), 0)
        known_V = tl.sum(tl.where(t[None, :] < i, line_T[None, :] * x_VT, 0.0), 1)
        x_VT = tl.where(t[None, :] == i, x_VT - known_V[:, None], x_VT)
    return x_VT


@triton.jit
def zero_tokens(o_V, first, num_tokens, token, t, real_V):
    """Zero the outputs of the tokens from ``first`` on, which belong to no request.

    ``o_V``: pointers to the channels of token 0, masked by ``real_V``. ``token``: stride of tokens. ``t``: a range, as
    long as the tokens that are written at once.
    """
    for begin in range(first, num_tokens, t.shape[0]):
        token_T = (begin + t).to(tl.int64)
        zero_TV = tl.zeros([t.shape[0], real_V.shape[0]], tl.float32)
        store_tile(o_V, token_T * token, zero_TV, token_T < num_tokens, real_V)


@triton.jit
def ring_keys(ring_k_K, ring_g_D, start, count, j, real_K, real_D, k_entry, g_entry, CAPACITY: tl.constexpr):
    """Load ``count`` ring entries (tokens after a state) from entry ``start`` on; return raw keys (J, K), the product
    of the decay factors of all later entries (J, D), and of all decay factors (D,). Keys of missing entries are zeros.

    ``ring_k_K``, ``ring_g_D``: pointers to key and log decays of entry 0, masked by ``real_K`` and ``real_D``.
    ``k_entry``, ``g_entry``: strides of entries. ``j``: indices of entries, counted from ``start``.
    """
    place_J, after_J = ((start + j) % CAPACITY).to(tl.int64), ((start + j + 1) % CAPACITY).to(tl.int64)
    k_JK = load_tile(ring_k_K, place_J * k_entry, j < count, real_K).to(tl.float32)
    g_JD = load_tile(ring_g_D, place_J * g_entry, j < count, real_D).to(tl.float32)
    later_JD = load_tile(ring_g_D, after_J * g_entry, j + 1 < count, real_D).to(tl.float32)
    # Summed for each entry, not as differences of sums, which would lose digits after a strong decay.
    return k_JK, tl.exp(sums_of_tokens(later_JD, True)), tl.exp(tl.sum(g_JD, 0))


def shape_options(q: Tensor, v: Tensor, a: Tensor) -> dict[str, int]:
    """Return the kernels' size constants, for q (..., G, Dk), v (..., H, Dv), a (..., H) or (..., H, Dk)."""
    heads, value_dim = v.shape[-2:]
    groups, key_dim = q.shape[-2:]
    decays = key_dim if a.dim() == v.dim() else 1
    return {"HEADS": heads, "GROUP": heads // groups, "VALUE_DIM": value_dim, "KEY_DIM": key_dim, "DECAYS": decays}


@cache
def block_options(key_dim: int, decays: int, *, least: int = 16, most: int = 1 << 20) -> dict[str, Any]:
    """Return the kernels' constants BLOCK_K, channels of a key tile, in [least, most], and BLOCK_D, decays of the tile.

    decays: decays of a head: 1, or one per key channel. least: 16 for matrix products.
    """
    block_k = max(least, min(most, next_power_of_2(key_dim)))
    return {"BLOCK_K": block_k, "BLOCK_D": 1 if decays == 1 else block_k}


@triton.jit
def _unit(ptr_K, real_K):
    """Load a vector (K,) from the pointers ``ptr_K``, and normalize it to length 1 in float32."""
    x_K = tl.load(ptr_K, mask=real_K, other=0).to(tl.float32)
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, 0) + 1e-6)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def update_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, starts_ptr, read_ptr, write_ptr, o_ptr,
    num_rows, num_tokens, max_query_len, beta_scale,
    state_slot, q_token, q_group, k_token, k_group, v_token, v_head, a_token, a_head, b_token, write_row, write_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Run the recurrence over the tokens of each decode, and write the state after each token to its state slot.

    Grid (heads x tiles of values, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 7 blocks per SM. Pointers: arguments of `ops.delta_state_update` (starts:
    `query_start_loc`; read, write: slots of old and new states). Writes o and state.
    """
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    v = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    k, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    real_V, real_K, real_D = v < VALUE_DIM, k < KEY_DIM, d < DECAYS
    lane_V = head * VALUE_DIM + v
    slot = tl.load(read_ptr + row, mask=row < num_rows, other=0).to(tl.int64)  # all loads in flight at once
    first = tl.load(starts_ptr + row)
    if row == num_rows:
        zero_tail(o_ptr, first, num_tokens, HEADS * VALUE_DIM, lane_V, real_V)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    read_K = k < unless_null(slot, KEY_DIM)
    state_VK = load_tile(state_ptr + slot * state_slot + k, lane_V * KEY_DIM, real_V, read_K).to(tl.float32)
    tl.debug_barrier()  # a row may write the slot that it reads
    A = tl.load(A_ptr + head).to(tl.float32)
    bias_D = tl.load(bias_ptr + head * DECAYS + d, mask=real_D, other=0).to(tl.float32)
    q_K, k_K = q_ptr + head // GROUP * q_group + k, k_ptr + head // GROUP * k_group + k
    for i in range(count):
        token = first.to(tl.int64) + i
        a_D = tl.load(a_ptr + token * a_token + head * a_head + d, mask=real_D, other=0).to(tl.float32)
        beta = beta_scale * sigmoid(tl.load(b_ptr + token * b_token + head).to(tl.float32))
        v_V = tl.load(v_ptr + token * v_token + head * v_head + v, mask=real_V, other=0).to(tl.float32)
        key_K, query_K = _unit(k_K + token * k_token, real_K), _unit(q_K + token * q_token, real_K)
        state_VK *= tl.exp(A * softplus(a_D + bias_D))[None, :]
        u_V = beta * (v_V - tl.sum(state_VK * key_K[None, :], 1))
        state_VK += u_V[:, None] * key_K[None, :]
        o_V = tl.sum(state_VK * query_K[None, :], 1) * KEY_DIM**-0.5
        o_at_V = o_ptr + token * (HEADS * VALUE_DIM) + lane_V
        tl.store(o_at_V, o_V.to(o_ptr.dtype.element_ty), mask=real_V)
        slot = tl.load(write_ptr + row * write_row + i * write_token).to(tl.int64)
        write_K = k < unless_null(slot, KEY_DIM)
        store_tile(state_ptr + slot * state_slot + k, lane_V * KEY_DIM, state_VK, real_V, write_K)


def delta_state_update(
    state, q, k, v, a, b, A, dt_bias, query_start_loc, max_query_len, read, write, beta_scale,
):  # fmt: skip
    """A delta rule over decodes, from state slots ``read`` to ``write``; arguments of `ops.delta_state_update`."""
    require_dense(1, q=q, k=k, v=v, a=a, b=b, A=A)
    require_dense(dt_bias.dim(), dt_bias=dt_bias)
    require_dense(3, state=state)
    num_rows, shape = read.shape[0], shape_options(q, v, a)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    blocks = block_options(shape["KEY_DIM"], shape["DECAYS"], least=1)
    block_v = min(next_power_of_2(shape["VALUE_DIM"]), max(1, _UPDATE_ENTRIES // blocks["BLOCK_K"]))
    update_kernel[(shape["HEADS"] * cdiv(shape["VALUE_DIM"], block_v), num_rows + 1)](
        state, q, k, v, a, b, A, dt_bias, query_start_loc, read, write, o,
        num_rows, v.shape[0], min(max_query_len, write.shape[1]), beta_scale,
        state.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *a.stride()[:2], b.stride(0),
        *write.stride(), **shape, **blocks, BLOCK_V=block_v, **LAUNCH,
    )  # fmt: skip
    return o


@triton.jit
def _fold_head(
    state_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr,
    head, start, count, src, dst, state_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the state of one head of one request with ``count`` ring entries (later tokens), from ``start`` on.

    Reads the state in slot ``src`` and writes it to slot ``dst``. The ring pointers point to the request's ring.
    """
    j, k, d = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    real_J, real_K = j < count, k < KEY_DIM
    k_JK, left_JD, fade_D = ring_keys(
        ring_k_ptr + head // GROUP * KEY_DIM + k, ring_g_ptr + head * DECAYS + d, start, count, j,
        real_K, d < DECAYS, HEADS // GROUP * KEY_DIM, HEADS * DECAYS, CAPACITY,
    )  # fmt: skip
    k_JK = unit(k_JK) * left_JD
    u_place_J = ((start + j) % CAPACITY).to(tl.int64) * (HEADS * VALUE_DIM)
    for first in range(0, VALUE_DIM, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        lane_V, real_V = head * VALUE_DIM + v, v < VALUE_DIM
        u_JV = load_tile(ring_u_ptr + lane_V, u_place_J, real_J, real_V).to(tl.float32)
        read_K = k < unless_null(src, KEY_DIM)
        state_VK = load_tile(state_ptr + src * state_slot + k, lane_V * KEY_DIM, real_V, read_K).to(tl.float32)
        state_VK = tl.dot(tl.trans(u_JV), k_JK, state_VK * fade_D[None, :], input_precision=PRECISION)
        tl.debug_barrier()  # source and destination may be one slot
        store_tile(state_ptr + dst * state_slot + k, lane_V * KEY_DIM, state_VK, real_V, real_K)


@triton.jit(do_not_specialize=["num_rows"])
def fold_kernel(
    state_ptr, conv_ptr, window_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr,
    ring_row_ptr, ring_start_ptr, count_ptr, src_ptr, dst_ptr, offset_ptr,
    state_layer, state_slot, conv_layer, conv_slot, conv_entry, window_layer, window_row, window_entry,
    ring_k_layer, ring_k_row, ring_u_layer, ring_u_row, ring_g_layer, ring_g_row, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, KEEP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add ring entries (later tokens) to saved states: S <- decay S + sum_j decay_j u_j k_j^T; copy the conv windows.

    Grid (heads + tiles of conv channels, groups of requests, layers). Occupancy on sm_90: at least 2 blocks per SM.
    Pointers: arguments of `ops.delta_fold_ring` (window: `request_conv`; src, dst: slots). Writes state and conv.
    """
    part, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    for begin in range(0, num_rows, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        dst_R = rows_of_share(dst_ptr, r, num_rows)
        row = next_row(dst_R, r, -1)
        while row < num_rows:
            dst, ring_row = tl.load(dst_ptr + row).to(tl.int64), tl.load(ring_row_ptr + row).to(tl.int64)
            if part < HEADS:
                _fold_head(
                    state_ptr + layer * state_layer, ring_k_ptr + layer * ring_k_layer + ring_row * ring_k_row,
                    ring_u_ptr + layer * ring_u_layer + ring_row * ring_u_row,
                    ring_g_ptr + layer * ring_g_layer + ring_row * ring_g_row,
                    part, tl.load(ring_start_ptr + row), tl.load(count_ptr + row),
                    tl.load(src_ptr + row).to(tl.int64), dst, state_slot,
                    HEADS, GROUP, VALUE_DIM, KEY_DIM, DECAYS, CAPACITY, BLOCK_J, BLOCK_V, BLOCK_K, BLOCK_D, PRECISION,
                )  # fmt: skip
            else:
                row_window_ptr = window_ptr + layer * window_layer + ring_row * window_row
                keep_window(
                    row_window_ptr, conv_ptr + layer * conv_layer + dst * conv_slot, tl.load(offset_ptr + row),
                    part - HEADS, window_entry, conv_entry, KEEP, CHANNELS, BLOCK_E, BLOCK_C,
                )  # fmt: skip
            row = next_row(dst_R, r, row)


def delta_fold_ring(
    state, conv_state, request_conv, ring_k, ring_u, ring_g, ring_row, ring_start, count, src, dst, page_offset,
):  # fmt: skip
    """Add ring entries (later tokens) to saved states, and copy conv windows; arguments of `ops.delta_fold_ring`.
    ring_row, ring_start, count: entries to add to state slots ``src``, giving ``dst``. page_offset: first window entry.
    """
    require_dense(1, conv_state=conv_state, request_conv=request_conv)
    require_dense(3, state=state, ring_k=ring_k, ring_u=ring_u)
    require_dense(ring_g.dim() - 2, ring_g=ring_g)
    shape, layers, capacity = shape_options(ring_k, ring_u, ring_g), ring_u.shape[0], ring_u.shape[2]
    keep, channels = conv_state.shape[2:]
    blocks = block_options(shape["KEY_DIM"], shape["DECAYS"])
    entries = _FOLD_ENTRIES // 2 if ring_k.dtype == torch.float32 else _FOLD_ENTRIES
    block_v = state_tile(shape["VALUE_DIM"], max(16, entries // blocks["BLOCK_K"]))
    options = fold_options(capacity, keep, ring_k.dtype)
    parts, num_rows = shape["HEADS"] + cdiv(channels, options["BLOCK_C"]), dst.shape[0]
    fold_kernel[(parts, row_shares(num_rows, parts * layers), layers)](
        state, conv_state, request_conv, ring_k, ring_u, ring_g,
        ring_row, ring_start, count, src, dst, page_offset,
        *state.stride()[:2], *conv_state.stride()[:3], *request_conv.stride()[:3],
        *ring_k.stride()[:2], *ring_u.stride()[:2], *ring_g.stride()[:2], num_rows,
        CAPACITY=capacity, KEEP=keep, CHANNELS=channels, BLOCK_V=block_v, **shape, **blocks, **options,
    )  # fmt: skip
