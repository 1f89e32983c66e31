"""The causal convolution of prefills and of decodes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.slots import compute_dtype, load_slots, pad_rows, store_slots, unpad


@operator("conv", fake="x", mutates=("conv_state", "request_conv"), native="conv")
def causal_conv1d_varlen(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, request_conv: Tensor | None,
    query_start_loc: Tensor, read: Tensor, chunk_start_loc: Tensor, chunk_row: Tensor, chunk_write: Tensor,
    request_conv_write: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """Depthwise causal convolution of prefills; request r starts from the conv window in state slot read[r].

    With W taps, writes the W - 1 raw inputs before the end of chunk k to conv_state[chunk_write[k], : W - 1], and those
    before the end of request r to request_conv[request_conv_write[r], : W - 1]. They include entries of the initial
    window if the request has fewer tokens. Later entries of the slots are not changed.

    Args:
        x: (T, C).
        weight: (C, W).
        bias: (C,) or None.
        conv_state: (slots, W - 1 + drafts, C), updated in place.
        request_conv: (request rows, W - 1 + drafts, C), conv windows of running requests, updated in place; row 0 is
            null. Or None.
        request_conv_write: (R,) int64 request rows; None without `request_conv`.
        activation: "silu" or "none".
        The others (state slots and chunks): as in `ssd_scan_varlen`.

    Returns (T, C). Raises ValueError for an unknown activation.
    """
    keep, dtype, lines = weight.shape[1] - 1, compute_dtype(x), []
    starts, y = query_start_loc.tolist(), torch.zeros_like(x)
    for row, window in enumerate(load_slots(conv_state[:, :keep], read, dtype)):
        tokens = slice(starts[row], starts[row + 1])
        lines.append(torch.cat((window, x[tokens].to(dtype))))
        y[tokens] = _convolve(lines[row], weight, bias, activation)
    chunks = zip(chunk_write.tolist(), chunk_row.tolist(), chunk_start_loc.tolist()[1:], strict=True)
    for slot, row, end in chunks:
        if slot:
            conv_state[slot, :keep] = lines[row][end - starts[row] :][:keep]
    if request_conv is not None and request_conv_write is not None:
        for slot, line in zip(request_conv_write.tolist(), lines, strict=True):
            if slot and len(line) > keep:
                request_conv[slot, :keep] = line[len(line) - keep :]
    return y


@operator("conv", fake="x", mutates=("conv_state",), native="conv")
def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, query_start_loc: Tensor, max_query_len: int,
    read: Tensor, offset: Tensor, write: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    """Depthwise causal convolution (W taps) of 1 to 1 + K tokens per row (request); up to K drafts may be rejected.

    Row r starts from the window conv_state[read[r], offset[r] : offset[r] + W - 1]. A row of q tokens writes this
    window and its tokens, without the oldest entry, to conv_state[write[r], : W - 2 + q]. Later entries of the slot are
    unspecified.

    Args:
        x, weight, bias, activation: as in `causal_conv1d_varlen`.
        conv_state: (slots, W - 1 + K, channels C), updated in place.
        query_start_loc: (R + 1,) int32.
        max_query_len: maximum of q over all rows.
        read, write: (R,) int64 state slots.
        offset: (R,) int64, accepted tokens of the previous step minus one.

    Returns (T, C). Raises ValueError for an unknown activation.
    """
    keep, dtype = weight.shape[1] - 1, compute_dtype(x)
    if not (x.shape[0] and read.shape[0]):
        return torch.zeros_like(x)
    slots = load_slots(conv_state, read, dtype)
    entries = offset[:, None, None] + torch.arange(keep, device=x.device)[:, None]
    window = slots.gather(1, entries.expand(-1, -1, x.shape[1]))
    tokens, targets = pad_rows(query_start_loc, max_query_len, x.shape[0])
    inputs = torch.cat([window, x[tokens].to(dtype)], 1)
    write = torch.where(query_start_loc.diff() > 0, write, 0)
    store_slots(conv_state[:, : keep - 1 + max_query_len], write, inputs[:, 1:])
    return unpad(_convolve(inputs, weight, bias, activation), targets, x)


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolve inputs (..., C) with weight (C, W) along the second-last dimension: one output per window of W."""
    width, taps = weight.shape[1], weight.to(inputs.dtype)
    count = inputs.shape[-2] - width + 1
    y = inputs.narrow(-2, 0, count) * taps[:, 0]
    for tap in range(1, width):
        y.addcmul_(inputs.narrow(-2, tap, count), taps[:, tap])
    if bias is not None:
        y.add_(bias)
    return F.silu(y) if is_silu(activation) else y


def is_silu(activation: str) -> bool:
    """Return whether the activation is SiLU. Raises ValueError for an unknown activation."""
    if activation not in ("silu", "none"):
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'none'")
    return activation == "silu"
