"""Copies of whole pages, conv window and state."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import load, store, written


@operator(mutates=("conv_state", "ssm_state"))
def copy_states(
    conv_state: Tensor,
    ssm_state: Tensor | None,
    conv_src: Tensor,
    conv_bias: Tensor,
    ssm_src: Tensor,
    dst: Tensor,
) -> None:
    """Copy pages between slots: conv_state[conv_src] without its first conv_bias entries, and ssm_state[ssm_src].

    In some layers at once: conv_state (layers, slots, W - 1 + K, C), ssm_state (layers, slots, H, P, N), or None for
    windows alone. conv_src, conv_bias, ssm_src and dst (R,) int64. Entry i of the new window is entry i + conv_bias of
    the old one; the last conv_bias entries are unspecified. A row with dst 0 copies nothing.
    """
    rows = written(dst)
    if rows is not None:
        conv_src, conv_bias, ssm_src, dst = (t[rows] for t in (conv_src, conv_bias, ssm_src, dst))
    if dst.shape[0] == 0:
        return
    entries = conv_state.shape[2]
    at = (conv_bias[:, None] + torch.arange(entries, device=dst.device)).clamp_(max=entries - 1)
    for conv in conv_state:
        windows = load(conv, conv_src, conv.dtype)
        store(conv, dst, windows.gather(1, at[:, :, None].expand_as(windows)))
    for ssm in () if ssm_state is None else ssm_state:
        store(ssm, dst, load(ssm, ssm_src, ssm.dtype))
