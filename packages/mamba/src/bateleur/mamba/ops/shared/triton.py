"""What the kernels share: step sizes, activation, the tokens of no row, and what they ask of their tensors."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INDICES = (
    "chunk_row_ptr",
    "chunk_starts_ptr",
    "chunk_write_ptr",
    "kept_ptr",
    "live_write_ptr",
    "read_ptr",
    "row_chunk_ptr",
    "starts_ptr",
)
"""Parameters that are parts of a batch's tensors: where they begin changes from step to step, and a kernel of its own
for each alignment would be compiled in the middle of one."""

LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
"""Launch options of a kernel that has no reason for others."""


@triton.jit
def softplus(v):
    """log(1 + exp(v)) of a float32; a NaN stays one."""
    tiny = tl.exp(-tl.abs(v))
    # log1p, as accurate for a tiny argument: the rounding of 1 + tiny cancels.
    one = 1.0 + tiny
    rest = one - 1.0
    log1p = tl.where(rest == 0.0, tiny, tl.log(one) * (tiny / tl.where(rest == 0.0, 1.0, rest)))
    return tl.maximum(v, 0.0) + log1p


@triton.jit
def step_size(dt, bias, dt_min, dt_max):
    """clamp(softplus(dt + bias), dt_min, dt_max) in float32; a NaN stays one, where plain bounds would give a bound."""
    step = tl.maximum(softplus(dt.to(tl.float32) + bias), dt_min, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(step, dt_max, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)) of a float32; a large negative v gives 0, for exp(-v) is then infinite."""
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def silu(v):
    """v * sigmoid(v) of a float32, in one division."""
    return v / (1.0 + tl.exp(-v))


@triton.jit
def rounded(v, PRECISION: tl.constexpr):
    """A float32 operand of a product in TF32, to nearest: the tensor cores cut bits off, always towards zero.

    Not a NaN: all bits of CUDA's are set, and the sum would overflow to a zero.
    """
    if PRECISION == "tf32":
        bits = (v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        v = tl.where(v == v, bits.to(tl.float32, bitcast=True), v)
    return v


@triton.jit
def unless_null(slot, size):
    """``size``, or 0 for the null slot: how many lanes of a slot are there to be read or written."""
    return tl.where(slot == 0, 0, size)


@triton.jit
def load_tile(ptr_L, offset_E, real_E, real_L):
    """(E, L): lanes ``ptr_L`` of entries ``offset_E`` behind them, zeros where one of the two is not real."""
    return tl.load(ptr_L[None, :] + offset_E[:, None], mask=real_E[:, None] & real_L[None, :], other=0)


@triton.jit
def store_tile(ptr_L, offset_E, value_EL, real_E, real_L):
    """Store (E, L) values, in the target's type, to lanes ``ptr_L`` of entries ``offset_E`` behind them."""
    element = ptr_L.dtype.element_ty
    tl.store(ptr_L[None, :] + offset_E[:, None], value_EL.to(element), mask=real_E[:, None] & real_L[None, :])


@triton.jit
def rows_of_share(dst_ptr, r, num_rows):
    """(R,) destinations of the rows ``r`` in this program's share, which axis 1 of the grid names; 0 for the others."""
    mine_R = (r < num_rows) & (r % tl.num_programs(1) == tl.program_id(1))
    return tl.load(dst_ptr + r, mask=mine_R, other=0)


@triton.jit
def next_row(dst_R, r, row):
    """The first of the rows ``r`` after ``row`` that has a destination; a number above all rows if none has."""
    return tl.min(tl.where((dst_R != 0) & (r > row), r, 0x7FFFFFFF), 0)


def row_shares(num_rows: int, programs: int) -> int:
    """Into how many shares rows are divided, with ``programs`` programs each.

    Most rows have nothing to do, and a program that finds none takes about 1 us. 2,048 programs are eight rounds of a
    GPU that holds two on each of 132 multiprocessors, and enough to read states as fast as memory gives them.
    """
    return max(1, min(num_rows, 2048 // programs))


@triton.jit
def zero_tail(out_ptr, first, num_tokens, width, lane_L, real_L):
    """Zero lanes of the tokens ``first`` to ``num_tokens - 1``, which belong to no row; tokens are ``width`` apart."""
    out_L = out_ptr + first.to(tl.int64) * width + lane_L
    for _ in range(num_tokens - first):
        tl.store(out_L, tl.zeros(lane_L.shape, out_ptr.dtype.element_ty), mask=real_L)
        out_L += width


def require_dense(dims: int, **tensors: Tensor) -> None:
    """Raise ValueError unless the last ``dims`` dimensions of each tensor lie as in a fresh one."""
    for name, tensor in tensors.items():
        step, shape, strides = 1, tensor.shape, tensor.stride()
        for axis in range(-1, -dims - 1, -1):
            if strides[axis] != step and shape[axis] != 1:
                rule = f"must be dense in the last {dims} of {tuple(shape)}"
                raise ValueError(f"{name}: strides {strides} {rule}")
            step *= shape[axis]


def precision(dtype: torch.dtype, *, state: bool = False) -> str:
    """How matrices are multiplied that go with activations of ``dtype``.

    Halves are exact in TF32, and what they meet is ``rounded`` to 11 bits, of which outputs keep 8 or 11. What goes
    into a state is not: ``state`` asks for three products, which give 22 bits.
    """
    if dtype == torch.float32:
        return "ieee"
    return "tf32x3" if state else "tf32"


def state_tile(head_dim: int, entries: int) -> int:
    """Rows of a tile: the largest power of two from 16 to ``entries`` of which at most a quarter is padding."""
    rows = max(16, min(entries, int(triton.next_power_of_2(head_dim))))
    while rows > 16 and -(-head_dim // rows) * rows * 4 > head_dim * 5:
        rows //= 2
    return rows
