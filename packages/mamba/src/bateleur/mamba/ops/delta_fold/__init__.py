"""Accepted tokens of the delta rules, folded into a state. Shapes: as in `shared.delta`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, in_place, load, run_of, store
from bateleur.mamba.ops.shared.delta import Held, decayed_keys, entries, held, of_heads
from bateleur.mamba.ops.shared.windows import keep_windows


@operator(mutates=("state", "conv_state"))
def delta_fold_ring(
    state: Tensor,
    conv_state: Tensor,
    live: Tensor,
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
    """Advance states by the first `count` entries of their rings: the page after them goes to slot `dst`.

    As `fold_ring`, with the rings of `delta_replay_update`: all tensors but those of the rows have the layers in front;
    state (layers, slots, H, Dv, Dk).
    """
    if dst.device.type == "cpu":  # the rows with a destination; elsewhere all
        if not any(dst.tolist()):
            return
        rows = torch.stack((ring_row, ring_start, count, src, dst, page_offset))
        ring_row, ring_start, count, src, dst, page_offset = rows[:, dst != 0]
    of = held(ring_row, ring_start, count, ring_k.shape[2], (ring_k.shape[3], ring_u.shape[3]))
    keep_windows(conv_state, live, ring_row, dst, page_offset)
    for states, k, u, g in zip(state, ring_k, ring_u, ring_g, strict=True):
        _fold_layer(states, (k, u, g), of, src, dst)


def _fold_layer(
    state: Tensor, ring: tuple[Tensor, Tensor, Tensor], of: Held, src: Tensor, dst: Tensor
) -> None:
    """Decay the state over all entries, and add each one's outer product, decayed over those after it."""
    (_, heads, lanes, size), (ring_k, ring_u, ring_g) = state.shape, ring
    dtype = compute(ring_u)
    keys, factor, under = decayed_keys(ring_k, ring_g, of, dtype)
    values = entries(ring_u, of.values, of.gone, dtype).mul_(factor)
    added = (values.flatten(0, 1).mT, of_heads(keys, heads).flatten(0, 1))
    a, b = (run_of(src), run_of(dst)) if in_place(state, dtype) else (None, None)
    if a is not None and b is not None and (a == b or a.stop <= b.start or b.stop <= a.start):
        torch.mul(state[a], under, out=state[b]).view(-1, lanes, size).baddbmm_(*added)
    else:
        states = load(state, src, dtype).mul_(under)
        states.view(-1, lanes, size).baddbmm_(*added)
        store(state, dst, states)
