"""Replay and fold in C: tokens over a state that stands still and a ring of inputs, which a fold takes into the state.

A state is carried over the inputs one by one, so that outputs and states have the bits of updates of single tokens
(`update.c`), wherever a ring begins. See `ring.c`.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.mamba.ops.native import MOST_TOKENS, addresses, dense, fits, takes, takes_state
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import Kernel, kernels
from bateleur.metadata.native.structs import Struct, fields

_MOST_ENTRIES = 64
_SIGNATURES = (
    ("replay", "=" + "pll" + "pppll" + "plplpplplpp" + "ppppp" + "p" + "llllll" + "ffii"),
    ("replayable", "=ppppplllll"),
    ("fold", "=" + "p" + "pppppp" + "li"),
)


def _takes_ring(ssm_state: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> bool:
    """Whether states (slots, H, P, N) and rings of a layer have the form that the kernels read."""
    (_, heads, channels, size), (rows, capacity) = ssm_state.shape, ring_dt.shape[:2]
    rings = ring_x.is_contiguous() and ring_dt.is_contiguous() and ring_B.is_contiguous()
    rings = rings and 0 < capacity <= _MOST_ENTRIES and ring_dt.shape[2] == heads
    rings = rings and ring_x.shape == (rows, capacity, heads, channels) and heads % ring_B.shape[2] == 0
    return rings and ring_B.shape[:2] == (rows, capacity) and ring_B.shape[3] == size


def replay_update(
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
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor | Unsupported:
    """The operator in C."""
    if not x.shape[0] or not slot.shape[0]:
        return UNSUPPORTED
    floats = takes(max_query_len, (x, dt, B, C, ring_x, ring_B), (ssm_state, ring_dt, A, D, dt_bias))
    floats = floats and takes_state(ssm_state, x, B, C, dt, A, D, dt_bias)
    integers = addresses(query_start_loc, slot, ring_row, ring_start, ring_len)
    if not (floats and integers and _takes_ring(ssm_state, ring_x, ring_dt, ring_B)):
        return UNSUPPORTED
    _, heads, channels, size = ssm_state.shape
    y = x.new_empty(x.shape)
    rows = dense(query_start_loc, slot, ring_row, ring_start, ring_len)
    wrong = _kernels()["replay"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], *_rings(ring_x, ring_dt, ring_B),
        x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0),
        C.data_ptr(), C.stride(0), D.data_ptr(), dt_bias.data_ptr(), *(each.data_ptr() for each in rows),
        y.data_ptr(), x.shape[0], slot.shape[0], heads, B.shape[1], channels, size, dt_min, dt_max,
        x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    if wrong:
        raise IndexError(
            f"slot, ring_row, ring_start, ring_len, query_start_loc: row {wrong - 1} names one of other slots than the "
            f"{ssm_state.shape[0]} there are, of other rings than the {ring_x.shape[0]}, more entries than their "
            f"{ring_x.shape[1]}, or not 0 to {MOST_TOKENS} of the {x.shape[0]} tokens"
        )
    return y


class _Folded(Struct):
    _fields_: ClassVar = fields(
        "states ring_x ring_B ring_step A pages live",
        "layers next_states next_x next_B next_step next_A next_pages next_live slot_stride slots ring_rows capacity "
        "heads groups channels size page_stride live_stride live_len kept entry wide",
    )


def _takes_windows(conv_state: Tensor, live: Tensor, ring_dt: Tensor) -> bool:
    """Whether pages of windows (layers, slots, W - 1, C) and live windows, one a ring row, are as the kernel copies."""
    lanes = conv_state.shape[3]
    dense = all(each.stride()[2:] == (lanes, 1) for each in (conv_state, live))
    return dense and conv_state.dtype == live.dtype and live.shape[1] == ring_dt.shape[1]


def fold_ring(
    ssm_state: Tensor,
    conv_state: Tensor,
    live: Tensor,
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
) -> Unsupported | None:
    """The operator in C; `UNSUPPORTED` also where a row writes a slot that another one reads."""
    places = ring_row, ring_start, count, src, dst, page_offset
    pages = ssm_state.stride()[2:] == (math.prod(ssm_state.shape[3:]), ssm_state.shape[4], 1)
    pages = pages and fits(ssm_state.shape[3], ssm_state.shape[4])
    integers = all(each.dtype == torch.int64 for each in places)
    if not (integers and pages and takes(1, (ring_x, ring_B), (ssm_state, ring_dt, A))):
        return UNSUPPORTED
    if not _takes_windows(conv_state, live, ring_dt):
        return UNSUPPORTED
    if not _takes_ring(*(each[0] for each in (ssm_state, ring_x, ring_dt, ring_B))):
        return UNSUPPORTED
    (layers, slots, heads, channels, size), (_, ring_rows, capacity, groups, _) = (
        ssm_state.shape,
        ring_B.shape,
    )
    entry = live.element_size()
    what = _Folded(
        layers=layers, next_states=ssm_state.stride(0), next_x=ring_x.stride(0), next_B=ring_B.stride(0),
        next_step=ring_dt.stride(0), next_A=A.stride(0), next_pages=conv_state.stride(0) * entry,
        next_live=live.stride(0) * entry, slot_stride=ssm_state.stride(1), slots=slots, ring_rows=ring_rows,
        capacity=capacity, heads=heads, groups=groups, channels=channels, size=size,
        page_stride=conv_state.stride(1) * entry, live_stride=live.stride(1) * entry, live_len=live.shape[2],
        kept=conv_state.shape[2], entry=live.shape[3] * entry, wide=ring_x.dtype is torch.float32,
    )  # fmt: skip
    what.point(
        states=ssm_state, ring_x=ring_x, ring_B=ring_B, ring_step=ring_dt, A=A, pages=conv_state, live=live
    )
    rows = dense(*places)
    wrong = _kernels()["fold"](
        ctypes.addressof(what), *(each.data_ptr() for each in rows), dst.shape[0], torch.get_num_threads()
    )
    if wrong > 0:
        raise IndexError(
            f"src, dst, ring_row, ring_start, count: row {wrong - 1} names one of other slots than the {slots} there "
            f"are, of other rings than the {ring_rows}, or more entries than their {capacity}"
        )
    return UNSUPPORTED if wrong else None


def function(name: str) -> Kernel:
    """One of `ring.c`."""
    return _kernels()[name]


def _rings(ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> tuple[int, ...]:
    return ring_x.data_ptr(), ring_dt.data_ptr(), ring_B.data_ptr(), *ring_dt.shape[:2]


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "ring.c", _SIGNATURES))
