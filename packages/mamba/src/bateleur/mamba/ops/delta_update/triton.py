"""The delta rules of decodes, writing a state per token: one program per request, head and tile of value channels.

A program reads its tile of the state once, and keeps it in registers for all tokens of the request. A value channel
needs all key channels but no other value channel, so the state is split by value channels.
Legend: V value channels of a head's tile, K key channels, D decays of a head (1 or K).
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import (
    LAUNCH,
    load_tile,
    require_dense,
    sigmoid,
    softplus,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.mamba.ops.shared.triton_delta_rule import block_options, by_head, shape_options
from bateleur.metadata.dispatch import cdiv

_TILE_ENTRIES = 2048  # of a state, per program: four loads of 16 bytes per thread in float32


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

    Grid (heads x tiles of values, requests + 1): the last programs zero the tokens of no request.
    Occupancy on sm_90: at least 7 blocks per SM.
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


@cache
def tile_options(value_dim: int, key_dim: int, decays: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `update_kernel`."""
    blocks = block_options(key_dim, decays, least=1)
    block_v = min(triton.next_power_of_2(value_dim), max(1, _TILE_ENTRIES // blocks["BLOCK_K"]))
    return LAUNCH | blocks | {"BLOCK_V": block_v}


def delta_state_update(
    state, q, k, v, a, b, A, dt_bias, query_start_loc, max_query_len, read, write, beta_scale,
):  # fmt: skip
    """Run a delta rule over 1 to 1 + drafts tokens per request. No row may write a slot that another row reads."""
    require_dense(1, q=q, k=k, v=v, a=a, b=b, A=A)
    require_dense(dt_bias.dim(), dt_bias=dt_bias)
    require_dense(3, state=state)
    num_rows, shape = read.shape[0], shape_options(q, v, a)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    options = tile_options(shape["VALUE_DIM"], shape["KEY_DIM"], shape["DECAYS"])
    tiles = cdiv(shape["VALUE_DIM"], options["BLOCK_V"])
    update_kernel[(shape["HEADS"] * tiles, num_rows + 1)](
        state, q, k, v, a, b, A, dt_bias, query_start_loc, read, write, o,
        num_rows, v.shape[0], min(max_query_len, write.shape[1]), beta_scale,
        state.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *by_head(a), b.stride(0), *write.stride(),
        **shape, **options,
    )  # fmt: skip
    return o
