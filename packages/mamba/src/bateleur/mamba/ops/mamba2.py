"""The Mamba-2 recurrence: prefills, decodes under the state policies SLOTS and FOLD, and folds (rings added to states).

For each token and head h, with step = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = h // (H / G):
S <- exp(A step) S + step x B_g^T, y = S C_g + D x. Letters as in `ops`, H heads, G groups, P head channels, N state
entries, L entries of a ring, Q tokens of a tile.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.slots import (
    append_to_rings,
    compute_dtype,
    decays_after,
    load_slots,
    pad_rows,
    pair_decays,
    ring_entries,
    rows_with_slot,
    scan_tiles,
    store_slots,
    unpad,
)
from bateleur.mamba.ops.states import copy_windows

_TILE = 32
"""Maximum number of tokens of a tile (measured: larger tiles spend more time on decays, smaller ones on states)."""


def _inputs(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor, dt_min: float, dt_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, step sizes (T, H), and B and C of each head (T, H, N), in the dtype to compute in."""
    dtype, of_group = compute_dtype(x), x.shape[1] // B.shape[1]
    step = F.softplus(dt.to(dtype) + dt_bias).clamp_(dt_min, dt_max)
    B, C = (each.to(dtype).repeat_interleave(of_group, 1) for each in (B, C))
    return x.to(dtype), step, B, C


@operator("mamba2_scan", fake="x", mutates=("ssm_state",), native="mamba2")
def ssd_scan_varlen(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    query_start_loc: Tensor, chunk_start_loc: Tensor, chunk_row: Tensor, row_chunk_loc: Tensor,
    max_chunks_per_row: int, chunk_size: int, read: Tensor, chunk_write: Tensor, dt_min: float, dt_max: float,
) -> Tensor:  # fmt: skip
    """The Mamba-2 recurrence over prefills; row r (a request) starts from the state in state slot read[r].

    The state after chunk k is written to ssm_state[chunk_write[k]].

    Args:
        x, dt, B, C: (T, H, P), (T, H), (T, G, N) and (T, G, N); dt is raw.
        A, D, dt_bias: (H,) float32; A is negative.
        ssm_state: (slots, H, P, N), updated in place.
        query_start_loc: (R + 1,) int32.
        chunk_start_loc: (chunks + 1,) int32 first token of each chunk. Chunks never cross rows.
        chunk_row: (chunks,) int32 row of each chunk.
        row_chunk_loc: (R + 1,) int32 first chunk of each row.
        max_chunks_per_row, chunk_size: maximum number of chunks of a row, and of tokens of a chunk.
        read, chunk_write: (R,) and (chunks,) int64 slots of initial states, and for states after chunks (0: none).
        dt_min, dt_max: limits of the step size.

    Returns y (T, H, P). `PrefillChunks` has the chunk tensors.
    """
    inputs, y = _inputs(x, dt, B, C, dt_bias, dt_min, dt_max), torch.zeros_like(x)
    tiles = scan_tiles(ssm_state, read, chunk_start_loc, row_chunk_loc, chunk_write, _TILE, compute_dtype(x))
    for state, tokens in tiles:
        y[tokens] = _run_tile(state, A, D, *(each[tokens] for each in inputs))
    return y


