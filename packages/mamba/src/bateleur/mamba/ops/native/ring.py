"""C forms of Mamba-2 decodes from a saved state and a ring of inputs, and of adding ring entries to saved states.

See `ring.c`. The inputs of a ring are processed one by one, so outputs and states have the same bits as updates with
single tokens (`mamba2.c`), wherever a ring starts.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.mamba.ops.native import MOST_TOKENS, contiguous, fits, is_indexed, takes, takes_state
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import Kernel, kernels
from bateleur.metadata.native.structs import Struct, fields

_MOST_ENTRIES = 64
"""Maximum capacity of a ring."""
_SIGNATURES = (
    ("replay", "=" + "pll" + "pppll" + "plplpplplpp" + "ppppp" + "p" + "llllll" + "ffii"),
    ("fold", "=" + "p" + "pppppp" + "li"),
)


def _takes_ring(ssm_state: Tensor, ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> bool:
    """Return whether shapes and strides of the states and rings of a layer are supported."""
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
    """Run Mamba-2 decodes from saved states and rings in C, or return `UNSUPPORTED` for other dtypes or layouts."""
    if not x.shape[0] or not slot.shape[0]:
        return UNSUPPORTED
    floats = takes(max_query_len, (x, dt, B, C, ring_x, ring_B), (ssm_state, ring_dt, A, D, dt_bias))
    floats = floats and takes_state(ssm_state, x, B, C, dt, A, D, dt_bias)
    integers = is_indexed(query_start_loc, slot, ring_row, ring_start, ring_len)
    if not (floats and integers and _takes_ring(ssm_state, ring_x, ring_dt, ring_B)):
        return UNSUPPORTED
    _, heads, channels, size = ssm_state.shape
    y = x.new_empty(x.shape)
    rows = contiguous(query_start_loc, slot, ring_row, ring_start, ring_len)
    wrong = _kernels()["replay"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], *_rings(ring_x, ring_dt, ring_B),
        x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0),
        C.data_ptr(), C.stride(0), D.data_ptr(), dt_bias.data_ptr(), *(each.data_ptr() for each in rows),
        y.data_ptr(), x.shape[0], slot.shape[0], heads, B.shape[1], channels, size, dt_min, dt_max,
        x.dtype is torch.float32, torch.get_num_threads(),
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
    """Return whether shapes and strides of conv states and of the requests' conv windows are supported."""
    lanes = conv_state.shape[3]
    dense = all(each.stride()[2:] == (lanes, 1) for each in (conv_state, request_conv))
    return dense and conv_state.dtype == request_conv.dtype and request_conv.shape[1] == ring_dt.shape[1]


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
) -> Unsupported | None:
    """Add ring entries to saved states in C, or return `UNSUPPORTED`, such as when a row writes what another reads."""
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
    wrong = _kernels()["fold"](
        ctypes.addressof(what), *(each.data_ptr() for each in rows), dst.shape[0], torch.get_num_threads()
    )
    if wrong > 0:
        raise IndexError(
            f"src, dst, ring_row, ring_start, count: row {wrong - 1} has a slot outside of [0, {slots - 1}], a ring "
            f"outside of [0, {ring_rows - 1}], or more ring entries than {capacity}"
        )
    return UNSUPPORTED if wrong else None


def _rings(ring_x: Tensor, ring_dt: Tensor, ring_B: Tensor) -> tuple[int, ...]:
    return ring_x.data_ptr(), ring_dt.data_ptr(), ring_B.data_ptr(), *ring_dt.shape[:2]


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "ring.c", _SIGNATURES))
