"""The causal convolution of few tokens a row, over a window that may begin anywhere in its slot."""

from bateleur.mamba.ops.conv_update import torch
from bateleur.mamba.ops.shared.library import operator

causal_conv1d_update = operator(torch.causal_conv1d_update, mutates=("conv_state",), like="x")
"""Depthwise causal convolution of 1 to 1 + K tokens per row, of which a suffix may be rejected later.

x, weight, bias and activation as for `causal_conv1d_varlen`, read and write (R,). The initial window is
conv_state[read, offset : offset + W - 1], offset (R,) being the number of tokens accepted by the previous step
minus one, and a row of q tokens leaves all but the oldest of its window and tokens in
conv_state[write, : W - 2 + q]; entries behind them are unspecified. max_query_len bounds q.

With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
"""
