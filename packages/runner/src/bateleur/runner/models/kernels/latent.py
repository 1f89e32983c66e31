"""Joins the parts of keys and values in MLA; a program computes some heads of a token. Legend: H heads, D head size."""

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
def join_kernel(
    kv_up_ptr, shared_ptr, k_ptr, v_ptr, kv_up_token, shared_token,
    HEADS: tl.constexpr, KEY: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute `models.attention.join_heads` of some heads: k = own part | shared part | zeros, v = value | zeros.

    KEY, SHARED: elements of the own and shared part of a key. VALUE: of a value. HEAD_DIM: of k, v. *_token: strides.
    Grid (tokens, tiles of heads). Occupancy on sm_90: at least 16 blocks per SM.
    """
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)[None, :]
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    real_HD = (h < HEADS) & (d < HEAD_DIM)
    kv_up_HD = kv_up_ptr + token * kv_up_token + h * (KEY + VALUE) + d
    own_HD = tl.load(kv_up_HD, mask=real_HD & (d < KEY), other=0)
    among = (d >= KEY) & (d < KEY + SHARED)
    shared_D = tl.load(shared_ptr + token * shared_token + d - KEY, mask=among, other=0)
    to_HD = (token * HEADS + h) * HEAD_DIM + d
    tl.store(k_ptr + to_HD, tl.where(among, shared_D, own_HD), mask=real_HD)
    tl.store(v_ptr + to_HD, tl.load(kv_up_HD + KEY, mask=real_HD & (d < VALUE), other=0), mask=real_HD)


@cache
def tile_options(heads: int, head_dim: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `join_kernel`."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = max(1, min(triton.next_power_of_2(heads), _TILE_LANES // block_d))
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": 4, "enable_fp_fusion": True}


def join_heads(kv_up: Tensor, shared: Tensor, heads: int, key_dim: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Compute `models.attention.join_heads` by a Triton kernel, with the same arguments and result."""
    require_adjacent(kv_up=kv_up, shared=shared)
    num_tokens = kv_up.shape[0]
    k, v = (torch.empty(num_tokens, heads, head_dim, dtype=kv_up.dtype, device=kv_up.device) for _ in range(2))
    options = tile_options(heads, head_dim)
    join_kernel[(num_tokens, cdiv(heads, options["BLOCK_H"]))](
        kv_up, shared, k, v, kv_up.stride(0), shared.stride(0),
        HEADS=heads, KEY=key_dim, SHARED=shared.shape[1], VALUE=kv_up.shape[1] // heads - key_dim,
        HEAD_DIM=head_dim, **options,
    )  # fmt: skip
    return k, v
