"""Accepted inputs of rings, folded into states."""

from bateleur.mamba.ops.fold import torch
from bateleur.mamba.ops.shared.library import operator

fold_ring = operator(torch.fold_ring, mutates=("ssm_state", "conv_state"))
"""Advance states by the first `count` entries of their rings: the page after them goes to slot `dst`.

In some layers at once, which all tensors but those of the rows have in front: ssm_state (layers, slots, H, P, N).
In each, ssm_state[dst] is ssm_state[src] after the entries, where src and dst may be one slot; conv_state[dst],
(slots, W - 1, C), is live[ring_row, page_offset : page_offset + W - 1]. Rings, live, A and ring rows as for
`replay_update` and `causal_conv1d_varlen`; ring_row, ring_start, count, src, dst and page_offset (R,) int64. A row
with dst 0 is not folded, whatever its other fields hold. The rings are not changed: the caller moves ring_start.
"""
