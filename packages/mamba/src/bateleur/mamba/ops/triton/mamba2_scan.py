"""The Mamba-2 recurrence over prefills by chunks (state-space duality, Dao and Gu, 2024), in four kernels.

1. steps: step sizes, and the running sum of A times step in each chunk, both (H, T);
2. adds: the contribution of each chunk to the state, (chunks, H, P, N) in float32;
3. passes: the recurrence over the chunks of a request; writes states to the slots `chunk_write`;
4. outputs: computed from the state before a chunk and the tokens of the chunk.

Legend: H heads, T tokens, Q tokens of a chunk, M queries and K keys among them, P channels of a head, N state entries,
S entries of a head's state.
"""

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.triton.tiles import (
    INDICES,
    LAUNCH,
    load_tile,
    precision,
    require_dense,
    state_tile,
    step_size,
    store_tile,
    unless_null,
)
from bateleur.metadata.dispatch import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def steps_kernel(
    dt_ptr, A_ptr, bias_ptr, chunk_starts_ptr, step_ptr, sum_ptr, num_tokens, dt_token, dt_min, dt_max,
    HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute step sizes clamp(softplus(dt + bias)) and running sums of A * step in each chunk, (heads, tokens) each.

    Reads arguments of `ops.ssd_scan_varlen` (bias: `dt_bias`); writes ``step_ptr`` and ``sum_ptr``.
    Grid (chunks, tiles of heads). Occupancy on sm_90: at least 7 blocks per SM.
    """
    first = tl.load(chunk_starts_ptr + tl.program_id(0))
    length = tl.load(chunk_starts_ptr + tl.program_id(0) + 1) - first
    q, h = tl.arange(0, BLOCK_Q), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    real_H = h < HEADS
    token_Q = (first + q).to(tl.int64)
    dt_QH = load_tile(dt_ptr + h, token_Q * dt_token, q < length, real_H)
    bias_H = tl.load(bias_ptr + h, mask=real_H, other=0).to(tl.float32)
    A_H = tl.load(A_ptr + h, mask=real_H, other=0).to(tl.float32)
    step_QH = step_size(dt_QH, bias_H[None, :], dt_min, dt_max)
    sum_QH = tl.cumsum(step_QH * A_H[None, :], 0)
    line_H = h.to(tl.int64) * num_tokens
    store_tile(step_ptr + line_H, token_Q, step_QH, q < length, real_H)
    store_tile(sum_ptr + line_H, token_Q, sum_QH, q < length, real_H)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def adds_kernel(
    x_ptr, B_ptr, step_ptr, sum_ptr, chunk_starts_ptr, added_ptr, num_tokens, x_token, x_head, B_token, B_group,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the contribution of each chunk's tokens to the state, (chunks, *state shape) in float32.

    Reads arguments of `ops.ssd_scan_varlen`, ``step_ptr`` and ``sum_ptr`` (from `steps_kernel`); writes ``added_ptr``.
    Grid (heads x tiles of channels, chunks). Weighted bfloat16 values are split into two parts, so that states keep
    float32 precision. Occupancy on sm_90: at least 3 blocks per SM.
    """
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head, chunk = tl.program_id(0) // TILES, tl.program_id(1).to(tl.int64)
    p, n = tl.program_id(0) % TILES * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    real_P, real_N = p < HEAD_DIM, n < STATE
    first = tl.load(chunk_starts_ptr + chunk)
    last = tl.load(chunk_starts_ptr + chunk + 1)
    if first >= last:
        return
    step_ptr += head.to(tl.int64) * num_tokens
    sum_ptr += head.to(tl.int64) * num_tokens
    total = tl.load(sum_ptr + last - 1)
    x_P, B_N = x_ptr + head * x_head + p, B_ptr + head // GROUP * B_group + n
    added_NP = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    for begin in range(first, last, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        real_K, token_K = k < last, k.to(tl.int64)
        step_K = tl.load(step_ptr + k, mask=real_K, other=0)
        sum_K = tl.load(sum_ptr + k, mask=real_K, other=0)
        x_KP = load_tile(x_P, token_K * x_token, real_K, real_P)
        B_KN = load_tile(B_N, token_K * B_token, real_K, real_N)
        weight_K = tl.exp(tl.minimum(total - sum_K, 0.0)) * step_K
        u_KP = x_KP.to(tl.float32) * weight_K[:, None]
        high_KP = u_KP.to(x_KP.dtype)
        added_NP = tl.dot(tl.trans(B_KN), high_KP, added_NP, input_precision=PRECISION)
        if x_KP.dtype != tl.float32:
            low_KP = (u_KP - high_KP.to(tl.float32)).to(x_KP.dtype)
            added_NP = tl.dot(tl.trans(B_KN), low_KP, added_NP, input_precision=PRECISION)
    line_P = ((chunk * HEADS + head) * HEAD_DIM + p) * STATE
    store_tile(added_ptr + n, line_P, tl.trans(added_NP), real_P, real_N)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def passes_kernel(
    state_ptr, added_ptr, sum_ptr, chunk_starts_ptr, row_chunk_ptr, read_ptr, chunk_write_ptr, entering_ptr,
    num_tokens, state_slot, SIZE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk, and write the state after a chunk to its slot: S <- decay S + contribution.

    Grid (tiles of a state, heads, requests); SIZE: elements of a head's state.
    Occupancy on sm_90: at least 25 blocks per SM. Reads arguments of `ops.ssd_scan_varlen`, ``added_ptr`` (from
    `adds_kernel`) and ``sum_ptr`` (from `steps_kernel`). Writes states before chunks to ``entering_ptr``, and states
    after chunks to ``state_ptr`` (slots `chunk_write`).
    """
    head, row = tl.program_id(1), tl.program_id(2)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    real_S = s < SIZE
    first, end = tl.load(row_chunk_ptr + row), tl.load(row_chunk_ptr + row + 1)
    if first >= end:
        return
    slot = tl.load(read_ptr + row).to(tl.int64)
    in_slot_S = head * SIZE + s
    state_S = tl.load(state_ptr + slot * state_slot + in_slot_S, mask=s < unless_null(slot, SIZE), other=0)
    state_S = state_S.to(tl.float32)
    tl.debug_barrier()  # a chunk may write the slot that its row reads
    sum_ptr += head.to(tl.int64) * num_tokens - 1
    for chunk in range(first, end):
        begin, last = tl.load(chunk_starts_ptr + chunk), tl.load(chunk_starts_ptr + chunk + 1)
        size = tl.where(last > begin, SIZE, 0)
        at_S = (chunk * tl.num_programs(1) + head).to(tl.int64) * SIZE + s
        added_S = tl.load(added_ptr + at_S, mask=s < size, other=0)
        fade = tl.exp(tl.load(sum_ptr + last, mask=last > begin, other=0))
        tl.store(entering_ptr + at_S, state_S.to(entering_ptr.dtype.element_ty), mask=real_S)
        state_S = state_S * fade + added_S
        slot = tl.load(chunk_write_ptr + chunk).to(tl.int64)
        target_S = state_ptr + slot * state_slot + in_slot_S
        tl.store(target_S, state_S.to(state_ptr.dtype.element_ty), mask=s < unless_null(slot, size))


@triton.jit
def _own_tokens(
    y_MP, C_MN, sum_M, m, x_P, B_N, step_ptr, sum_ptr, first, length, x_token, B_token, real_P, real_N,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the outputs ``y_MP`` plus the contributions of the chunk's tokens up to each of the queries ``m``.

    ``sum_M``: running sums of A * step at the queries. ``x_P``, ``B_N``: pointers by channel to token 0. ``first``,
    ``length``: first token and number of tokens of the chunk. ``step_ptr``, ``sum_ptr``: from `steps_kernel`.
    """
    for begin in range(0, tl.minimum(length, tl.max(m, 0) + 1), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        real_K, token_K = k < length, (first + k).to(tl.int64)
        step_K = tl.load(step_ptr + token_K, mask=real_K, other=0)
        sum_K = tl.load(sum_ptr + token_K, mask=real_K, other=0)
        B_KN = load_tile(B_N, token_K * B_token, real_K, real_N)
        x_KP = load_tile(x_P, token_K * x_token, real_K, real_P)
        CB_MK = tl.dot(C_MN, tl.trans(B_KN), input_precision=PRECISION)
        # Above the diagonal the difference is positive, and its exponential could overflow.
        decay_MK = tl.exp(tl.minimum(sum_M[:, None] - sum_K[None, :], 0.0)) * step_K[None, :]
        weight_MK = tl.where((k[None, :] <= m[:, None]) & real_K[None, :], CB_MK * decay_MK, 0.0)
        y_MP = tl.dot(weight_MK.to(x_KP.dtype), x_KP, y_MP, input_precision=PRECISION)
    return y_MP


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_tokens"], do_not_specialize_on_alignment=INDICES)
def outputs_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, step_ptr, sum_ptr, entering_ptr, starts_ptr, chunk_starts_ptr, y_ptr,
    num_rows, num_chunks, num_tokens, x_token, x_head, B_token, B_group, C_token, C_group,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of each chunk from the chunk's tokens and the state before the chunk, plus D x.

    Reads arguments of `ops.ssd_scan_varlen` (starts: `query_start_loc`), ``step_ptr`` and ``sum_ptr`` (from
    `steps_kernel`), and ``entering_ptr`` (states before chunks, from `passes_kernel`); writes ``y_ptr``.
    Grid (heads x tiles of queries, chunks + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 1 block per SM.
    """
    head, tile, chunk = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    m, p, n = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    real_P, real_N = p < HEAD_DIM, n < STATE
    y_P = y_ptr + head * HEAD_DIM + p
    if chunk == num_chunks:
        for begin in range(tl.load(starts_ptr + num_rows), num_tokens, TILES * BLOCK_M):
            token_M = (begin + m).to(tl.int64)
            zero_MP = tl.zeros([BLOCK_M, BLOCK_P], y_ptr.dtype.element_ty)
            store_tile(y_P, token_M * (HEADS * HEAD_DIM), zero_MP, token_M < num_tokens, real_P)
        return
    first = tl.load(chunk_starts_ptr + chunk)
    length = tl.load(chunk_starts_ptr + chunk + 1) - first
    if tile * BLOCK_M >= length:
        return
    real_M, token_M = m < length, (first + m).to(tl.int64)
    step_ptr += head.to(tl.int64) * num_tokens
    sum_ptr += head.to(tl.int64) * num_tokens
    sum_M = tl.load(sum_ptr + token_M, mask=real_M, other=0)
    C_MN = load_tile(C_ptr + head // GROUP * C_group + n, token_M * C_token, real_M, real_N)
    line_P = ((chunk.to(tl.int64) * HEADS + head) * HEAD_DIM + p) * STATE
    entering_PN = load_tile(entering_ptr + n, line_P, real_P, real_N)
    y_MP = tl.dot(C_MN, tl.trans(entering_PN), input_precision=PRECISION) * tl.exp(sum_M)[:, None]
    x_P, B_N = x_ptr + head * x_head + p, B_ptr + head // GROUP * B_group + n
    y_MP = _own_tokens(
        y_MP, C_MN, sum_M, m, x_P, B_N, step_ptr, sum_ptr, first, length, x_token, B_token, real_P, real_N,
        BLOCK_K, PRECISION,
    )  # fmt: skip
    y_MP += tl.load(D_ptr + head).to(tl.float32) * load_tile(x_P, token_M * x_token, real_M, real_P).to(tl.float32)
    store_tile(y_P, token_M * (HEADS * HEAD_DIM), y_MP, real_M, real_P)


def ssd_scan_varlen(
    x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, chunk_start_loc, chunk_row, row_chunk_loc,
    max_chunks_per_row, chunk_size, read, chunk_write, dt_min, dt_max,
):  # fmt: skip
    """Mamba-2 over prefills, in four launches; same arguments and result as `ops.ssd_scan_varlen`.

    read, chunk_write: slots of states before requests, and after chunks. No request may write a slot another reads.
    """
    del max_chunks_per_row
    require_dense(1, x=x, dt=dt, B=B, C=C)
    require_dense(3, ssm_state=ssm_state)
    num_rows, num_chunks, (num_tokens, heads, head_dim) = read.shape[0], chunk_row.shape[0], x.shape
    groups, size = B.shape[1], B.shape[2]
    if num_tokens == 0 or num_chunks == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    # Tiles are small for float32, which has no tensor cores.
    full = x.dtype == torch.float32
    block_n, block_p = max(16, next_power_of_2(size)), max(16, next_power_of_2(head_dim))
    longest, own_p = max(16, next_power_of_2(chunk_size)), state_tile(head_dim, 32 if full else 64)
    block_m = min(longest, 16 if full else 64)
    # 32 keys for wide heads, so that two programs fit on a multiprocessor
    block_k = min(longest, 16 if full else 64 if block_p * block_n <= 8192 else 32)
    shape = {"HEADS": heads, "GROUP": heads // groups, "HEAD_DIM": head_dim, "STATE": size, "BLOCK_N": block_n}
    products = shape | {"PRECISION": precision(x.dtype), "num_stages": 1 if full else 2, "enable_fp_fusion": True}
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # A multiple of four heads aligns `total` to 16 bytes, so that Triton compiles one kernel.
    step, total = torch.empty((2, heads + -heads % 4, num_tokens), dtype=torch.float32, device=x.device)
    added = torch.empty((num_chunks, heads, head_dim, size), dtype=torch.float32, device=x.device)
    entering = torch.empty(added.shape, dtype=x.dtype, device=x.device)
    block_h, block_s = 8, 512
    steps_kernel[(num_chunks, cdiv(heads, block_h))](
        dt, A, dt_bias, chunk_start_loc, step, total, num_tokens, dt.stride(0), dt_min, dt_max,
        HEADS=heads, BLOCK_Q=next_power_of_2(chunk_size), BLOCK_H=block_h, **LAUNCH,
    )  # fmt: skip
    adds_kernel[(heads * cdiv(head_dim, own_p), num_chunks)](
        x, B, step, total, chunk_start_loc, added, num_tokens, *x.stride()[:2], *B.stride()[:2],
        BLOCK_K=min(longest, 32 if full else 64), BLOCK_P=own_p, num_warps=4, **products,
    )  # fmt: skip
    passes_kernel[(cdiv(head_dim * size, block_s), heads, num_rows)](
        ssm_state, added, total, chunk_start_loc, row_chunk_loc, read, chunk_write, entering,
        num_tokens, ssm_state.stride(0), SIZE=head_dim * size, BLOCK_S=block_s, **LAUNCH | {"num_warps": 2},
    )  # fmt: skip
    tiles = cdiv(chunk_size, block_m)
    outputs_kernel[(heads * tiles, num_chunks + 1)](
        x, B, C, D, step, total, entering, query_start_loc, chunk_start_loc, y,
        num_rows, num_chunks, num_tokens, *x.stride()[:2], *B.stride()[:2], *C.stride()[:2],
        TILES=tiles, BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_P=block_p, num_warps=8 if full else 4, **products,
    )  # fmt: skip
    return y
