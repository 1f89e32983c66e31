"""RMS norms, fused with the sum before or after them. One program normalises one token, of M elements."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.runner.models.kernels import require_adjacent

_LANES_A_WARP = 512  # 16 a thread: two loads of 16 bytes in bfloat16


@triton.jit
def norm_kernel(
    x_ptr, y_ptr, z_ptr, weight_ptr, out_ptr, x_token, y_token, z_token, factor, z_factor, eps,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Add 0 to 2 TERMS (factor * y, z_factor * z) to the residual x of a token, store x, and write its RMS norm.

    SIZE: elements of a token. *_token: strides. Grid (tokens,). Occupancy on sm_90: at least 3 blocks per SM.
    """
    token, m = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_M)
    real = m < SIZE
    weight = tl.load(weight_ptr + m, mask=real, other=0).to(tl.float32)
    x = tl.load(x_ptr + token * x_token + m, mask=real, other=0)
    if TERMS > 0:
        y = tl.load(y_ptr + token * y_token + m, mask=real, other=0).to(tl.float32)
        x = (x.to(tl.float32) + factor * y).to(x_ptr.dtype.element_ty)
        if TERMS > 1:
            z = tl.load(z_ptr + token * z_token + m, mask=real, other=0).to(tl.float32)
            x = (x.to(tl.float32) + z_factor * z).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * x_token + m, x, mask=real)
    element = out_ptr.dtype.element_ty
    seen = x.to(element).to(tl.float32)  # what a layer reads from a wider stream
    scale = tl.rsqrt(tl.sum(seen * seen, 0) / SIZE + eps)
    tl.store(out_ptr + token * SIZE + m, (seen * scale * weight).to(element), mask=real)


@triton.jit
def add_normed_kernel(
    h_ptr, y_ptr, weight_ptr, h_token, y_token, factor, eps,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute `h += factor * rms_norm(y) * weight` for one token, in float32, rounded once.

    SIZE: elements of a token. *_token: strides. Grid (tokens,). Occupancy on sm_90: at least 2 blocks per SM.
    """
    token, m = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_M)
    real = m < SIZE
    weight = tl.load(weight_ptr + m, mask=real, other=0).to(tl.float32)
    h = tl.load(h_ptr + token * h_token + m, mask=real, other=0).to(tl.float32)
    y = tl.load(y_ptr + token * y_token + m, mask=real, other=0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps) * weight
    h += factor * y
    tl.store(h_ptr + token * h_token + m, h.to(h_ptr.dtype.element_ty), mask=real)


@cache
def tile_options(size: int) -> dict[str, Any]:
    """Return tile sizes and launch options of both norm kernels for tokens of `size` elements."""
    block = triton.next_power_of_2(size)
    return {"BLOCK_M": block, "num_warps": max(1, min(16, block // _LANES_A_WARP)), "enable_fp_fusion": True}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `models.norm.rms_norm` by a Triton kernel, with the same arguments and result."""
    return add_rms_norm(x, (), (), weight, eps, x.dtype)


def add_rms_norm(
    h: Tensor, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Compute `models.norm.add_rms_norm` by a Triton kernel, with the same arguments and result; terms may be ()."""
    y, z = (*terms, h, h)[:2]
    factor, z_factor = (*factors, 1.0, 1.0)[:2]
    require_adjacent(x=h, y=y, z=z, weight=weight)
    num_tokens, size = h.shape
    out = torch.empty(num_tokens, size, dtype=dtype, device=h.device)
    norm_kernel[(num_tokens,)](
        h, y, z, weight, out, h.stride(0), y.stride(0), z.stride(0), factor, z_factor, eps,
        SIZE=size, TERMS=len(terms), **tile_options(size),
    )  # fmt: skip
    return out


def add_normed(h: Tensor, y: Tensor, factor: float, weight: Tensor, eps: float) -> None:
    """Compute `models.norm.add_normed` by a Triton kernel, with the same arguments."""
    require_adjacent(h=h, y=y, weight=weight)
    num_tokens, size = h.shape
    strides = h.stride(0), y.stride(0)
    add_normed_kernel[(num_tokens,)](h, y, weight, *strides, factor, eps, SIZE=size, **tile_options(size))
