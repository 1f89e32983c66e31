"""Helpers of the Triton kernels: step sizes, activations, tiles, rows with a destination slot, tensor checks."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.dispatch import next_power_of_2

INDICES = (
    "chunk_row_ptr",
    "chunk_starts_ptr",
    "chunk_write_ptr",
    "kept_ptr",
    "window_write_ptr",
    "read_ptr",
    "row_chunk_ptr",
    "starts_ptr",
)
"""Parameters that point into a larger tensor. Their alignment changes between steps; specializing on it would compile
kernels in the middle of a step."""

LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
"""Default launch options."""


@triton.jit
def softplus(v):
    """Return log(1 + exp(v)) of a float32; NaN stays NaN."""
    tiny = tl.exp(-tl.abs(v))
    # log1p that is accurate for tiny arguments: the rounding of 1 + tiny cancels.
    one = 1.0 + tiny
    rest = one - 1.0
    log1p = tl.where(rest == 0.0, tiny, tl.log(one) * (tiny / tl.where(rest == 0.0, 1.0, rest)))
    return tl.maximum(v, 0.0) + log1p


@triton.jit
def step_size(dt, bias, dt_min, dt_max):
    """Return clamp(softplus(dt + bias), dt_min, dt_max) in float32; NaN stays NaN."""
    step = tl.maximum(softplus(dt.to(tl.float32) + bias), dt_min, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(step, dt_max, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(v):
    """Return 1 / (1 + exp(-v)) of a float32; 0 for large negative v, because exp(-v) is infinite."""
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def silu(v):
    """Return v * sigmoid(v) of a float32, with one division."""
    return v / (1.0 + tl.exp(-v))


@triton.jit
def rounded(v, PRECISION: tl.constexpr):
    """Round a float32 operand of a TF32 product to nearest; tensor cores truncate towards zero.

    NaN is not rounded: all bits of CUDA's NaN are set, and the sum would overflow to zero.
    """
    if PRECISION == "tf32":
        bits = (v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        v = tl.where(v == v, bits.to(tl.float32, bitcast=True), v)
    return v


@triton.jit
def unless_null(slot, size):
    """Return the number of entries of a state slot to read or write: ``size``, or 0 for the null slot 0."""
    return tl.where(slot == 0, 0, size)


@triton.jit
def load_tile(ptr_L, offset_E, real_E, real_L):
    """Load a tile (E, L) from the addresses ``ptr_L + offset_E``; zeros where ``real_E`` or ``real_L`` is false."""
    return tl.load(ptr_L[None, :] + offset_E[:, None], mask=real_E[:, None] & real_L[None, :], other=0)


@triton.jit
def store_tile(ptr_L, offset_E, value_EL, real_E, real_L):
    """Store a tile (E, L) to the addresses ``ptr_L + offset_E``, in the dtype of the memory; masks: real_E, real_L."""
    element = ptr_L.dtype.element_ty
    tl.store(ptr_L[None, :] + offset_E[:, None], value_EL.to(element), mask=real_E[:, None] & real_L[None, :])


@triton.jit
def rows_of_share(dst_ptr, r, num_rows):
    """Load the destination slots (R,) of the requests ``r`` that this program handles (grid axis 1), 0 for others."""
    mine_R = (r < num_rows) & (r % tl.num_programs(1) == tl.program_id(1))
    return tl.load(dst_ptr + r, mask=mine_R, other=0)


@triton.jit
def next_row(dst_R, r, row):
    """Return the first of the requests ``r`` after ``row`` with a destination slot; 2^31 - 1 if there is none."""
    return tl.min(tl.where((dst_R != 0) & (r > row), r, 0x7FFFFFFF), 0)


def row_shares(num_rows: int, programs: int) -> int:
    """Return the number of groups of requests (grid axis 1) if each group has ``programs`` programs.

    Most requests have no work, and a program without work takes about 1 us. 2,048 programs are eight waves on a GPU
    with two programs on each of 132 multiprocessors, which is enough to saturate memory.
    """
    return max(1, min(num_rows, 2048 // programs))


@triton.jit
def zero_tail(out_ptr, first, num_tokens, width, lane_L, real_L):
    """Zero the outputs of tokens from ``first`` on, which belong to no request.

    ``width``: stride of tokens. ``lane_L``: channels to zero, masked by ``real_L``.
    """
    out_L = out_ptr + first.to(tl.int64) * width + lane_L
    for _ in range(num_tokens - first):
        tl.store(out_L, tl.zeros(lane_L.shape, out_ptr.dtype.element_ty), mask=real_L)
        out_L += width


@triton.jit
def keep_window(
    window_ptr, conv_ptr, offset, tile, window_entry, conv_entry,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy ``KEEP`` entries of a request conv window, from ``offset`` on, to a state slot, for one tile of channels."""
    e, c = tl.arange(0, BLOCK_E), tile * BLOCK_C + tl.arange(0, BLOCK_C)
    window_EC = load_tile(window_ptr + c, (offset + e) * window_entry, e < KEEP, c < CHANNELS)
    store_tile(conv_ptr + c, e * conv_entry, window_EC, e < KEEP, c < CHANNELS)


def require_dense(dims: int, **tensors: Tensor) -> None:
    """Raise ValueError unless the last ``dims`` dimensions of each tensor are contiguous."""
    for name, tensor in tensors.items():
        step, shape, strides = 1, tensor.shape, tensor.stride()
        for axis in range(-1, -dims - 1, -1):
            if strides[axis] != step and shape[axis] != 1:
                rule = f"must be dense in the last {dims} of {tuple(shape)}"
                raise ValueError(f"{name}: strides {strides} {rule}")
            step *= shape[axis]


@cache
def precision(dtype: torch.dtype, *, state: bool = False) -> str:
    """Return `input_precision` of `tl.dot` for products of float32 with activations of ``dtype``.

    TF32 has 11 bits, which hold bfloat16 and float16 exactly. A float32 operand must be ``rounded`` to them first.
    Products that are added to a ``state`` keep 22 bits of it, by three TF32 products.
    """
    if dtype == torch.float32:
        return "ieee"
    return "tf32x3" if state else "tf32"


@cache
def state_tile(head_dim: int, entries: int) -> int:
    """Return the number of head channels of a tile: the largest power of two, at most `entries`, for which padding adds
    at most a quarter to `head_dim`; at least 16.

    entries: maximum number of channels of a tile, a power of two.
    """
    rows = max(16, min(entries, next_power_of_2(head_dim)))
    while rows > 16 and -(-head_dim // rows) * rows * 4 > head_dim * 5:
        rows //= 2
    return rows


@cache
def fold_options(capacity: int, keep: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return launch options of kernels that add entries of rings (later inputs) to states and copy conv windows.

    capacity, keep: entries of a ring and of a window. dtype: dtype of the ring's inputs, see `precision`.
    """
    return LAUNCH | {
        "BLOCK_J": max(16, next_power_of_2(capacity)),
        "PRECISION": precision(dtype, state=True),
        "BLOCK_E": next_power_of_2(keep),
        "BLOCK_C": 512,
        "BLOCK_R": 256,
    }
