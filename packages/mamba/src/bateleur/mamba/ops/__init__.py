"""The operators that move Mamba-2 states. The device of the arguments picks the form; `reference` is the specification.

What they have in common:

- T tokens of R rows lie one row after the other; row r owns tokens query_start_loc[r] to query_start_loc[r + 1], and
  query_start_loc is (R + 1,) int32 on the device. Outputs of tokens that belong to no row are unspecified.
- States are mutated in place: conv_state (slots, W - 1 + K, C) with the oldest input first, ssm_state (slots, H, P, N).
- Slots are int64 on the device. Reading slot 0 is reading a zero state, whatever it holds; writing slot 0 is dropping
  the write; what slot 0 holds afterwards is scratch. A row without tokens writes nothing. A row may
  write the slot it reads; no row may write a slot that another row reads or writes, except slot 0. (On CPU all reads
  come before all writes; on CUDA that would take a copy of every state.)
- Computation is in float32 (float64 for float64 inputs); outputs have the dtype of x.
- x, dt, z, B and C may be strided views, as a split of a projection makes them.
- None of them synchronises with the device, and none loops over requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops import registry

_ops = torch.ops.bateleur
_conv1d_varlen = _ops.causal_conv1d_varlen.default
_conv1d_update = _ops.causal_conv1d_update.default
_ssd_scan = _ops.ssd_scan_varlen.default
_state_update = _ops.selective_state_update.default
_replay = _ops.replay_update.default
_fold = _ops.fold_ring.default
_copy = _ops.copy_states.default
_rms_norm = _ops.gated_rms_norm.default

SCHEMAS = registry.SCHEMAS
"""The schemas, as registered under `torch.ops.bateleur`."""


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    live: Tensor | None,
    query_start_loc: Tensor,
    read: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    chunk_write: Tensor,
    live_write: Tensor | None,
    activation: str,
) -> Tensor:
    """Depthwise causal convolution of prompts, each continuing the window in its `read` slot.

    x (T, C), weight (C, W), bias (C,) or None, read (R,), chunks as for `ssd_scan_varlen`; activation is "silu" or
    "none". Leaves the W - 1 raw inputs up to the end of chunk k in conv_state[chunk_write[k], : W - 1], and those up to
    the end of row r in live[live_write[r], : W - 1], where live is (live rows, W - 1 + K, C) with null row 0, or None.
    Where a row has fewer inputs, the end of its initial window stands before them. Further entries of what is written
    are not touched. Returns (T, C).

    Raises ValueError for an unknown activation.
    """
    y: Tensor = _conv1d_varlen(
        x, weight, bias, conv_state, live, query_start_loc, read, chunk_start_loc, chunk_row, chunk_write,
        live_write, activation,
    )  # fmt: skip
    return y


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    offset: Tensor,
    write: Tensor,
    activation: str,
) -> Tensor:
    """Depthwise causal convolution of 1 to 1 + K tokens per row, of which a suffix may be rejected later.

    x, weight, bias and activation as for `causal_conv1d_varlen`, read and write (R,). The initial window is
    conv_state[read, offset : offset + W - 1], offset (R,) being the number of tokens accepted by the previous step
    minus one, and a row of q tokens leaves all but the oldest of its window and tokens in
    conv_state[write, : W - 2 + q]; entries behind them are unspecified. max_query_len bounds q.

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
    """
    y: Tensor = _conv1d_update(
        x, weight, bias, conv_state, query_start_loc, max_query_len, read, offset, write, activation
    )
    return y


def ssd_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    query_start_loc: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    row_chunk_loc: Tensor,
    max_chunks_per_row: int,
    chunk_size: int,
    read: Tensor,
    chunk_write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The Mamba-2 recurrence over prompts, each continuing the state in its `read` slot, by chunks.

    For each token and head, with step = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = h // (H / G):
    S <- exp(A step) S + step x B_g^T, y = S C_g + D x. The S after chunk k goes to
    ssm_state[chunk_write[k]]: 0 for a chunk whose state is not kept; a row's last chunk leaves its final state.

    x (T, H, P), dt (T, H) raw, A (H,) float32 and negative, B and C (T, G, N), D and dt_bias (H,), read (R,),
    chunk_write (chunks,).
    Chunks hold at most chunk_size tokens and never cross rows: chunk k is tokens chunk_start_loc[k] to
    chunk_start_loc[k + 1] of row chunk_row[k], row r has chunks row_chunk_loc[r] to row_chunk_loc[r + 1] and at most
    max_chunks_per_row; all int32 on the device, as `MambaMetadataBuilder` makes them. Returns y (T, H, P).
    """
    y: Tensor = _ssd_scan(
        x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, chunk_start_loc, chunk_row, row_chunk_loc,
        max_chunks_per_row, chunk_size, read, chunk_write, dt_min, dt_max,
    )  # fmt: skip
    return y


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The same recurrence for 1 to 1 + K tokens per row, keeping the state after each of them.

    Arguments as for `ssd_scan_varlen`, and write (R, 1 + K): the state after token i of row r goes to
    ssm_state[write[r, i]]. max_query_len bounds the tokens of a row. Returns y (T, H, P).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
    """
    y: Tensor = _state_update(
        ssm_state, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len, read, write, dt_min, dt_max
    )
    return y


def replay_update(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The same recurrence for few tokens per row, over a state that stays as it is and a ring of the inputs since.

    The state before a row's tokens is ssm_state[slot] advanced by ring_len entries of row `ring_row` of the rings:
    entry j lies at (ring_start + j) % L. The tokens are appended at ring_len and behind; the caller counts those that
    are accepted, and the next step overwrites the others, so that a rejected token never reaches a state.

    ring_x (ring rows, L, H, P) and ring_B (ring rows, L, G, N) of x's dtype or a wider one, ring_dt (ring rows, L, H)
    float32, the processed step (float64 for float64 inputs); contiguous. Row 0 of the rings is null, like slot 0: a row
    with ring_row 0 keeps nothing, and its output is unspecified. slot, ring_row, ring_start and ring_len (R,) int64;
    ring_len plus the row's tokens is at most L; no two rows share a ring row, except row 0. The other arguments as for
    `selective_state_update`. Returns y (T, H, P).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slot and ring row 0.
    """
    y: Tensor = _replay(
        ssm_state, ring_x, ring_dt, ring_B, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len, slot, ring_row,
        ring_start, ring_len, dt_min, dt_max,
    )  # fmt: skip
    return y


