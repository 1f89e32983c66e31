"""The specification: row by row."""

from __future__ import annotations

from torch import Tensor

from bateleur.mamba.ops.shared.reference import load


def copy_states(
    conv_state: Tensor, ssm_state: Tensor, conv_src: Tensor, conv_bias: Tensor, ssm_src: Tensor, dst: Tensor
) -> None:
    """Copy whole pages, the windows without their first `conv_bias` entries; what lies behind the rest stays."""
    for conv, ssm in zip(conv_state, ssm_state, strict=True):
        windows, states = load(conv, conv_src, conv.dtype), load(ssm, ssm_src, ssm.dtype)
        for row, (window, state) in enumerate(zip(windows, states, strict=True)):
            if page := int(dst[row]):
                shifted = window[int(conv_bias[row]) :]
                conv[page, : len(shifted)] = shifted
                ssm[page] = state
