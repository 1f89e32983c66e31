"""Copies of whole pages, conv window and SSM matrix, in vectorised torch."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops._rows import load, store, written


def copy_states(
    conv_state: Tensor, ssm_state: Tensor, conv_src: Tensor, conv_bias: Tensor, ssm_src: Tensor, dst: Tensor
) -> None:
    """Gather everything, shift the windows, scatter."""
    rows = written(dst)
    if rows is not None:
        conv_src, conv_bias, ssm_src, dst = (t[rows] for t in (conv_src, conv_bias, ssm_src, dst))
    if dst.shape[0] == 0:
        return
    windows = load(conv_state, conv_src, conv_state.dtype)
    states = load(ssm_state, ssm_src, ssm_state.dtype)
    entries = conv_state.shape[1]
    at = (conv_bias[:, None] + torch.arange(entries, device=dst.device)).clamp_(max=entries - 1)
    store(conv_state, dst, windows.gather(1, at[:, :, None].expand_as(windows)))
    store(ssm_state, dst, states)
