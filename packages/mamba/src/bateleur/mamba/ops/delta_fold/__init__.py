"""Adds ring entries (accepted tokens) of the delta rules to saved states. Shapes: as in `shared.delta_rule`."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.fold_window import copy_windows
from bateleur.mamba.ops.shared import compute_dtype, load_slots, store_slots
from bateleur.mamba.ops.shared.delta_rule import (
    RingEntries,
    decayed_keys,
    is_in_place,
    of_heads,
    ring_entries,
    slot_range,
    take,
)


@operator(mutates=("state", "conv_state"))
def delta_fold_ring(
    state: Tensor,
    conv_state: Tensor,
    request_conv: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
    page_offset: Tensor,
) -> None:
    """Update saved states with the first `count` entries of the rings of later tokens, in several layers at once.

    Args:
        state: (layers, slots, heads, Dv, Dk) for values of Dv and keys of Dk channels, updated in place.
        ring_k, ring_u, ring_g: as in `delta_replay_update`, with a leading dimension of layers.
        The others: as in `fold_ring`.
    """
    if dst.device.type == "cpu":  # only rows with a destination; other devices would have to synchronize
        if not any(dst.tolist()):
            return
        rows = torch.stack((ring_row, ring_start, count, src, dst, page_offset))
        ring_row, ring_start, count, src, dst, page_offset = rows[:, dst != 0]
    entries = ring_entries(ring_row, ring_start, count, ring_k.shape[2], (ring_k.shape[3], ring_u.shape[3]))
    copy_windows(conv_state, request_conv, ring_row, dst, page_offset)
    for states, k, u, g in zip(state, ring_k, ring_u, ring_g, strict=True):
        _fold_layer(states, (k, u, g), entries, src, dst)


def _fold_layer(
    state: Tensor, ring: tuple[Tensor, Tensor, Tensor], entries: RingEntries, src: Tensor, dst: Tensor
) -> None:
    """Decay the states over all ring entries, and add the outer product of each, decayed over the later entries."""
    (_, heads, lanes, size), (ring_k, ring_u, ring_g) = state.shape, ring
    dtype = compute_dtype(ring_u)
    keys, factor, under = decayed_keys(ring_k, ring_g, entries, dtype)
    values = take(ring_u, entries.values, entries.missing, dtype).mul_(factor)
    added = (values.flatten(0, 1).mT, of_heads(keys, heads).flatten(0, 1))
    a, b = (slot_range(src), slot_range(dst)) if is_in_place(state, dtype) else (None, None)
    if a is not None and b is not None and (a == b or a.stop <= b.start or b.stop <= a.start):
        torch.mul(state[a], under, out=state[b]).view(-1, lanes, size).baddbmm_(*added)
    else:
        states = load_slots(state, src, dtype).mul_(under)
        states.view(-1, lanes, size).baddbmm_(*added)
        store_slots(state, dst, states)
