"""The delta rules of decodes (state policy FOLD), from saved states and rings of later tokens; writes no state.

A program is one warp. It has a tile of value channels of one head and request, reads its tile of the saved state once,
and computes in float32 without tensor cores. A value channel needs all key channels but no other value channel, so
programs do not communicate.

* One token: key and query are multiplied with the saved state and with each ring entry, with the decays. The state
  before the token is not computed, and a program has twice as many value channels.
* Several tokens: the ring entries are added to the state in registers, which is then updated token by token.

Key channels are arranged in lines of 32. A load of 16 bytes per thread then covers 4 value channels, and a sum over key
channels takes 3 shuffles instead of 5. The next ring entry and the next token are loaded in advance.

Legend: V value channels of a tile, C lines of key channels, L key channels of a line, J ring entries, D decays of a
head (1 or C x L).
"""

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.triton.delta_rule import shape_options, to_unit
from bateleur.mamba.ops.triton.tiles import LAUNCH, require_dense, sigmoid, softplus, unless_null, zero_tail
from bateleur.metadata.dispatch import cdiv, next_power_of_2

_LINE = 32  # key channels
_TILE_ENTRIES = 4096  # of a state, for one token a row: 128 registers of a thread, all loads in flight at once
_SEVERAL_TILE_ENTRIES = 2048  # for several tokens a row, which keep the state in registers


@triton.jit
def _load(ptr, lane, SIZE: tl.constexpr, there):
    """Load ``ptr[lane]``; zeros where the index ``lane`` is at least SIZE, and everywhere if ``there`` is false."""
    return tl.load(ptr + lane, mask=lane < tl.where(there, SIZE, 0), other=0)


@triton.jit
def _store(ptr, lane, SIZE: tl.constexpr, value, there):
    """Store ``value`` to ``ptr[lane]`` where the index ``lane`` is below SIZE; nothing if ``there`` is false."""
    tl.store(ptr + lane, value.to(ptr.dtype.element_ty), mask=lane < tl.where(there, SIZE, 0))


@triton.jit
def _unit(x_CL):
    """Normalize a vector of key channels, in C lines of L channels, to length 1 in float32."""
    x_CL = x_CL.to(tl.float32)
    return x_CL * to_unit(tl.sum(x_CL * x_CL))


