"""Copies conv and SSM states between slots."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import load_slots, rows_with_slot, store_slots


@operator(mutates=("conv_state", "ssm_state"))
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
    rows = rows_with_slot(dst)
    if rows is not None:
        conv_src, conv_bias, ssm_src, dst = (t[rows] for t in (conv_src, conv_bias, ssm_src, dst))
    if dst.shape[0] == 0:
        return
    entries = conv_state.shape[2]
    at = (conv_bias[:, None] + torch.arange(entries, device=dst.device)).clamp_(max=entries - 1)
    for conv in conv_state:
        windows = load_slots(conv, conv_src, conv.dtype)
        store_slots(conv, dst, windows.gather(1, at[:, :, None].expand_as(windows)))
    for ssm in () if ssm_state is None else ssm_state:
        store_slots(ssm, dst, load_slots(ssm, ssm_src, ssm.dtype))
