"""The gated norm before a Mamba layer's last projection."""

from bateleur.mamba.ops.gated_norm import torch
from bateleur.mamba.ops.shared.library import operator

gated_rms_norm = operator(torch.gated_rms_norm, mutates=(), like="x")
"""Root-mean-square norm over each of `groups` equal parts of the channels of x * silu(z), times weight.

x and z (T, inner), weight (inner,). Gate and norm in float32, cast to x's dtype, then the weight.
"""
