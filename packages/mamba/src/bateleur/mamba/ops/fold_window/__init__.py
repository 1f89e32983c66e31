"""Pages of layers whose state is their window alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared.windows import keep_windows


@operator(mutates=("conv_state",))
def fold_window(conv_state: Tensor, live: Tensor, ring_row: Tensor, dst: Tensor, page_offset: Tensor) -> None:
    """Copy windows of running requests to pages: what `fold_ring` does to windows, for layers without a state.

    In some layers at once: conv_state (layers, slots, W - 1, C), live (layers, rows, W - 1 + K, C); conv_state[dst]
    becomes live[ring_row, page_offset : page_offset + W - 1]. ring_row, dst and page_offset (R,) int64. A row with dst
    0 copies nothing, whatever its other fields hold.
    """
    if dst.device.type == "cpu":  # the rows with a destination; elsewhere all
        if not any(dst.tolist()):
            return
        ring_row, dst, page_offset = torch.stack((ring_row, dst, page_offset))[:, dst != 0]
    keep_windows(conv_state, live, ring_row, dst, page_offset)
