"""Replay and fold in C: tokens over a state that stands still and a ring of inputs, which a fold takes into the state.

A state is carried over the inputs one by one, so that outputs and states have the bits of updates of single tokens
(`native.update`), wherever a ring begins. See `ring.c`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.mamba.ops.native import MOST_TOKENS, dense
from bateleur.metadata.native import Kernel, kernels

_MOST_ENTRIES = 64
_SIGNATURES = (
    ("replay", "=" + "pll" + "pppll" + "plplpplplpp" + "ppppp" + "p" + "llllll" + "ffii"),
    ("replayable", "=ppppplllll"),
    ("fold", "=" + "pll" + "pppll" + "p" + "ppppp" + "lllll" + "ii"),
)


def takes_ring(ssm_state: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> bool:
    """Whether states (slots, H, P, N) and rings of a layer have the form that the kernels read."""
    (_, heads, channels, size), (rows, capacity) = ssm_state.shape, ring_dt.shape[:2]
    rings = ring_x.is_contiguous() and ring_dt.is_contiguous() and ring_B.is_contiguous()
    rings = rings and 0 < capacity <= _MOST_ENTRIES and ring_dt.shape[2] == heads
    rings = rings and ring_x.shape == (rows, capacity, heads, channels) and heads % ring_B.shape[2] == 0
    return rings and ring_B.shape[:2] == (rows, capacity) and ring_B.shape[3] == size


def replay(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    limits: tuple[float, float],
) -> Tensor:
    """As `replay_update`."""
    _, heads, channels, size = ssm_state.shape
    y = x.new_empty(x.shape)
    rows = dense(query_start_loc, slot, ring_row, ring_start, ring_len)
    wrong = _kernels()["replay"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], *_rings(ring_x, ring_dt, ring_B),
        x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0),
        C.data_ptr(), C.stride(0), D.data_ptr(), dt_bias.data_ptr(), *(each.data_ptr() for each in rows),
        y.data_ptr(), x.shape[0], slot.shape[0], heads, B.shape[1], channels, size, *limits,
        x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    if wrong:
        raise IndexError(
            f"slot, ring_row, ring_start, ring_len, query_start_loc: row {wrong - 1} names one of other slots than the "
            f"{ssm_state.shape[0]} there are, of other rings than the {ring_x.shape[0]}, more entries than their "
            f"{ring_x.shape[1]}, or not 0 to {MOST_TOKENS} of the {x.shape[0]} tokens"
        )
    return y


def fold(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
) -> bool:
    """As `fold_ring` does with the states of one layer; False, and nothing is done, where a row writes a slot that
    another one reads."""
    _, heads, channels, size = ssm_state.shape
    rows = dense(ring_row, ring_start, count, src, dst)
    wrong = _kernels()["fold"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], *_rings(ring_x, ring_dt, ring_B), A.data_ptr(),
        *(each.data_ptr() for each in rows), dst.shape[0], heads, ring_B.shape[2], channels, size,
        ring_x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    if wrong > 0:
        raise IndexError(
            f"src, dst, ring_row, ring_start, count: row {wrong - 1} names one of other slots than the "
            f"{ssm_state.shape[0]} there are, of other rings than the {ring_x.shape[0]}, or more entries than their "
            f"{ring_x.shape[1]}"
        )
    return not wrong


def function(name: str) -> Kernel:
    """One of `ring.c`."""
    return _kernels()[name]


def _rings(ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> tuple[int, ...]:
    return ring_x.data_ptr(), ring_dt.data_ptr(), ring_B.data_ptr(), *ring_dt.shape[:2]


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "ring.c", _SIGNATURES))
