"""Adds ring entries (accepted inputs) of Mamba-2 to saved states. Shapes: as in `shared.mamba2_ring`."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.fold_window import copy_windows
from bateleur.mamba.ops.shared import compute_dtype, load_slots, store_slots
from bateleur.mamba.ops.shared.mamba2_ring import RingIndices, by_group, decays, ring_indices, take


@operator(mutates=("ssm_state", "conv_state"), native="ring")
def fold_ring(
    ssm_state: Tensor,
    conv_state: Tensor,
    request_conv: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
    page_offset: Tensor,
) -> None:
    """Update saved states with the first `count` entries of the rings of later inputs, in several layers at once.

    In each layer, ssm_state[dst] becomes ssm_state[src] updated with the entries, and conv_state[dst] becomes
    request_conv[ring_row, page_offset : page_offset + W - 1]. The rings are not changed: the caller advances
    ring_start.

    Args:
        ssm_state: (layers, slots, heads, head channels, state entries), updated in place.
        conv_state: (layers, slots, W - 1, C) for W taps and C conv channels, updated in place.
        request_conv, ring_x, ring_dt, ring_B, A: as in `causal_conv1d_varlen` and `replay_update`, with a leading
            dimension of layers.
        ring_row, ring_start, count, src, dst, page_offset: (R,) int64. src and dst may be equal. A row with dst 0 is
            skipped, and its other values are ignored.
    """
    rows = ring_row, ring_start, count, src, dst, page_offset
    if dst.device.type == "cpu":  # only rows with a destination; other devices would have to synchronize
        if not any(dst.tolist()):
            return
        ring_row, ring_start, count, src, dst, page_offset = torch.stack(rows)[:, dst != 0]
    copy_windows(conv_state, request_conv, ring_row, dst, page_offset)
    index = ring_indices(ring_row, ring_start, count - 1, ring_x.shape[2])
    for layer in zip(ssm_state, ring_x, ring_dt, ring_B, A, strict=True):
        _fold_layer(*layer, index, src, dst)


def _fold_layer(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    index: RingIndices,
    src: Tensor,
    dst: Tensor,
) -> None:
    """Decay the states over all ring entries, and add the outer product of each, decayed over the later entries."""
    (_, _, heads, channels), dtype, groups = ring_x.shape, compute_dtype(ring_dt), ring_B.shape[2]
    decay, weight = decays(ring_dt, index, A, 1, dtype)
    u = take(ring_x, index.at).to(dtype).unflatten(2, (heads, channels))
    u = by_group((u * weight.view(*index.at.shape, heads, 1)).flatten(2), groups).mT
    Bs = by_group(take(ring_B, index.at).to(dtype), groups)
    state = load_slots(ssm_state, src, dtype).mul_(decay.view(-1, heads, 1, 1))
    state.view(len(u), -1, Bs.shape[2]).baddbmm_(u, Bs)
    store_slots(ssm_state, dst, state)
