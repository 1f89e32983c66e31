"""Copies the last conv inputs (conv windows) of running requests to state slots."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import store_slots


@operator(mutates=("conv_state",))
def fold_window(conv_state: Tensor, request_conv: Tensor, ring_row: Tensor, dst: Tensor, page_offset: Tensor) -> None:
    """Copy conv windows of running requests to state slots: `fold_ring` for layers without an SSM state.

    In each layer, conv_state[dst] becomes request_conv[ring_row, page_offset : page_offset + W - 1].

    Args:
        conv_state: (layers, slots, W - 1, C) for W taps and C channels, updated in place.
        request_conv: (layers, rows, W - 1 + drafts, C).
        ring_row, dst, page_offset: (R,) int64. A row with dst 0 is skipped, and its other values are ignored.
    """
    if dst.device.type == "cpu":  # only rows with a destination; other devices would have to synchronize
        if not any(dst.tolist()):
            return
        ring_row, dst, page_offset = torch.stack((ring_row, dst, page_offset))[:, dst != 0]
    copy_windows(conv_state, request_conv, ring_row, dst, page_offset)


def copy_windows(conv_state: Tensor, request_conv: Tensor, ring_row: Tensor, dst: Tensor, page_offset: Tensor) -> None:
    """Copy the conv windows of all rows with `dst` above 0, as `fold_window`."""
    length, num_entries = request_conv.shape[2], conv_state.shape[2]
    first = ring_row * length + page_offset.clamp(0, length - num_entries)
    entries = first.unsqueeze(1) + torch.arange(num_entries, device=dst.device)
    for conv, windows in zip(conv_state, request_conv, strict=True):
        store_slots(conv, dst, torch.embedding(windows.view(-1, windows.shape[2]), entries))
