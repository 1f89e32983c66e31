"""The causal convolution of decodes.

Shapes: T tokens, R rows (requests), C conv channels, W taps, K draft tokens, M tokens of the longest row.
"""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import (
    activate,
    compute_dtype,
    convolve,
    load_slots,
    pad_rows,
    query_lens,
    store_slots,
    unpad,
)


@operator(mutates=("conv_state",), like="x", native="conv")
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
    num_entries, dtype = weight.shape[1] - 1, compute_dtype(x)
    if x.shape[0] == 0 or read.shape[0] == 0:
        return torch.zeros_like(x)
    window = load_slots(conv_state, read, dtype)
    if conv_state.shape[1] > num_entries:
        at = offset[:, None] + torch.arange(num_entries, device=conv_state.device)
        window = window.gather(1, at[:, :, None].expand(-1, -1, window.shape[2]))
    tokens, targets = pad_rows(query_start_loc, max_query_len, x.shape[0])
    inputs = torch.cat([window, x[tokens].to(dtype)], 1)
    write = torch.where(query_lens(query_start_loc) > 0, write, 0)
    store_slots(conv_state[:, : num_entries - 1 + max_query_len], write, inputs[:, 1:])
    y = activate(convolve(inputs, weight, bias, 1), activation)
    return unpad(y.flatten(0, 1), targets.view(-1), x)
