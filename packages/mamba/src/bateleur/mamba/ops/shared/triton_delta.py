"""What the kernels of the delta rules share: gates, unit keys, products, and the small systems of corrected values.

A head has one decay, or one for each key channel: D is 1 or K below, so that what goes with decays is broadcast.
Legend: T tokens of a tile, K key channels of a head, V value channels of its tile, D decays of a head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.ops.shared.triton import load_tile, rounded, sigmoid, softplus


@triton.jit
def unit(x_TK):
    """Rows of length 1, in float32; a row of zeros stays one."""
    x_TK = x_TK.to(tl.float32)
    return x_TK * tl.rsqrt(tl.sum(x_TK * x_TK, 1) + 1e-6)[:, None]


@triton.jit
def log_decays(a_D, a_offset_T, A, bias_D, real_T, real_D):
    """(T, D) logarithms of what is left after each token; ``a_D`` and ``bias_D`` are pointers by decay."""
    bias_D = tl.load(bias_D, mask=real_D, other=0).to(tl.float32)
    a_TD = load_tile(a_D, a_offset_T, real_T, real_D).to(tl.float32)
    return tl.where(real_T[:, None], A * softplus(a_TD + bias_D[None, :]), 0.0)


@triton.jit
def betas(b_T, real_T, beta_scale):
    """(T,) how far a value is corrected; ``b_T`` are pointers."""
    return beta_scale * sigmoid(tl.load(b_T, mask=real_T, other=0).to(tl.float32))


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """A matrix product of float32 operands."""
    return tl.dot(rounded(x, PRECISION), rounded(y, PRECISION), input_precision=PRECISION)


@triton.jit
def decayed_keys(
    ring_k_ptr, ring_g_ptr, head, start, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of the first ``count`` entries of a row's ring: (J, K) unit keys, decayed by the entries after them, and what all
    of them leave of the state before, (D,). Entries that are not there are zeros.
    """
    j, k, d = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    real_J, real_K, real_D = j < count, k < KEY_DIM, d < DECAYS
    place_J, after_J = ((start + j) % CAPACITY).to(tl.int64), ((start + j + 1) % CAPACITY).to(tl.int64)
    ring_g_D = ring_g_ptr + head * DECAYS + d
    g_JD = load_tile(ring_g_D, place_J * (HEADS * DECAYS), real_J, real_D).to(tl.float32)
    later_JD = load_tile(ring_g_D, after_J * (HEADS * DECAYS), j + 1 < count, real_D).to(tl.float32)
    ring_k_K = ring_k_ptr + head // GROUP * KEY_DIM + k
    k_JK = unit(load_tile(ring_k_K, place_J * (HEADS // GROUP * KEY_DIM), real_J, real_K))
    # Summed anew, not as differences of sums: what came before a strong decay loses no digit.
    return k_JK * tl.exp(tl.cumsum(later_JD, 0, reverse=True)), tl.exp(tl.sum(g_JD, 0))


def shape_options(q: Tensor, v: Tensor, a: Tensor) -> dict[str, int]:
    """Sizes that kernels are compiled for; a (..., H) or (..., H, Dk) belongs to v (..., H, Dv) and q (..., G, Dk)."""
    heads, value_dim = v.shape[-2:]
    groups, key_dim = q.shape[-2:]
    decays = key_dim if a.dim() == v.dim() else 1
    return {
        "HEADS": heads,
        "GROUP": heads // groups,
        "VALUE_DIM": value_dim,
        "KEY_DIM": key_dim,
        "DECAYS": decays,
    }


def block_options(key_dim: int, decays: int, *, least: int = 16) -> dict[str, Any]:
    """Tiles that hold all key channels, and all decays; products take at least 16."""
    block_k = max(least, triton.next_power_of_2(key_dim))
    return {"BLOCK_K": block_k, "BLOCK_D": 1 if decays == 1 else block_k}


def by_head(a: Tensor) -> tuple[int, int]:
    """How far tokens and heads of raw decays lie apart."""
    return a.stride(0), a.stride(1)
