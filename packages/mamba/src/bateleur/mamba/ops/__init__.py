"""The operators that move Mamba-2 states. The device of the arguments picks the form; `reference` is the specification.

What they have in common:

- T tokens of R rows lie one row after the other; row r owns tokens query_start_loc[r] to query_start_loc[r + 1], and
  query_start_loc is (R + 1,) int32 on the device. Outputs of tokens that belong to no row are unspecified.
- States are mutated in place: conv_state (slots, W - 1 + K, C) with the oldest input first, ssm_state (slots, H, P, N).
- Slots are int64 on the device. Reading slot 0 is reading a zero state, whatever it holds; writing slot 0 is dropping
  the write; what slot 0 holds afterwards is scratch. A row without tokens writes nothing. All reads come before all
  writes, so a row may read a slot that another row writes; no two rows may write the same slot, except slot 0.
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
_rms_norm = _ops.gated_rms_norm.default

SCHEMAS = registry.SCHEMAS
"""The schemas, as registered under `torch.ops.bateleur`."""


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    read: Tensor,
    write: Tensor,
    activation: str,
) -> Tensor:
    """Depthwise causal convolution of prompts, each continuing the window in its `read` slot.

    x (T, C), weight (C, W), bias (C,) or None, read and write (R,); activation is "silu" or "none". Leaves
    the last W - 1 raw inputs of each row in conv_state[write, : W - 1]; a row shorter than that keeps the end
    of its initial window before them. Further entries of the written slot are not touched. Returns (T, C).

    Raises ValueError for an unknown activation.
    """
    y: Tensor = _conv1d_varlen(x, weight, bias, conv_state, query_start_loc, read, write, activation)
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

    As `causal_conv1d_varlen`, but the initial window is conv_state[read, offset : offset + W - 1], offset
    (R,) being the number of tokens accepted by the previous step minus one, and a row of q tokens leaves all
    but the oldest of its window and tokens in conv_state[write, : W - 2 + q]; entries behind them are
    unspecified. max_query_len bounds q.

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
    write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The Mamba-2 recurrence over prompts, each continuing the state in its `read` slot, by chunks.

    For each token and head, with step = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = h // (H / G):
    S <- exp(A step) S + step x B_g^T, y = S C_g + D x. The last S of each row goes to ssm_state[write].

    x (T, H, P), dt (T, H) raw, A (H,) float32 and negative, B and C (T, G, N), D and dt_bias (H,), read and write (R,).
    Chunks hold at most chunk_size tokens and never cross rows: chunk k is tokens chunk_start_loc[k] to
    chunk_start_loc[k + 1] of row chunk_row[k], row r has chunks row_chunk_loc[r] to row_chunk_loc[r + 1] and at most
    max_chunks_per_row; all int32 on the device, as `MambaMetadataBuilder` makes them. Returns y (T, H, P).
    """
    y: Tensor = _ssd_scan(
        x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, chunk_start_loc, chunk_row, row_chunk_loc,
        max_chunks_per_row, chunk_size, read, write, dt_min, dt_max,
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

    Arguments as for `ssd_scan_varlen`, but write is (R, 1 + K): the state after token i of row r goes to
    ssm_state[write[r, i]]. max_query_len bounds the tokens of a row. Returns y (T, H, P).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
    """
    y: Tensor = _state_update(
        ssm_state, x, dt, A, B, C, D, dt_bias, query_start_loc, max_query_len, read, write, dt_min, dt_max
    )
    return y


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
    "gated_rms_norm",
    "selective_state_update",
    "ssd_scan_varlen",
]
