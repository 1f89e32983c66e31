"""Activations with and without gates, one launch each. Legend: F elements of a tile."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata.dispatch import cdiv
from bateleur.runner.models.kernels import require_adjacent

_TILE_LANES = 1024


@triton.jit
def activation_kernel(
    gate_up_ptr, out_ptr, gate_up_token,
    SIZE: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Compute `act(gate_up)` of a token, or `act(gate) * up` if GATED, in float32. NAME: act, one of `Activation`.

    SIZE: outputs of a token. *_token: stride. Grid (tokens, tiles). Occupancy on sm_90: at least 16 blocks per SM.
    """
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    real = f < SIZE
    x_F = gate_up_ptr + token * gate_up_token + f
    x = tl.load(x_F, mask=real, other=0).to(tl.float32)
    if NAME == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif NAME == "clamped_swiglu":
        x = tl.where(x > 7.0, 7.0, x)
        y = x / (1.0 + tl.exp(-1.702 * x))
    else:
        y = tl.where(x < 0, 0.0, x)  # a NaN stays one
        y *= y
    if GATED:
        up = tl.load(x_F + SIZE, mask=real, other=0).to(tl.float32)
        if NAME == "clamped_swiglu":
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        y *= up
    tl.store(out_ptr + token * SIZE + f, y.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def gate_kernel(
    x_ptr, gate_ptr, out_ptr, x_token, gate_token,
    SIZE: tl.constexpr, SILU: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Compute `x * silu(gate)`, or `x * sigmoid(gate)` unless SILU, of a token, in float32.

    SIZE: elements of a token. *_token: strides. Grid (tokens, tiles). Occupancy on sm_90: at least 16 blocks per SM.
    """
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    real = f < SIZE
    x = tl.load(x_ptr + token * x_token + f, mask=real, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_token + f, mask=real, other=0).to(tl.float32)
    y = x / (1.0 + tl.exp(-gate))
    if SILU:
        y *= gate
    tl.store(out_ptr + token * SIZE + f, y.to(out_ptr.dtype.element_ty), mask=real)


@cache
def tile_options(size: int) -> dict[str, Any]:
    """Return tile sizes and launch options of both activation kernels for outputs (tokens, size)."""
    block = min(_TILE_LANES, triton.next_power_of_2(size))
    return {"BLOCK_F": block, "num_warps": max(1, min(4, block // 256)), "enable_fp_fusion": True}


def activation(gate_up: Tensor, size: int, name: str, gated: bool) -> Tensor:
    """Compute `models.mlp.activation` by a Triton kernel, with the same arguments and result."""
    require_adjacent(gate_up=gate_up)
    num_tokens = gate_up.shape[0]
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    options = tile_options(size)
    activation_kernel[(num_tokens, cdiv(size, options["BLOCK_F"]))](
        gate_up, out, gate_up.stride(0), SIZE=size, GATED=gated, NAME=name, **options
    )
    return out


def gate(x: Tensor, by: Tensor, name: str) -> Tensor:
    """Compute `models.mlp.gate` by a Triton kernel, with the same arguments and result."""
    require_adjacent(x=x, by=by)
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    options = tile_options(size)
    gate_kernel[(num_tokens, cdiv(size, options["BLOCK_F"]))](
        x, by, out, x.stride(0), by.stride(0), SIZE=size, SILU=name == "silu", **options
    )
    return out