def _run_tile(state: Tensor, A: Tensor, D: Tensor, x: Tensor, step: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Return the outputs (Q, H, P) of Q tokens, and update `state` (H, P, N): state-space duality (Dao and Gu, 2024).

    With c the running sum of A step, token i reads token j <= i with the weight exp(c_i - c_j) (C_i . B_j), and the
    state before the tile with the factor exp(c_i). Every exponent is a sum of non-positive numbers.
    """
    B, C, total = B.transpose(0, 1), C.transpose(0, 1), (step * A).T.cumsum(1)  # by head
    u, last = (x * step[..., None]).transpose(0, 1), total[:, -1:]
    y = (C @ B.mT * pair_decays(total[..., None]).squeeze(3)) @ u + (C * total.exp()[..., None]) @ state.mT
    state.mul_(last.exp()[..., None]).add_((u * (last - total).exp()[..., None]).mT @ B)
    return y.transpose(0, 1) + D[:, None] * x


@operator("mamba2", fake="x", mutates=("ssm_state",), native="mamba2")
def selective_state_update(
    ssm_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    query_start_loc: Tensor, max_query_len: int, read: Tensor, write: Tensor, dt_min: float, dt_max: float,
) -> Tensor:  # fmt: skip
    """The Mamba-2 recurrence of 1 to 1 + K tokens (K drafts) per row (request); writes each state to a state slot.

    Args:
        write: (R, 1 + K) int64; the state after token i of row r is written to ssm_state[write[r, i]].
        max_query_len: maximum number of tokens of a row.
        The others: as in `ssd_scan_varlen`.

    Returns y (T, H, P).
    """
    if not (x.shape[0] and read.shape[0]):
        return torch.zeros_like(x)
    inputs = _inputs(x, dt, B, C, dt_bias, dt_min, dt_max)
    state, outputs = load_slots(ssm_state, read, compute_dtype(x)), []
    tokens, targets = pad_rows(query_start_loc, max_query_len, x.shape[0])
    slots = torch.where(targets < x.shape[0], write[:, :max_query_len], 0)
    for at, slot in zip(tokens.T, slots.T, strict=True):
        # A row that has ended computes with another token's inputs; its state and output are dropped.
        outputs.append(_advance(state, A, D, *(each[at] for each in inputs)))
        store_slots(ssm_state, slot, state)
    return unpad(torch.stack(outputs, 1), targets, x)


def _advance(state: Tensor, A: Tensor, D: Tensor, x: Tensor, step: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Update the states (R, H, P, N) with one token per row, and return its outputs (R, H, P)."""
    state.mul_((step * A).exp_()[..., None, None]).addcmul_((x * step[..., None])[..., None], B[:, :, None])
    return (state @ C[..., None]).squeeze(3) + D[:, None] * x


@operator("mamba2", fake="x", mutates=("ring_x", "ring_dt", "ring_B"), native="ring")
def replay_update(
    ssm_state: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor, dt_bias: Tensor, query_start_loc: Tensor, max_query_len: int, slot: Tensor,
    ring_row: Tensor, ring_start: Tensor, ring_len: Tensor, dt_min: float, dt_max: float,
) -> Tensor:  # fmt: skip
    """Mamba-2 over 1 to 1 + K tokens (K drafts) per row (request), from a saved state and a ring of inputs.

    The state before a row's tokens is ssm_state[slot] updated with ring_len entries of ring `ring_row`. Entry j is at
    (ring_start + j) % L. The row's tokens are appended to the ring. The caller counts the accepted ones, and the next
    step overwrites the others, so a rejected token never reaches a state.

    Args:
        ring_x, ring_B: (ring rows, L entries, heads H, head channels P) and (ring rows, L, groups, state entries),
            contiguous, in the dtype of x or a wider one.
        ring_dt: (ring rows, L, H) step sizes, contiguous, float32 (float64 for float64 inputs).
        slot, ring_row, ring_start, ring_len: (R,) int64. ring_len plus the row's tokens is at most L. No two rows share
            a ring row, except row 0, which is null: its rows store nothing, and their outputs are unspecified.
        The others: as in `selective_state_update`.

    Returns y (T, H, P).
    """
    if not (x.shape[0] and slot.shape[0]):
        return torch.zeros_like(x)
    rings, inputs = (ring_x, ring_dt, ring_B), _inputs(x, dt, B, C, dt_bias, dt_min, dt_max)
    state = ssm_state.index_select(0, slot).to(compute_dtype(x)).masked_fill_((slot == 0)[:, None, None, None], 0)
    _fold(state, rings, A, ring_row, ring_start, ring_len)
    tokens, targets = pad_rows(query_start_loc, max_query_len, x.shape[0])
    outputs = [_advance(state, A, D, *(each[at] for each in inputs)) for at in tokens.T]
    new = (x[tokens], inputs[1][tokens], B[tokens])
    append_to_rings(rings, new, ring_row, ring_start + ring_len, targets < x.shape[0])
    return unpad(torch.stack(outputs, 1), targets, x)


def _fold(state: Tensor, rings: Sequence[Tensor], A: Tensor, row: Tensor, start: Tensor, count: Tensor) -> None:
    """Update the states (R, H, P, N) with `count` entries of the rings in rows `row`, from entry `start` % L on."""
    x, step, B = ring_entries(rings, row, start, count, state.dtype)
    g, B = step * A, B.repeat_interleave(x.shape[2] // B.shape[2], 2)
    u = x * (decays_after(g) * step)[..., None]
    state.mul_(g.sum(1).exp_()[..., None, None]).add_(torch.einsum("rlhp,rlhn->rhpn", u, B))


@operator("mamba2", mutates=("ssm_state", "conv_state"), native="ring")
def fold_ring(
    ssm_state: Tensor, conv_state: Tensor, request_conv: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor,
    A: Tensor, ring_row: Tensor, ring_start: Tensor, count: Tensor, src: Tensor, dst: Tensor, page_offset: Tensor,
) -> None:  # fmt: skip
    """Update saved states with the first `count` entries of the rings of later inputs, in several layers at once.

    In each layer, ssm_state[dst] becomes ssm_state[src] updated with the entries, and conv_state[dst] becomes
    request_conv[ring_row, page_offset : page_offset + W - 1]. The rings are not changed: the caller advances
    ring_start.

    Args:
        ssm_state: (layers, slots, heads, head channels, state entries), updated in place.
        conv_state: (layers, slots, W - 1, C) for W taps and C conv channels, updated in place.
        request_conv, ring_x, ring_dt, ring_B, A: as in `causal_conv1d_varlen` and `replay_update`, with a leading
            dimension of layers.
        ring_row, ring_start, count, src, dst, page_offset: (R,) int64. src and dst may be equal. A row with dst 0 is
            skipped, and its other values are ignored.
    """
    dst, row, start, count, src, offset = rows_with_slot(dst, ring_row, ring_start, count, src, page_offset)
    if not dst.shape[0]:
        return
    copy_windows(conv_state, request_conv, row, dst, offset)
    for states, *rings, own_A in zip(ssm_state, ring_x, ring_dt, ring_B, A, strict=True):
        state = load_slots(states, src, compute_dtype(ring_dt))
        _fold(state, rings, own_A, row, start, count)
        store_slots(states, dst, state)
