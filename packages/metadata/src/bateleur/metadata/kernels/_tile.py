"""What decode and prefill share: one tile of queries against a range of its row's keys.

A tile has M rows: the ``GROUP`` query heads of one key head for each of ``M // GROUP`` tokens, so that a key is
read once for all heads that want it. Legend: M tile rows, N keys of a step, D head dimension.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


class Batch(NamedTuple):
    """The tensors of an attention call, as :data:`bateleur.metadata.ops.paged_attention` has them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    def strides(self) -> tuple[int, ...]:
        """Of a token's queries; of a block, a slot and a head of the caches; of a row of the block table."""
        return (self.q.stride(0), *self.k_cache.stride()[:3], self.block_table.stride(0))

    def constants(self, sliding_window: int) -> dict[str, int]:
        """What kernels that attend are specialised for."""
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        group = self.q.shape[1] // num_kv_heads
        return {"GROUP": group, "BLOCK_SIZE": block_size, "HEAD_DIM": head_dim, "WINDOW": sliding_window}


def tile_options(tile_rows: int, num_warps: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch options for tiles of at least ``tile_rows``; float32 has no tensor cores of its precision,
    so its steps are small.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    full = dtype == torch.float32
    return {
        "BLOCK_M": triton.next_power_of_2(tile_rows),
        "BLOCK_N": 16 if full else max(32, min(8192 // block_d, 128)),  # 16 KiB of keys a step
        "BLOCK_D": block_d,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": num_warps,
        "num_stages": 2 if full else 3,
        "enable_fp_fusion": True,
    }


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Output (M, D), peak (M,) and total (M,) before any key, in float32: unnormalised, on the scores' scale."""
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), peak_M, tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def attend_keys(
    q_MD, state, position_M, first, last, cache, strides, scale,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``state`` after the keys ``first`` to ``last - 1``; without ``MASKED`` all queries see all of these.

    ``cache`` points to keys and values of one key head and to the row's block table; ``strides`` are those of block and
    slot; ``scale`` has log2(e) in it. Keys of no row are not loaded: a weight of zero does not help against NaN.
    """
    k_ptr, v_ptr, table_ptr = cache
    acc_MD, peak_M, total_M = state
    d = tl.arange(0, q_MD.shape[1])[None, :]
    for start in range(first, last, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        stored_N = (key_N < last) | (not MASKED)
        block_N = tl.load(table_ptr + key_N // BLOCK_SIZE, mask=stored_N, other=0)
        offset_N = block_N.to(tl.int64) * strides[0] + (key_N % BLOCK_SIZE) * strides[1]
        stored_ND = stored_N[:, None] & (d < HEAD_DIM)
        k_ND = tl.load(k_ptr + offset_N[:, None] + d, mask=stored_ND, other=0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if MASKED:
            seen_MN = stored_N[None, :] & (key_N[None, :] <= position_M[:, None])
            if WINDOW > 0:
                seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        highest_M = tl.maximum(peak_M, tl.max(score_MN, 1))
        # A query without a key so far has weights of 0, not NaN.
        base_M = tl.where(highest_M == float("-inf"), 0.0, highest_M) * scale
        weight_MN = tl.exp2(score_MN * scale - base_M[:, None])
        fade_M = tl.exp2(peak_M * scale - base_M)
        v_ND = tl.load(v_ptr + offset_N[:, None] + d, mask=stored_ND, other=0)
        acc_MD = acc_MD * fade_M[:, None]
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        total_M = total_M * fade_M + tl.sum(weight_MN, 1)
        peak_M = highest_M
    return acc_MD, peak_M, total_M


@triton.jit
def finish(state, scale):
    """Output (M, D), 0 where there was no key, and logarithm of the sum of weights (M,) in base 2."""
    acc_MD, peak_M, total_M = state
    safe_M = tl.where(total_M > 0, total_M, 1.0)
    return acc_MD / safe_M[:, None], peak_M * scale + tl.log2(safe_M)


@triton.jit
def zero_tokens(
    out_ptr, first, last, step, head, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero this key head's share of the tokens ``first`` to ``last - 1``, ``step`` tokens from tile to tile."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    for begin in range(first, last, step):
        token_M = begin + m // GROUP
        target_MD = (token_M.to(tl.int64) * num_heads + head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d
        real_MD = ((token_M < last) & (m < BLOCK_M // GROUP * GROUP))[:, None] & (d < HEAD_DIM)
        tl.store(out_ptr + target_MD, tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty), mask=real_MD)