def fold_ring(
    ssm_state: Tensor,
    conv_state: Tensor,
    live: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
    conv_offset: Tensor,
) -> None:
    """Advance states by the first `count` entries of their rings: the page after them goes to slot `dst`.

    In some layers at once, which all tensors but those of the rows have in front: ssm_state (layers, slots, H, P, N).
    In each, ssm_state[dst] is ssm_state[src] after the entries, where src and dst may be one slot; conv_state[dst],
    (slots, W - 1, C), is live[ring_row, conv_offset : conv_offset + W - 1]. Rings, live, A and ring rows as for
    `replay_update` and `causal_conv1d_varlen`; ring_row, ring_start, count, src, dst and conv_offset (R,) int64. A row
    with dst 0 is not folded, whatever its other fields hold. The rings are not changed: the caller moves ring_start.
    """
    _fold(
        ssm_state,
        conv_state,
        live,
        ring_x,
        ring_dt,
        ring_B,
        A,
        ring_row,
        ring_start,
        count,
        src,
        dst,
        conv_offset,
    )


def copy_states(
    conv_state: Tensor, ssm_state: Tensor, conv_src: Tensor, conv_bias: Tensor, ssm_src: Tensor, dst: Tensor
) -> None:
    """Copy pages between slots: conv_state[conv_src] without its first conv_bias entries, and ssm_state[ssm_src].

    In some layers at once: conv_state (layers, slots, W - 1 + K, C), ssm_state (layers, slots, H, P, N). conv_src,
    conv_bias, ssm_src and dst (R,) int64. Entry i of the new window is entry i + conv_bias of the old one; the last
    conv_bias entries are unspecified. A row with dst 0 copies nothing.
    """
    _copy(conv_state, ssm_state, conv_src, conv_bias, ssm_src, dst)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Root-mean-square norm over each of `groups` equal parts of the channels of x * silu(z), times weight.

    x and z (T, inner), weight (inner,). Gate and norm in float32, cast to x's dtype, then the weight.
    """
    y: Tensor = _rms_norm(x, z, weight, groups, eps)
    return y


__all__ = [
    "SCHEMAS",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "copy_states",
    "fold_ring",
    "gated_rms_norm",
    "replay_update",
    "selective_state_update",
    "ssd_scan_varlen",
]
