"""The Mamba-2 recurrence of decodes (state policies SLOTS and FOLD), and folds (ring entries added to states).

Programs of `update_kernel` and `replay_kernel` have one request, head and tile of channels, and read their tile of the
state once. update keeps it in registers for all tokens: the time is that of reading one state and of writing one state
per token. replay computes small matrix products of saved state, ring entries and new tokens, where the new tokens are
padded to 16. fold is one launch for all requests and layers. Most requests have no fold (`dst` is 0), so programs skip
them: see `rows_of_share`.

Legend: P channels of a head's tile, N state entries, T new tokens, J ring entries (in replay followed by the new
tokens), R rows (requests).
"""

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.triton.tiles import (
    LAUNCH,
    fold_options,
    keep_window,
    load_tile,
    next_row,
    precision,
    require_dense,
    rounded,
    row_shares,
    rows_of_share,
    state_tile,
    step_size,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.metadata.dispatch import cdiv, next_power_of_2

_UPDATE_ENTRIES = 2048  # of a state, per program: four loads of 16 bytes per thread in float32
_TILE_ENTRIES = 8192  # in replay and fold; half of it for float32, which has no tensor cores and would spill registers


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def update_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, starts_ptr, read_ptr, write_ptr, y_ptr,
    num_rows, num_tokens, max_query_len, dt_min, dt_max,
    state_slot, x_token, x_head, dt_token, B_token, B_group, C_token, C_group, write_row, write_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Run the recurrence over the tokens of each decode, and write the state after each token to its state slot.

    Grid (heads x tiles of channels, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 8 blocks per SM. Pointers: arguments of `ops.selective_state_update` (starts:
    `query_start_loc`; read, write: slots of old and new states). Writes y and state.
    """
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    p = tl.program_id(0) % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    real_P, real_N = p < HEAD_DIM, n < STATE
    lane_P = head * HEAD_DIM + p
    slot = tl.load(read_ptr + row, mask=row < num_rows, other=0).to(tl.int64)  # all loads in flight at once
    first = tl.load(starts_ptr + row)
    if row == num_rows:
        zero_tail(y_ptr, first, num_tokens, HEADS * HEAD_DIM, lane_P, real_P)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    read_N = n < unless_null(slot, STATE)
    state_PN = load_tile(state_ptr + slot * state_slot + n, lane_P * STATE, real_P, read_N).to(tl.float32)
    tl.debug_barrier()  # a row may write the slot that it reads
    group = head // GROUP
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for i in range(count):
        token = first.to(tl.int64) + i
        step = step_size(tl.load(dt_ptr + token * dt_token + head), bias, dt_min, dt_max)
        x_P = tl.load(x_ptr + token * x_token + head * x_head + p, mask=real_P, other=0).to(tl.float32)
        B_N = tl.load(B_ptr + token * B_token + group * B_group + n, mask=real_N, other=0).to(tl.float32)
        C_N = tl.load(C_ptr + token * C_token + group * C_group + n, mask=real_N, other=0).to(tl.float32)
        state_PN = state_PN * tl.exp(A * step) + (x_P * step)[:, None] * B_N[None, :]
        y_P = tl.sum(state_PN * C_N[None, :], 1) + D * x_P
        y_at_P = y_ptr + token * (HEADS * HEAD_DIM) + lane_P
        tl.store(y_at_P, y_P.to(y_ptr.dtype.element_ty), mask=real_P)
        slot = tl.load(write_ptr + row * write_row + i * write_token).to(tl.int64)
        write_N = n < unless_null(slot, STATE)
        store_tile(state_ptr + slot * state_slot + n, lane_P * STATE, state_PN, real_P, write_N)


def selective_state_update(
    ssm_state, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len, read, write, dt_min, dt_max,
):  # fmt: skip
    """Mamba-2 over decodes, from state slots ``read`` to ``write``; arguments of `ops.selective_state_update`."""
    require_dense(1, x=x, dt=dt, B=B, C=C)
    require_dense(3, ssm_state=ssm_state)
    num_rows, (num_tokens, heads, head_dim) = read.shape[0], x.shape
    groups, state_size = B.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = next_power_of_2(state_size)
    block_p = min(next_power_of_2(head_dim), max(1, _UPDATE_ENTRIES // block_n))
    update_kernel[(heads * cdiv(head_dim, block_p), num_rows + 1)](
        ssm_state, x, dt, A, B, C, D, dt_bias, query_start_loc, read, write, y,
        num_rows, num_tokens, min(max_query_len, write.shape[1]), dt_min, dt_max,
        ssm_state.stride(0), *x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], *write.stride(),
        HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, STATE=state_size, BLOCK_P=block_p, BLOCK_N=block_n,
        **LAUNCH,
    )  # fmt: skip
    return y


@triton.jit
def _entries(old_ptr_L, new_ptr_L, place_J, token_J, old_J, new_J, real_L):
    """Load (J, L) float32: ring entries (older inputs) where ``old_J``, new tokens where ``new_J``, else zeros.

    ``old_ptr_L + place_J`` and ``new_ptr_L + token_J`` are the addresses of their L numbers, masked by ``real_L``.
    """
    old_JL = load_tile(old_ptr_L, place_J, old_J, real_L).to(tl.float32)
    return tl.where(new_J[:, None], load_tile(new_ptr_L, token_J, new_J, real_L).to(tl.float32), old_JL)


@triton.jit
def _weights(CB_TJ, g_J, step_J, length, t, j):
    """Return the decay from the saved state to each query (T,), and the weight of each entry for each query (T, J).

    Entries are ``length`` ring entries (older inputs), then the new tokens; log decays ``g_J``, step sizes ``step_J``.
    ``CB_TJ``: products of C of each query with B of each entry. ``t``, ``j``: indices of queries and entries.
    Sums for queries and entries add the same numbers in the same order, so the decay of a query to itself is exactly 1.
    """
    sum_J = tl.sum(tl.where(j[:, None] >= j[None, :], g_J[None, :], 0.0), 1)
    sum_T = tl.sum(tl.where(length + t[:, None] >= j[None, :], g_J[None, :], 0.0), 1)
    decay_TJ = tl.exp(tl.minimum(sum_T[:, None] - sum_J[None, :], 0.0))
    seen_TJ = length + t[:, None] >= j[None, :]
    return tl.exp(sum_T), tl.where(seen_TJ, CB_TJ * decay_TJ * step_J[None, :], 0.0)


@triton.jit
def _add_new(y_TP, weight_TJ, x_P, x_token, real_P, length, count, t, j):
    """Add the new tokens to the outputs one by one: in a matrix product, a NaN draft would be multiplied by zero, and
    the result would be NaN for earlier tokens.

    ``x_P``: pointers to the first of ``count`` new tokens. ``x_token``: stride of tokens. The others: see `_weights`.
    """
    for i in range(count):
        own_P = tl.load(x_P + i * x_token, mask=real_P, other=0).to(tl.float32)
        weight_T = tl.sum(tl.where(j[None, :] == length + i, weight_TJ, 0.0), 1)
        y_TP += tl.where(t[:, None] >= i, weight_T[:, None] * own_P[None, :], 0.0)
    return y_TP


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def replay_kernel(
    state_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr,
    starts_ptr, slot_ptr, ring_row_ptr, ring_start_ptr, ring_len_ptr, y_ptr,
    num_rows, num_tokens, max_query_len, dt_min, dt_max,
    state_slot, ring_x_row, ring_dt_row, ring_B_row, x_token, x_head, dt_token, B_token, B_group, C_token, C_group,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute outputs of each decode from its saved state and its ring (buffer of later inputs), and append its tokens.

    Grid (heads x tiles of channels, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 2 blocks per SM. Pointers: arguments of `ops.replay_update` (starts: `query_start_loc`;
    slot: of the saved state). Writes y and the rings.
    """
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head, tile, row = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    p, n = tile * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    t, j = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_J)
    real_P, real_N = p < HEAD_DIM, n < STATE
    lane_P, group = head * HEAD_DIM + p, head // GROUP
    first, there = tl.load(starts_ptr + row), row < num_rows  # all loads in flight at once
    slot = tl.load(slot_ptr + row, mask=there, other=0).to(tl.int64)
    ring_row = tl.load(ring_row_ptr + row, mask=there, other=0).to(tl.int64)
    ring_start = tl.load(ring_start_ptr + row, mask=there, other=0)
    length = unless_null(ring_row, tl.load(ring_len_ptr + row, mask=there, other=0)).to(tl.int32)
    if row == num_rows:
        zero_tail(y_ptr, first, num_tokens, HEADS * HEAD_DIM, lane_P, real_P)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    read_N = n < unless_null(slot, STATE)
    state_PN = load_tile(state_ptr + slot * state_slot + n, lane_P * STATE, real_P, read_N).to(tl.float32)
    place_J = ((ring_start + j) % CAPACITY).to(tl.int64)
    token_J, token_T = (first + j - length).to(tl.int64), (first + t).to(tl.int64)
    old_J, new_J, real_T = j < length, (j >= length) & (j < length + count), t < count

    dt_J = ring_dt_ptr + ring_row * ring_dt_row + place_J * HEADS + head
    raw_J = tl.load(dt_ptr + token_J * dt_token + head, mask=new_J, other=0)
    step_J = step_size(raw_J, tl.load(bias_ptr + head).to(tl.float32), dt_min, dt_max)
    step_J = tl.where(new_J, step_J, tl.load(dt_J, mask=old_J, other=0))
    ring_B_N = ring_B_ptr + ring_row * ring_B_row + group * STATE + n
    B_place_J = place_J * (HEADS // GROUP * STATE)
    ring_x_P, x_place_J = ring_x_ptr + ring_row * ring_x_row + lane_P, place_J * (HEADS * HEAD_DIM)
    x_P = x_ptr + head * x_head + p
    B_JN = _entries(ring_B_N, B_ptr + group * B_group + n, B_place_J, token_J * B_token, old_J, new_J, real_N)
    x_JP = _entries(ring_x_P, x_P, x_place_J, token_J * x_token, old_J, new_J, real_P)
    C_TN = load_tile(C_ptr + group * C_group + n, token_T * C_token, real_T, real_N).to(tl.float32)
    CB_TJ = tl.dot(C_TN, tl.trans(B_JN), input_precision=PRECISION)
    fade_T, weight_TJ = _weights(CB_TJ, tl.load(A_ptr + head).to(tl.float32) * step_J, step_J, length, t, j)
    y_TP = tl.dot(C_TN, tl.trans(rounded(state_PN, PRECISION)), input_precision=PRECISION) * fade_T[:, None]
    old_JP = tl.where(old_J[:, None], x_JP, 0.0)
    y_TP = tl.dot(rounded(weight_TJ, PRECISION), old_JP, y_TP, input_precision=PRECISION)
    y_TP = _add_new(y_TP, weight_TJ, x_P + first.to(tl.int64) * x_token, x_token, real_P, length, count, t, j)
    x_TP = load_tile(x_P, token_T * x_token, real_T, real_P).to(tl.float32)
    y_TP += tl.load(D_ptr + head).to(tl.float32) * x_TP
    store_tile(y_ptr + lane_P, token_T * (HEADS * HEAD_DIM), y_TP, real_T, real_P)

    kept_J = new_J & (j < unless_null(ring_row, CAPACITY))
    store_tile(ring_x_P, x_place_J, x_JP, kept_J, real_P)
    if tile == 0:
        tl.store(dt_J, step_J, mask=kept_J)
        if head % GROUP == 0:
            store_tile(ring_B_N, B_place_J, B_JN, kept_J, real_N)


def replay_update(
    ssm_state, ring_x, ring_dt, ring_B, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len,
    slot, ring_row, ring_start, ring_len, dt_min, dt_max,
):  # fmt: skip
    """Mamba-2 over decodes, from saved states and rings of later inputs; arguments of `ops.replay_update`.
    slot: saved state. ring_row, ring_start, ring_len: ring, first entry and number of entries after the state.
    """
    require_dense(1, x=x, dt=dt, B=B, C=C)
    require_dense(2, ring_dt=ring_dt)
    require_dense(3, ssm_state=ssm_state, ring_x=ring_x, ring_B=ring_B)
    num_rows, (num_tokens, heads, head_dim) = slot.shape[0], x.shape
    (groups, state_size), capacity = B.shape[1:], ring_dt.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    exact = x.dtype == torch.float32  # needs more registers: larger tiles or four warps would spill
    block_n = max(16, next_power_of_2(state_size))
    block_p = state_tile(head_dim, max(16, _TILE_ENTRIES // block_n // (2 if exact else 1)))
    options = LAUNCH | {"PRECISION": precision(x.dtype), "num_warps": 8 if exact else 4}
    replay_kernel[(heads * cdiv(head_dim, block_p), num_rows + 1)](
        ssm_state, ring_x, ring_dt, ring_B, x, dt, A, B, C, D, dt_bias,
        query_start_loc, slot, ring_row, ring_start, ring_len, y,
        num_rows, num_tokens, max_query_len, dt_min, dt_max,
        ssm_state.stride(0), ring_x.stride(0), ring_dt.stride(0), ring_B.stride(0),
        *x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2],
        HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, STATE=state_size, CAPACITY=capacity,
        BLOCK_T=max(16, next_power_of_2(max_query_len)), BLOCK_J=max(16, next_power_of_2(capacity)),
        BLOCK_P=block_p, BLOCK_N=block_n, **options,
    )  # fmt: skip
    return y


@triton.jit
def _fold_head(
    state_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, A_ptr,
    head, ring_row, start, count, src, dst, state_slot, ring_x_row, ring_dt_row, ring_B_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j, n = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_N)
    real_J, real_N = j < count, n < STATE
    place_J = ((start + j) % CAPACITY).to(tl.int64)
    step_J = tl.load(ring_dt_ptr + ring_row * ring_dt_row + place_J * HEADS + head, mask=real_J, other=0)
    g_J = tl.load(A_ptr + head).to(tl.float32) * step_J
    later_J = tl.sum(tl.where(j[None, :] > j[:, None], g_J[None, :], 0.0), 1)  # log decay after each entry
    weight_J = tl.exp(later_J) * step_J
    ring_B_N = ring_B_ptr + ring_row * ring_B_row + head // GROUP * STATE + n
    B_JN = load_tile(ring_B_N, place_J * (HEADS // GROUP * STATE), real_J, real_N).to(tl.float32)
    fade = tl.exp(tl.sum(g_J, 0))
    for first in range(0, HEAD_DIM, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        lane_P, real_P = head * HEAD_DIM + p, p < HEAD_DIM
        ring_x_P = ring_x_ptr + ring_row * ring_x_row + lane_P
        x_JP = load_tile(ring_x_P, place_J * (HEADS * HEAD_DIM), real_J, real_P).to(tl.float32)
        read_N = n < unless_null(src, STATE)
        state_PN = load_tile(state_ptr + src * state_slot + n, lane_P * STATE, real_P, read_N).to(tl.float32)
        u_PJ = tl.trans(x_JP * weight_J[:, None])
        state_PN = tl.dot(u_PJ, B_JN, state_PN * fade, input_precision=PRECISION)
        tl.debug_barrier()  # source and destination may be one slot
        store_tile(state_ptr + dst * state_slot + n, lane_P * STATE, state_PN, real_P, real_N)


@triton.jit(do_not_specialize=["num_rows"])
def fold_kernel(
    state_ptr, conv_ptr, window_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, A_ptr,
    ring_row_ptr, ring_start_ptr, count_ptr, src_ptr, dst_ptr, offset_ptr,
    state_layer, state_slot, conv_layer, conv_slot, conv_entry, window_layer, window_row, window_entry,
    ring_x_layer, ring_x_row, ring_dt_layer, ring_dt_row, ring_B_layer, ring_B_row, A_layer, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, CAPACITY: tl.constexpr,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add ring entries (later inputs) to states: S <- decay S + sum_j decay_j dt_j x_j B_j^T; copy the conv windows.

    Grid (heads + tiles of conv channels, groups of requests, layers). Occupancy on sm_90: at least 2 blocks per SM.
    Pointers: arguments of `ops.fold_ring` (window: `request_conv`; src, dst: slots). Writes state and conv.
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
                    state_ptr + layer * state_layer, ring_x_ptr + layer * ring_x_layer,
                    ring_dt_ptr + layer * ring_dt_layer, ring_B_ptr + layer * ring_B_layer, A_ptr + layer * A_layer,
                    part, ring_row, tl.load(ring_start_ptr + row), tl.load(count_ptr + row),
                    tl.load(src_ptr + row).to(tl.int64), dst, state_slot, ring_x_row, ring_dt_row, ring_B_row,
                    HEADS, GROUP, HEAD_DIM, STATE, CAPACITY, BLOCK_J, BLOCK_P, BLOCK_N, PRECISION,
                )  # fmt: skip
            else:
                row_window_ptr = window_ptr + layer * window_layer + ring_row * window_row
                keep_window(
                    row_window_ptr, conv_ptr + layer * conv_layer + dst * conv_slot, tl.load(offset_ptr + row),
                    part - HEADS, window_entry, conv_entry, KEEP, CHANNELS, BLOCK_E, BLOCK_C,
                )  # fmt: skip
            row = next_row(dst_R, r, row)


def fold_ring(
    ssm_state, conv_state, request_conv, ring_x, ring_dt, ring_B, A, ring_row, ring_start, count, src, dst, page_offset,
):  # fmt: skip
    """Add ring entries (later inputs) to saved states, and copy conv windows; arguments of `ops.fold_ring`.
    ring_row, ring_start, count: entries to add to state slots ``src``, giving ``dst``. page_offset: first window entry.
    """
    require_dense(1, conv_state=conv_state, request_conv=request_conv, A=A)
    require_dense(2, ring_dt=ring_dt)
    require_dense(3, ssm_state=ssm_state, ring_x=ring_x, ring_B=ring_B)
    layers, _, capacity, heads, head_dim = ring_x.shape
    groups, state_size = ring_B.shape[3:]
    keep, channels = conv_state.shape[2:]
    block_n = max(16, next_power_of_2(state_size))
    entries = _TILE_ENTRIES // 2 if ring_x.dtype == torch.float32 else _TILE_ENTRIES
    block_p = state_tile(head_dim, max(16, entries // block_n))
    options = fold_options(capacity, keep, ring_x.dtype)
    parts, num_rows = heads + cdiv(channels, options["BLOCK_C"]), dst.shape[0]
    fold_kernel[(parts, row_shares(num_rows, parts * layers), layers)](
        ssm_state, conv_state, request_conv, ring_x, ring_dt, ring_B, A,
        ring_row, ring_start, count, src, dst, page_offset,
        *ssm_state.stride()[:2], *conv_state.stride()[:3], *request_conv.stride()[:3],
        *ring_x.stride()[:2], *ring_dt.stride()[:2], *ring_B.stride()[:2], A.stride(0), num_rows,
        HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, STATE=state_size, CAPACITY=capacity,
        KEEP=keep, CHANNELS=channels, BLOCK_P=block_p, BLOCK_N=block_n, **options,
    )  # fmt: skip
