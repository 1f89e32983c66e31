"""Copies of whole pages, conv window and SSM matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.shared.torch import load, store, written


def copy_states(
    conv_state: Tensor, ssm_state: Tensor, conv_src: Tensor, conv_bias: Tensor, ssm_src: Tensor, dst: Tensor
) -> None:
    """Layer by layer: gather everything, shift the windows, scatter."""
    rows = written(dst)
    if rows is not None:
        conv_src, conv_bias, ssm_src, dst = (t[rows] for t in (conv_src, conv_bias, ssm_src, dst))
    if dst.shape[0] == 0:
        return
    entries = conv_state.shape[2]
    at = (conv_bias[:, None] + torch.arange(entries, device=dst.device)).clamp_(max=entries - 1)
    for conv, ssm in zip(conv_state, ssm_state, strict=True):
        windows, states = load(conv, conv_src, conv.dtype), load(ssm, ssm_src, ssm.dtype)
        store(conv, dst, windows.gather(1, at[:, :, None].expand_as(windows)))
        store(ssm, dst, states)
