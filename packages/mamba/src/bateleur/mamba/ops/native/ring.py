"""C forms of Mamba-2 decodes from a saved state and a ring of inputs, and of adding ring entries to saved states.

See `ring.c`. The inputs of a ring are processed one by one, so outputs and states have the same bits as updates with
single tokens (`mamba2.c`), wherever a ring starts.
"""

import ctypes
import math
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.mamba.ops.native import MOST_TOKENS, contiguous, fits, is_indexed, takes
from bateleur.mamba.ops.native.mamba2 import inputs_of, sizes_of, takes_layer
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import Struct, fields, kernels, pointers

_MOST_ENTRIES = 64
"""Maximum capacity of a ring."""
_SIGNATURES = (
    ("replay", "=" + "pll" + "pppll" + "plplpplplpp" + "ppppp" + "p" + "llllll" + "ffii"),
    ("fold", "=" + "p" + "pppppp" + "li"),
)
_kernels = cache(partial(kernels, Path(__file__).parent / "ring.c", _SIGNATURES))


def _takes_ring(ssm_state: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> bool:
    """Return whether shapes and strides of the states and rings of a layer are supported."""
    (_, heads, channels, size), (rows, capacity) = ssm_state.shape, ring_dt.shape[:2]
    return (
        all(each.is_contiguous() for each in (ring_x, ring_dt, ring_B))
        and 0 < capacity <= _MOST_ENTRIES
        and ring_dt.shape[2] == heads
        and ring_x.shape == (rows, capacity, heads, channels)
        and ring_B.shape == (rows, capacity, ring_B.shape[2], size)
        and heads % ring_B.shape[2] == 0
    )


def replay_update(
    ssm_state: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor, dt_bias: Tensor, query_start_loc: Tensor, max_query_len: int, slot: Tensor, ring_row: Tensor,
    ring_start: Tensor, ring_len: Tensor, dt_min: float, dt_max: float,
) -> Tensor | Unsupported:  # fmt: skip
    """C form of `ops.replay_update`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    inputs, rings = (x, dt, A, B, C, D, dt_bias), (ring_x, ring_dt, ring_B)
    floats = takes_layer(max_query_len, ssm_state, *inputs) and takes(1, (x, ring_x, ring_B), (ring_dt,))
    integers = is_indexed(query_start_loc, slot, ring_row, ring_start, ring_len)
    if not (slot.shape[0] and floats and integers and _takes_ring(ssm_state, *rings)):
        return UNSUPPORTED
    y, rows = x.new_empty(x.shape), contiguous(query_start_loc, slot, ring_row, ring_start, ring_len)
    wrong = _kernels()["replay"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], *pointers(*rings), *ring_dt.shape[:2],
        *inputs_of(*inputs), *pointers(*rows), y.data_ptr(), *sizes_of(x, B, slot.shape[0], (dt_min, dt_max)),
    )  # fmt: skip
    if wrong:
        raise IndexError(
            f"slot, ring_row, ring_start, ring_len, query_start_loc: row {wrong - 1} has a slot outside of [0, "
            f"{ssm_state.shape[0] - 1}], a ring outside of [0, {ring_x.shape[0] - 1}], more ring entries than "
            f"{ring_x.shape[1]}, or not 0 to {MOST_TOKENS} of the {x.shape[0]} tokens"
        )
    return y


class _FoldLayers(Struct):
    """Argument struct of the C function `fold_layers` in `ring.c`, which updates saved states with ring entries."""

    _fields_: ClassVar = fields(
        "states ring_x ring_B ring_step A pages windows",
        "layers next_states next_x next_B next_step next_A next_pages next_windows slot_stride slots ring_rows "
        "capacity heads groups channels size page_stride window_stride window_len kept entry wide",
    )


def _takes_windows(conv_state: Tensor, request_conv: Tensor, ring_dt: Tensor) -> bool:
    """Return whether strides and dtypes of conv states and of the requests' conv windows are supported."""
    lanes = conv_state.shape[3]
    dense = all(each.stride()[2:] == (lanes, 1) for each in (conv_state, request_conv))
    return dense and conv_state.dtype == request_conv.dtype and request_conv.shape[1] == ring_dt.shape[1]


def fold_ring(
    ssm_state: Tensor, conv_state: Tensor, request_conv: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor,
    A: Tensor, ring_row: Tensor, ring_start: Tensor, count: Tensor, src: Tensor, dst: Tensor, page_offset: Tensor,
) -> Unsupported | None:  # fmt: skip
    """C form of `ops.fold_ring`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    places = ring_row, ring_start, count, src, dst, page_offset
    pages = ssm_state.stride()[2:] == (math.prod(ssm_state.shape[3:]), ssm_state.shape[4], 1)
    pages = pages and fits(ssm_state.shape[3], ssm_state.shape[4])
    integers = all(each.dtype == torch.int64 for each in places)
    if not (integers and pages and takes(1, (ring_x, ring_B), (ssm_state, ring_dt, A))):
        return UNSUPPORTED
    if not _takes_windows(conv_state, request_conv, ring_dt):
        return UNSUPPORTED
    if not _takes_ring(*(each[0] for each in (ssm_state, ring_x, ring_dt, ring_B))):
        return UNSUPPORTED
    (layers, slots, heads, channels, size), (_, ring_rows, capacity, groups, _) = (ssm_state.shape, ring_B.shape)
    entry = request_conv.element_size()
    what = _FoldLayers(
        layers=layers, next_states=ssm_state.stride(0), next_x=ring_x.stride(0), next_B=ring_B.stride(0),
        next_step=ring_dt.stride(0), next_A=A.stride(0), next_pages=conv_state.stride(0) * entry,
        next_windows=request_conv.stride(0) * entry, slot_stride=ssm_state.stride(1), slots=slots, ring_rows=ring_rows,
        capacity=capacity, heads=heads, groups=groups, channels=channels, size=size,
        page_stride=conv_state.stride(1) * entry, window_stride=request_conv.stride(1) * entry,
        window_len=request_conv.shape[2],
        kept=conv_state.shape[2], entry=request_conv.shape[3] * entry, wide=ring_x.dtype is torch.float32,
    )  # fmt: skip
    what.point(
        states=ssm_state, ring_x=ring_x, ring_B=ring_B, ring_step=ring_dt, A=A, pages=conv_state, windows=request_conv
    )
    rows = contiguous(*places)
    wrong = _kernels()["fold"](ctypes.addressof(what), *pointers(*rows), dst.shape[0], torch.get_num_threads())
    if wrong > 0:
        raise IndexError(
            f"src, dst, ring_row, ring_start, count: row {wrong - 1} has a slot outside of [0, {slots - 1}], a ring "
            f"outside of [0, {ring_rows - 1}], or more ring entries than {capacity}"
        )
    return UNSUPPORTED if wrong else None
