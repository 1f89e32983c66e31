"""Copies of whole pages between slots."""

from bateleur.mamba.ops.copy import torch
from bateleur.mamba.ops.shared.library import operator

copy_states = operator(torch.copy_states, mutates=("conv_state", "ssm_state"))
"""Copy pages between slots: conv_state[conv_src] without its first conv_bias entries, and ssm_state[ssm_src].

In some layers at once: conv_state (layers, slots, W - 1 + K, C), ssm_state (layers, slots, H, P, N). conv_src,
conv_bias, ssm_src and dst (R,) int64. Entry i of the new window is entry i + conv_bias of the old one; the last
conv_bias entries are unspecified. A row with dst 0 copies nothing.
"""