@triton.jit
def _seen(state_CVL, x_CL):
    """Return the product (V,) of a state (C, V, L) with a key vector (C, L), in C lines of L key channels."""
    return tl.sum(tl.sum(state_CVL * x_CL[:, None, :], 0), 1)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def replay_kernel(
    state_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr,
    starts_ptr, slot_ptr, ring_row_ptr, ring_start_ptr, ring_len_ptr, o_ptr,
    num_rows, num_tokens, max_query_len, beta_scale,
    state_slot, ring_k_row, ring_u_row, ring_g_row,
    q_token, q_group, k_token, k_group, v_token, v_head, a_token, a_head, b_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr,
    CAPACITY: tl.constexpr, ONE_TOKEN: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, DECAY_LINES: tl.constexpr, DECAY_LINE: tl.constexpr,
):  # fmt: skip
    """Compute outputs of each decode from its saved state and its ring (buffer of later tokens), and append its tokens.

    Grid (heads x tiles of values, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 8 blocks per SM. Pointers: arguments of `ops.delta_replay_update` (starts:
    `query_start_loc`; slot: of the saved state). Writes o and the rings. ONE_TOKEN: ``max_query_len`` is 1. Key
    channels are arranged in LINES lines of LINE channels, decays in DECAY_LINES lines of DECAY_LINE.
    """
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    K_ENTRY: tl.constexpr = HEADS // GROUP * KEY_DIM
    U_ENTRY: tl.constexpr = HEADS * VALUE_DIM
    G_ENTRY: tl.constexpr = HEADS * DECAYS
    head, tile, row = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    group = head // GROUP
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    d = tl.arange(0, DECAY_LINES)[:, None] * DECAY_LINE + tl.arange(0, DECAY_LINE)[None, :]
    first, there = tl.load(starts_ptr + row), row < num_rows  # all loads in flight at once
    slot = tl.load(slot_ptr + row, mask=there, other=0).to(tl.int64)
    ring_row = tl.load(ring_row_ptr + row, mask=there, other=0).to(tl.int64)
    start = tl.load(ring_start_ptr + row, mask=there, other=0)
    length = unless_null(ring_row, tl.load(ring_len_ptr + row, mask=there, other=0)).to(tl.int32)
    o_ptr += head * VALUE_DIM
    if row == num_rows:
        zero_tail(o_ptr, first, num_tokens, HEADS * VALUE_DIM, v, v < VALUE_DIM)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return

    # Loaded with two dimensions: with three, Triton 3.6 and 3.9 would choose different layouts.
    line = tl.arange(0, LINES * BLOCK_V)
    line_v, line_k = (tile * BLOCK_V + line % BLOCK_V, (line // BLOCK_V * LINE)[:, None] + tl.arange(0, LINE)[None, :])
    state_at = slot * state_slot + ((head * VALUE_DIM + line_v) * KEY_DIM)[:, None] + line_k
    real = (line_v < VALUE_DIM)[:, None] & (line_k < unless_null(slot, KEY_DIM))
    state_CVL = tl.reshape(tl.load(state_ptr + state_at, mask=real, other=0), [LINES, BLOCK_V, LINE])

    q_ptr += group * q_group
    k_ptr += group * k_group
    v_ptr += head * v_head
    a_ptr += head * a_head
    ring_k_ptr += ring_row * ring_k_row + group * KEY_DIM
    ring_u_ptr += ring_row * ring_u_row + head * VALUE_DIM
    ring_g_ptr += ring_row * ring_g_row + head * DECAYS
    start, token = (start % CAPACITY).to(tl.int32), first.to(tl.int64)
    place = (start + length) % CAPACITY  # ring entry of the first token
    older = tl.where(place == 0, CAPACITY, place) - 1
    raw_k, raw_q = (_load(k_ptr + token * k_token, k, KEY_DIM, True), _load(q_ptr + token * q_token, k, KEY_DIM, True))
    raw_v, raw_a = (_load(v_ptr + token * v_token, v, VALUE_DIM, True), _load(a_ptr + token * a_token, d, DECAYS, True))
    raw_b = tl.load(b_ptr + token * b_token + head)
    A, bias_D = (tl.load(A_ptr + head).to(tl.float32), _load(bias_ptr + head * DECAYS, d, DECAYS, True).to(tl.float32))
    next_k = _load(ring_k_ptr + older * K_ENTRY, k, KEY_DIM, length > 0)
    next_u = _load(ring_u_ptr + older * U_ENTRY, v, VALUE_DIM, length > 0)
    next_g = _load(ring_g_ptr + older * G_ENTRY, d, DECAYS, length > 0)
    if ONE_TOKEN:
        key_CL, query_CL = _unit(raw_k), _unit(raw_q) * KEY_DIM**-0.5
        g_D = A * softplus(raw_a.to(tl.float32) + bias_D)
        left_D = tl.exp(g_D)
        old_V, o_V = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
    else:
        j = tl.arange(0, BLOCK_J)[:, None, None]
        g_JD = tl.load(
            ring_g_ptr + (start + j) % CAPACITY * G_ENTRY + d[None, :, :],
            mask=(j < length) & (d < DECAYS)[None, :, :],
            other=0,
        )
        state_CVL = state_CVL.to(tl.float32) * tl.exp(tl.sum(g_JD, 0))[:, None, :]
        left_D = tl.full([DECAY_LINES, DECAY_LINE], 1.0, tl.float32)

    for i in range(length):  # newest entry first; left_D is the decay after it
        entry_CL, entry_V, entry_D = next_k.to(tl.float32), next_u, next_g
        older, there = tl.where(older == 0, CAPACITY, older) - 1, i + 1 < length
        next_k = _load(ring_k_ptr + older * K_ENTRY, k, KEY_DIM, there)
        next_u = _load(ring_u_ptr + older * U_ENTRY, v, VALUE_DIM, there)
        next_g = _load(ring_g_ptr + older * G_ENTRY, d, DECAYS, there)
        scale = to_unit(tl.sum(entry_CL * entry_CL))
        if DECAYS == 1:
            scale *= tl.sum(left_D)  # has one entry
        else:
            entry_CL *= left_D
        if ONE_TOKEN:
            old_V += entry_V * (scale * tl.sum(entry_CL * key_CL))
            o_V += entry_V * (scale * tl.sum(entry_CL * query_CL))
        else:
            state_CVL += (entry_V * scale)[None, :, None] * entry_CL[:, None, :]
        left_D *= tl.exp(entry_D)

    keeps_g = tl.where(tile == 0, unless_null(ring_row, count), 0)
    keeps_k = tl.where(head % GROUP == 0, keeps_g, 0)
    if ONE_TOKEN:
        state_CVL = state_CVL.to(tl.float32)
        old_V += _seen(state_CVL, key_CL * left_D)
        o_V += _seen(state_CVL, query_CL * left_D)
        u_V = beta_scale * sigmoid(raw_b.to(tl.float32)) * (raw_v.to(tl.float32) - old_V)
        o_V += u_V * tl.sum(key_CL * query_CL)
        _store(o_ptr + token * U_ENTRY, v, VALUE_DIM, o_V, True)
        _store(ring_u_ptr + place * U_ENTRY, v, VALUE_DIM, u_V, ring_row > 0)
        _store(ring_g_ptr + place * G_ENTRY, d, DECAYS, g_D, keeps_g > 0)
        _store(ring_k_ptr + place * K_ENTRY, k, KEY_DIM, raw_k, keeps_k > 0)
        return
    for i in range(count):
        own_k, key_CL, query_CL = raw_k, _unit(raw_k), _unit(raw_q) * KEY_DIM**-0.5
        value_V, beta = raw_v.to(tl.float32), beta_scale * sigmoid(raw_b.to(tl.float32))
        g_D = A * softplus(raw_a.to(tl.float32) + bias_D)
        after, there = token + 1, i + 1 < count
        raw_k = _load(k_ptr + after * k_token, k, KEY_DIM, there)
        raw_q = _load(q_ptr + after * q_token, k, KEY_DIM, there)
        raw_v = _load(v_ptr + after * v_token, v, VALUE_DIM, there)
        raw_a = _load(a_ptr + after * a_token, d, DECAYS, there)
        raw_b = tl.load(b_ptr + after * b_token + head, mask=there, other=0)
        fade_D = tl.exp(g_D)
        u_V = beta * (value_V - _seen(state_CVL, key_CL * fade_D))
        o_V = _seen(state_CVL, query_CL * fade_D) + u_V * tl.sum(key_CL * query_CL)
        _store(o_ptr + token * U_ENTRY, v, VALUE_DIM, o_V, True)
        _store(ring_u_ptr + place * U_ENTRY, v, VALUE_DIM, u_V, ring_row > 0)
        _store(ring_g_ptr + place * G_ENTRY, d, DECAYS, g_D, i < keeps_g)
        _store(ring_k_ptr + place * K_ENTRY, k, KEY_DIM, own_k, i < keeps_k)
        if there:
            state_CVL = state_CVL * fade_D[:, None, :] + u_V[None, :, None] * key_CL[:, None, :]
        place, token = (place + 1) % CAPACITY, after


def delta_replay_update(
    state, ring_k, ring_u, ring_g, q, k, v, a, b, A, dt_bias, query_start_loc, max_query_len,
    slot, ring_row, ring_start, ring_len, beta_scale,
):  # fmt: skip
    """A delta rule over decodes, from saved states and rings of later tokens; arguments of `ops.delta_replay_update`.
    slot: saved state. ring_row, ring_start, ring_len: ring, first entry and number of entries after the state.
    """
    require_dense(1, q=q, k=k, v=v, a=a, b=b, A=A)
    require_dense(dt_bias.dim(), dt_bias=dt_bias)
    require_dense(3, state=state, ring_k=ring_k, ring_u=ring_u)
    require_dense(ring_g.dim() - 1, ring_g=ring_g)
    num_rows, capacity, shape = slot.shape[0], ring_u.shape[1], shape_options(q, v, a)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_k, one_token = next_power_of_2(shape["KEY_DIM"]), max_query_len == 1
    entries, line = _TILE_ENTRIES if one_token else _SEVERAL_TILE_ENTRIES, min(_LINE, block_k)
    block_v = min(next_power_of_2(shape["VALUE_DIM"]), max(1, entries // block_k))
    lines = block_k // line
    decay_lines, decay_line = (1, 1) if shape["DECAYS"] == 1 else (lines, line)
    replay_kernel[(shape["HEADS"] * cdiv(shape["VALUE_DIM"], block_v), num_rows + 1)](
        state, ring_k, ring_u, ring_g, q, k, v, a, b, A, dt_bias,
        query_start_loc, slot, ring_row, ring_start, ring_len, o,
        num_rows, v.shape[0], max_query_len, beta_scale,
        state.stride(0), ring_k.stride(0), ring_u.stride(0), ring_g.stride(0),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *a.stride()[:2], b.stride(0),
        CAPACITY=capacity, ONE_TOKEN=one_token, BLOCK_J=next_power_of_2(capacity), BLOCK_V=block_v,
        LINES=lines, LINE=line, DECAY_LINES=decay_lines, DECAY_LINE=decay_line,
        **shape, **LAUNCH | {"num_warps": 1},
    )  # fmt: skip
    return o
