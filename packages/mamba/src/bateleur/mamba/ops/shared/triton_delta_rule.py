"""Helpers of the delta-rule kernels: gates, normalized keys, products, and the triangular systems of corrected values.

A head has one decay, or one per key channel: D is 1 or K, and D decays are broadcast over K channels.
Legend: T tokens of a tile, K key channels of a head, V value channels of its tile, D decays of a head.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.ops.shared.triton import load_tile, rounded, sigmoid, softplus, store_tile


@triton.jit
def to_unit(square_T):
    """Return the factors that normalize vectors with these squared lengths; zeros stay zeros."""
    return tl.rsqrt(square_T + 1e-6)


@triton.jit
def unit(x_TK):
    """Normalize rows to length 1, in float32."""
    x_TK = x_TK.to(tl.float32)
    return x_TK * to_unit(tl.sum(x_TK * x_TK, 1))[:, None]


@triton.jit
def log_decays(a_D, a_offset_T, A, bias_D, real_T, real_D):
    """Return the log decays (T, D) of each token; ``a_D`` and ``bias_D`` are pointers to D elements."""
    bias_D = tl.load(bias_D, mask=real_D, other=0).to(tl.float32)
    a_TD = load_tile(a_D, a_offset_T, real_T, real_D).to(tl.float32)
    return tl.where(real_T[:, None], A * softplus(a_TD + bias_D[None, :]), 0.0)


@triton.jit
def betas(b_T, real_T, beta_scale):
    """Return beta (T,) of each token, ``beta_scale * sigmoid(b)``; ``b_T`` are pointers to b."""
    return beta_scale * sigmoid(tl.load(b_T, mask=real_T, other=0).to(tl.float32))


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Return the product of two float32 matrices; PRECISION: input precision of ``tl.dot``."""
    return tl.dot(rounded(x, PRECISION), rounded(y, PRECISION), input_precision=PRECISION)


@triton.jit
def sums_of_tokens(x_TD, REVERSE: tl.constexpr):
    """Return inclusive running sums (T, D), from the end if REVERSE. Triton 3.6 scans one column only as a vector."""
    if x_TD.shape[1] == 1:
        return tl.cumsum(tl.sum(x_TD, 1), 0, reverse=REVERSE)[:, None]
    return tl.cumsum(x_TD, 0, reverse=REVERSE)


@triton.jit
def solve(below_TT, x_VT, t, count):
    """Solve y (I + L)^T = x for the first ``count`` columns of x; L is ``below_TT`` below its diagonal.

    Solved column by column. A product of powers of L would lose digits if keys repeat. No column depends on a later
    one, even if that is NaN.
    """
    for i in range(1, count):
        line_T = tl.sum(tl.where(t[:, None] == i, below_TT, 0.0), 0)
        known_V = tl.sum(tl.where(t[None, :] < i, line_T[None, :] * x_VT, 0.0), 1)
        x_VT = tl.where(t[None, :] == i, x_VT - known_V[:, None], x_VT)
    return x_VT


@triton.jit
def zero_tokens(o_V, first, num_tokens, token, t, real_V):
    """Zero the outputs of the tokens from ``first`` on, which belong to no request; token: stride of tokens."""
    for begin in range(first, num_tokens, t.shape[0]):
        token_T = (begin + t).to(tl.int64)
        zero_TV = tl.zeros([t.shape[0], real_V.shape[0]], tl.float32)
        store_tile(o_V, token_T * token, zero_TV, token_T < num_tokens, real_V)


@triton.jit
def ring_keys(ring_k_K, ring_g_D, start, count, j, real_K, real_D, k_entry, g_entry, CAPACITY: tl.constexpr):
    """Load the first ``count`` entries of a ring: (J, K) raw keys, (J, D) the decay after each entry, and (D,) the
    decay of the saved state. Missing entries are zeros.
    """
    place_J, after_J = ((start + j) % CAPACITY).to(tl.int64), ((start + j + 1) % CAPACITY).to(tl.int64)
    k_JK = load_tile(ring_k_K, place_J * k_entry, j < count, real_K).to(tl.float32)
    g_JD = load_tile(ring_g_D, place_J * g_entry, j < count, real_D).to(tl.float32)
    later_JD = load_tile(ring_g_D, after_J * g_entry, j + 1 < count, real_D).to(tl.float32)
    # Summed for each entry, not as differences of sums, which would lose digits after a strong decay.
    return k_JK, tl.exp(sums_of_tokens(later_JD, True)), tl.exp(tl.sum(g_JD, 0))


def shape_options(q: Tensor, v: Tensor, a: Tensor) -> dict[str, int]:
    """Return sizes for `tl.constexpr` arguments from q (..., G, Dk), v (..., H, Dv), a (..., H) or (..., H, Dk)."""
    heads, value_dim = v.shape[-2:]
    groups, key_dim = q.shape[-2:]
    decays = key_dim if a.dim() == v.dim() else 1
    return {"HEADS": heads, "GROUP": heads // groups, "VALUE_DIM": value_dim, "KEY_DIM": key_dim, "DECAYS": decays}


def block_options(key_dim: int, decays: int, *, least: int = 16, most: int = 1 << 20) -> dict[str, Any]:
    """Return tile sizes of key channels, in [least, most], and of their decays; matrix products need at least 16."""
    block_k = max(least, min(most, triton.next_power_of_2(key_dim)))
    return {"BLOCK_K": block_k, "BLOCK_D": 1 if decays == 1 else block_k}


def by_head(a: Tensor) -> tuple[int, int]:
    """Return the strides of tokens and heads of raw decays."""
    return a.stride(0), a.stride(1)
