"""What folds keep of the live windows of convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared import store


def keep_windows(
    conv_state: Tensor, live: Tensor, ring_row: Tensor, dst: Tensor, page_offset: Tensor
) -> None:
    """Copy the W - 1 entries from `page_offset` on of live windows to pages, in some layers at once.

    conv_state (layers, slots, W - 1, C), live (layers, rows, W - 1 + K, C); ring_row, dst and page_offset (R,) int64.
    """
    live_len, keep = live.shape[2], conv_state.shape[2]
    first = ring_row * live_len + page_offset.clamp(0, live_len - keep)
    window = first.unsqueeze(1) + torch.arange(keep, device=dst.device)  # in the flattened live windows
    for conv, windows in zip(conv_state, live, strict=True):
        store(conv, dst, torch.embedding(windows.view(-1, windows.shape[2]), window))
