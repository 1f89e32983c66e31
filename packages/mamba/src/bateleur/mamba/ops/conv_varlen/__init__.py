"""The causal convolution of prompts."""

from bateleur.mamba.ops.conv_varlen import torch
from bateleur.mamba.ops.shared.library import operator

causal_conv1d_varlen = operator(torch.causal_conv1d_varlen, mutates=("conv_state", "live"), like="x")
"""Depthwise causal convolution of prompts, each continuing the window in its `read` slot.

x (T, C), weight (C, W), bias (C,) or None, read (R,), chunks as for `ssd_scan_varlen`; activation is "silu" or
"none". Leaves the W - 1 raw inputs up to the end of chunk k in conv_state[chunk_write[k], : W - 1], and those up to
the end of row r in live[live_write[r], : W - 1], where live is (live rows, W - 1 + K, C) with null row 0, or None.
Where a row has fewer inputs, the end of its initial window stands before them. Further entries of what is written
are not touched. Returns (T, C).

Raises ValueError for an unknown activation.
"""
