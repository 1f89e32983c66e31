"""Accepted tokens of the delta rules, folded into a state. Shapes: as in `shared.delta`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, in_place, load, run_of, store
from bateleur.mamba.ops.shared.delta import decayed, entries, inverse_length, of_heads
from bateleur.mamba.ops.shared.rings import Ages, by_age
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
    ages = by_age(ring_row, ring_start, count - 1, ring_k.shape[2])
    keep_windows(conv_state, live, ring_row, dst, page_offset)
    for states, k, u, g in zip(state, ring_k, ring_u, ring_g, strict=True):
        _fold_layer(states, (k, u, g), ages, src, dst)


def _fold_layer(
    state: Tensor, ring: tuple[Tensor, Tensor, Tensor], ages: Ages, src: Tensor, dst: Tensor
) -> None:
    """Decay the state over all entries, and add each one's outer product, decayed over those after it."""
    ring_k, ring_u, ring_g = ring
    (_, heads, lanes, size), groups, dtype = state.shape, ring_k.shape[2], compute(ring_u)
    left, under = decayed(ring_g, ages, heads, dtype)
    gone = ages.gone[:, 1:].unsqueeze(1)
    keys = entries(ring_k, ages.at, groups, dtype).masked_fill_(gone, 0)
    keys.mul_(inverse_length(keys))
    values = entries(ring_u, ages.at, heads, dtype).masked_fill_(gone, 0)
    keys = of_heads(keys, heads)
    (keys if left.shape[3] > 1 else values).mul_(left)
    added = (values.flatten(0, 1).mT, keys.flatten(0, 1))
    a, b = (run_of(src), run_of(dst)) if in_place(state, dtype) else (None, None)
    if a is not None and b is not None and (a == b or a.stop <= b.start or b.stop <= a.start):
        torch.mul(state[a], under, out=state[b]).view(-1, lanes, size).baddbmm_(*added)
    else:
        states = load(state, src, dtype).mul_(under)
        states.view(-1, lanes, size).baddbmm_(*added)
        store(state, dst, states)
