"""LoRA adapters in two launches per projection. Legend: K columns (input), R low rank, N rows (output)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.dispatch import cdiv
from bateleur.runner.models.kernels import require_adjacent

_TILE_ENTRIES = 2048
"""Entries of a matrix that a program holds at once."""


@triton.jit
def shrink_kernel(
    x_ptr, a_ptr, slot_ptr, lanes_ptr, x_token, num_columns,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute `lanes[t] = a[slot] @ x[t]` (RANK float32 numbers) for the adapter slot of a token t. Skip slot 0.

    x_token: stride of x. Grid (tokens, tiles of RANK). Occupancy on sm_90: at least 8 blocks per SM.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot == 0:
        return
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    real_r = r < RANK
    a_R = a_ptr + (slot * RANK + r.to(tl.int64)) * num_columns
    sum_RK = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for first in range(0, num_columns, BLOCK_K):
        real_k = first + k < num_columns
        x_K = tl.load(x_ptr + token * x_token + first + k, mask=real_k, other=0).to(tl.float32)
        mask = real_r[:, None] & real_k[None, :]
        a_RK = tl.load(a_R[:, None] + first + k[None, :], mask=mask, other=0).to(tl.float32)
        sum_RK += a_RK * x_K[None, :]
    tl.store(lanes_ptr + token * RANK + r, tl.sum(sum_RK, 1), mask=real_r)


@triton.jit
def expand_kernel(
    y_ptr, lanes_ptr, b_ptr, slot_ptr, y_token, num_rows,
    RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute `y[t] += b[slot] @ lanes[t]` in float32, rounded once, for the adapter slot of a token t. Skip slot 0.

    lanes: from `shrink_kernel`. Grid (tokens, tiles of rows). Occupancy on sm_90: at least 8 blocks per SM.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot == 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_n = n < num_rows
    b_N = b_ptr + (slot * num_rows + n.to(tl.int64)) * RANK
    sum_N = tl.zeros((BLOCK_N,), tl.float32)
    for first in tl.static_range(0, RANK, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        real_r = r < RANK
        lanes_R = tl.load(lanes_ptr + token * RANK + r, mask=real_r, other=0)
        mask = real_n[:, None] & real_r[None, :]
        b_NR = tl.load(b_N[:, None] + r[None, :], mask=mask, other=0).to(tl.float32)
        sum_N += tl.sum(b_NR * lanes_R[None, :], 1)
    y_N = y_ptr + token * y_token + n
    y = tl.load(y_N, mask=real_n, other=0).to(tl.float32)
    tl.store(y_N, (y + sum_N).to(y_ptr.dtype.element_ty), mask=real_n)


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> None:
    """Compute `models.lora.add_lora` by two Triton kernels, with the same arguments."""
    require_adjacent(y=y, x=x, a=a, b=b)
    num_tokens, (_, rank, num_columns), num_rows = len(x), a.shape, b.shape[1]
    lanes = torch.empty(num_tokens, rank, dtype=torch.float32, device=x.device)
    block_r = min(32, triton.next_power_of_2(rank))
    block_k = min(_TILE_ENTRIES // block_r, triton.next_power_of_2(num_columns))
    shrink_kernel[(num_tokens, cdiv(rank, block_r))](
        x, a, slots, lanes, x.stride(0), num_columns,
        RANK=rank, BLOCK_R=block_r, BLOCK_K=block_k, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    block_n = min(_TILE_ENTRIES // block_r, triton.next_power_of_2(num_rows))
    expand_kernel[(num_tokens, cdiv(num_rows, block_n))](
        y, lanes, b, slots, y.stride(0), num_rows,
        RANK=rank, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
