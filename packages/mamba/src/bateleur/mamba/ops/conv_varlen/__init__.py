"""The causal convolution of prefills."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import activate, compute_dtype, convolve, load_slots


@operator(mutates=("conv_state", "request_conv"), like="x", native="conv")
def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    request_conv: Tensor | None,
    query_start_loc: Tensor,
    read: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    chunk_write: Tensor,
    request_conv_write: Tensor | None,
    activation: str,
) -> Tensor:
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
        The others: as in `ssd_scan_varlen`, slots and chunks.

    Returns (T, C). Raises ValueError for an unknown activation.
    """
    num_entries, dtype = weight.shape[1] - 1, compute_dtype(x)
    taps = weight.to(dtype).t().contiguous().t()  # contiguous weights of a tap take a third of the time
    starts, lines = query_start_loc.tolist(), []
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    y[starts[-1] :].zero_()
    for row, window in enumerate(load_slots(conv_state[:, :num_entries], read, dtype)):
        tokens = slice(starts[row], starts[row + 1])
        lines.append(torch.cat((window, x[tokens].to(dtype))))
        convolve(lines[row], taps, bias, 0, out=y[tokens])
    chunks = zip(chunk_write.tolist(), chunk_row.tolist(), chunk_start_loc.tolist()[1:], strict=True)
    for slot, row, end in chunks:
        if slot:
            conv_state[slot, :num_entries] = lines[row][end - starts[row] :][:num_entries]
    if request_conv is not None and request_conv_write is not None:
        for slot, line in zip(request_conv_write.tolist(), lines, strict=True):
            if slot and len(line) > num_entries:
                request_conv[slot, :num_entries] = line[len(line) - num_entries :]
    return activate(y, activation).to(x.dtype)
