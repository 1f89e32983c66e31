"""Copies of conv windows and states between state slots."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.slots import load_slots, rows_with_slot, store_slots


@operator("states", mutates=("conv_state", "ssm_state"))
def copy_states(
    conv_state: Tensor, ssm_state: Tensor | None, conv_src: Tensor, conv_bias: Tensor, ssm_src: Tensor, dst: Tensor
) -> None:
    """Copy states between state slots: conv_state[conv_src] without its first conv_bias entries, and
    ssm_state[ssm_src].

    Args:
        conv_state: (layers, slots, window entries, channels), updated in place.
        ssm_state: (layers, slots, *state shape), updated in place; None for pure convolutions.
        conv_src, conv_bias, ssm_src, dst: (R,) int64. Entry i of the new window is entry i + conv_bias of the old one;
            the last conv_bias entries are unspecified. A row with dst 0 is skipped.
    """
    dst, conv_src, conv_bias, ssm_src = rows_with_slot(dst, conv_src, conv_bias, ssm_src)
    if not dst.shape[0]:
        return
    entries = conv_state.shape[2]
    at = (conv_bias[:, None] + torch.arange(entries, device=dst.device)).clamp_(max=entries - 1)
    for conv in conv_state:
        windows = load_slots(conv, conv_src, conv.dtype)
        store_slots(conv, dst, windows.gather(1, at[:, :, None].expand_as(windows)))
    for ssm in () if ssm_state is None else ssm_state:
        store_slots(ssm, dst, load_slots(ssm, ssm_src, ssm.dtype))


@operator("states", mutates=("conv_state",))
def fold_window(conv_state: Tensor, request_conv: Tensor, ring_row: Tensor, dst: Tensor, page_offset: Tensor) -> None:
    """Copy conv windows of running requests to state slots: `fold_ring` for layers without an SSM state.

    In each layer, conv_state[dst] becomes request_conv[ring_row, page_offset : page_offset + W - 1].

    Args:
        conv_state: (layers, slots, W - 1, C) for W taps and C channels, updated in place.
        request_conv: (layers, rows, W - 1 + drafts, C).
        ring_row, dst, page_offset: (R,) int64. A row with dst 0 is skipped, and its other values are ignored.
    """
    dst, ring_row, page_offset = rows_with_slot(dst, ring_row, page_offset)
    if not dst.shape[0]:
        return
    copy_windows(conv_state, request_conv, ring_row, dst, page_offset)


def copy_windows(conv_state: Tensor, request_conv: Tensor, ring_row: Tensor, dst: Tensor, page_offset: Tensor) -> None:
    """Copy convolution windows from `request_conv` to slots `dst` of `conv_state`; all rows must have a slot.

    Same arguments as `fold_window`.
    """
    num_entries = conv_state.shape[2]
    first = page_offset.clamp(0, request_conv.shape[2] - num_entries)
    entries = first[:, None] + torch.arange(num_entries, device=dst.device)
    for conv, windows in zip(conv_state, request_conv, strict=True):
        store_slots(conv, dst, windows[ring_row[:, None], entries])
