"""Triton kernels for one vocabulary shard, one launch each: histogram of a digit of the logits, last kept token equal
to the threshold (tie), and best token. The communication between ranks is in `shard_truncation` and `sample`.

Ranks do not use the kernels of `truncation`. Those search a row again if its bracket is wrong, which a program
decides on the device. Ranks would have to exchange sums again, and the collectives of a step are fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.eagle.kernels.rejection_sampler import block_of, draw_shares
from bateleur.eagle.kernels.sort_keys import order_of

_BLOCK = 1024
_PROGRAMS = 1056  # eight for each multiprocessor of an H200
_DIGITS = tl.constexpr(256)


@triton.jit
def histogram_kernel(
    scaled_ptr, mass_ptr, start_ptr, out_ptr, scaled_row, mass_row, size, share, shift,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make a histogram of each row over one 8-bit digit of the logits: sum the weights (1, or mass) of tokens by digit.

    Grid (rows, splits). Occupancy on sm_90: at least 9 blocks per SM.
    Reads the logits scaled_ptr, mass_ptr if MASS is True, and start_ptr (rows,). Adds to out_ptr (rows, 256) int64,
    which must be zeros. share: tokens of a split. The digit of a logit is (`order_of`(logit) - start) >> shift; tokens
    with another digit than 0 .. 255 are not counted.
    """
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(start_ptr + row), tl.minimum((shard + 1) * share, size)
    for first in range(shard * share, stop, BLOCK):
        lane_L = first + tl.arange(0, BLOCK)
        x_L = tl.load(scaled_ptr + row * scaled_row + lane_L, mask=lane_L < stop, other=float("-inf"))
        order_L = tl.where(x_L == x_L, order_of(x_L), 0x7FC00000).to(tl.int64)
        digit_L = (order_L - start) >> shift
        real_L = (lane_L < stop) & (digit_L >= 0) & (digit_L < _DIGITS)
        weight_L = tl.full([BLOCK], 1, tl.int64)
        if MASS:
            mass_L = tl.load(mass_ptr + row * mass_row + lane_L, mask=real_L, other=0)
            weight_L = (mass_L.to(tl.float64) * 1099511627776.0).to(tl.int64)
        tl.atomic_add(out_ptr + row * _DIGITS + digit_L, weight_L, mask=real_L, sem="relaxed")


@triton.jit
def last_tie_kernel(
    scaled_ptr, least_ptr, kept_ptr, own_ptr, last_ptr, scaled_row, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the index of the last kept token equal to the threshold (a tie) in each row.

    The index is -1 if no tie is kept, and `size` if all are. Such rows are not read.
    Grid (rows). Occupancy on sm_90: at least 5 blocks per SM.
    Reads the logits scaled_ptr, the threshold least_ptr, the number of ties own_ptr, and the number of them to keep,
    kept_ptr. Writes the index to last_ptr (rows,) int32.
    """
    row = tl.program_id(0).to(tl.int64)
    least, kept, own = tl.load(least_ptr + row), tl.load(kept_ptr + row), tl.load(own_ptr + row)
    last, seen = tl.where(kept >= own, size, -1).to(tl.int32), tl.full([], 0, tl.int64)
    tl.store(last_ptr + row, last)
    if (kept >= own) | (kept <= 0):
        return
    last = tl.full([], 0, tl.int32)
    for first in range(0, size, BLOCK):
        lane_L = first + tl.arange(0, BLOCK)
        x_L = tl.load(scaled_ptr + row * scaled_row + lane_L, mask=lane_L < size, other=float("nan"))
        tied_L = (x_L == least).to(tl.int64)
        rank_L = seen + tl.cumsum(tied_L, 0)
        last += tl.sum(tl.where((tied_L != 0) & (rank_L == kept), lane_L, 0), 0)
        seen += tl.sum(tied_L, 0)
    tl.store(last_ptr + row, last)


def histogram_rows(scaled: Tensor, mass: Tensor | None, start: Tensor, shift: int) -> Tensor:
    """Return a histogram (N, 256) int64 of each row over the digit (`order_of`(logit) - start) >> shift of its logits.

    scaled: (N, L) float32 logits over the temperature. mass: (N, L) float32 weights; None: 1 each. start: (N,) int64.
    """
    num_rows, size = scaled.shape
    block = block_of(size, _BLOCK)
    shares = min(triton.cdiv(size, block), triton.cdiv(_PROGRAMS, num_rows))
    share = triton.cdiv(triton.cdiv(size, shares), block) * block
    out = torch.zeros(num_rows, _DIGITS.value, dtype=torch.int64, device=scaled.device)
    weights = scaled if mass is None else mass
    histogram_kernel[(num_rows, triton.cdiv(size, share))](
        scaled, weights, start, out, scaled.stride(0), weights.stride(0), size, share, shift,
        MASS=mass is not None, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def last_tie_rows(scaled: Tensor, least: Tensor, kept: Tensor, own: Tensor) -> Tensor:
    """Return the index of the last kept logit equal to the threshold (a tie) of each row, (N,) int32, in one launch.

    -1 if no tie is kept, L if all. least: (N,) thresholds. kept, own: (N,) int64 ties to keep, and ties in the row.
    """
    num_rows, size = scaled.shape
    last = torch.empty(num_rows, dtype=torch.int32, device=scaled.device)
    last_tie_kernel[(num_rows,)](
        scaled, least, kept, own.contiguous(), last, scaled.stride(0), size,
        BLOCK=block_of(size, _BLOCK), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return last


def perturbed_max_rows(
    logits: Tensor,
    values: Tensor,
    hashes: Tensor,
    seeds: Tensor,
    name: Tensor,
    least: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest noisy logit of each row in the shard, (N,) float32, and its index in the shard, (N,) int64.

    values: (N, 4) float32 temperature, log(min_p), top_k, top_p. hashes: hashed token ids. seeds, name: (N,) seeds and
    packed noise keys (`noise.names`). least, last: (N,) thresholds and last kept indices; None keeps all.
    """
    thresholds = None if least is None or last is None else (least, last)
    best, token = draw_shares(logits, hashes, None, seeds, name, values[:, 0], values, thresholds)
    top = best.squeeze(1).max(-1)
    return top.values, token.squeeze(1).gather(1, top.indices.unsqueeze(1)).squeeze(1).long()
