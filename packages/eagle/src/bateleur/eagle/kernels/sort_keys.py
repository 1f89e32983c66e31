"""Parts of the kernels of min_p, top_k and top_p: a token's sort key, its probability mass, and a row's parameters.

The key of a token is an int64. Its upper bits are the logit over the temperature, mapped to an integer so that integers
compare as the floats do. Its lower 24 bits are the id, counted from the end. So all keys of a row differ, and of equal
logits the lowest id has the largest key.

Legend: L token ids (`lane_L`) of a tile. penalties, KIND: result and kind of `penalties_of`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from bateleur.eagle.kernels.penalties import NATIVE, penalised

ID_BITS = tl.constexpr(24)
LAST_ID = tl.constexpr((1 << 24) - 1)
NO_KEY = tl.constexpr(-0x7F800001 << 24)
"""The lowest key of -inf, which is never kept."""


@triton.jit
def logits_of(row_ptr, lane_L, size, penalties, KIND: tl.constexpr):
    """Load logits (L,) float32 after `penalties` (of `penalties_of`); -inf beyond the end of the row, never kept."""
    logits_L = tl.load(row_ptr + lane_L, mask=lane_L < size, other=float("-inf")).to(tl.float32)
    return penalised(logits_L, lane_L, size, penalties, KIND)


@triton.jit
def apply_temperature(row_ptr, lane_L, size, temperature, penalties, KIND: tl.constexpr):
    """Load logits (L,) after `penalties` (of `penalties_of`), divided by the temperature, rounded as torch does."""
    logits_L = logits_of(row_ptr, lane_L, size, penalties, KIND)
    return tl.div_rn(logits_L, tl.zeros_like(logits_L) + temperature)


@triton.jit
def order_of(x):
    """Map floats to int32 numbers that compare as the floats do; both zeros get the same number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, token_id):
    """Return the sort key of a token, int64 in the order of logits. x: its logit over the temperature."""
    return (order_of(x).to(tl.int64) << ID_BITS) | (LAST_ID - token_id)


@triton.jit
def float_of(key):
    """Return the logit over the temperature, float32, of a sort key."""
    order = (key >> ID_BITS).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """Return the token id of a sort key, int64."""
    return LAST_ID - (key & LAST_ID)


@triton.jit
def mass_of(x, best):
    """Return a token's probability mass exp(x - best) in units of 2^-40, int64. best: largest x of the row.

    exp gives the same bits as torch's, so the result equals that of the PyTorch implementation.
    """
    # A difference of large numbers may be infinite, and best - 100 may round to best. Halves are exact.
    below = tl.maximum(x * 0.5 - best * 0.5, -50.0) * 2.0
    if NATIVE:
        shard = libdevice.exp(below)
    else:
        shard = tl.exp(below)
    return (shard * 1099511627776.0).to(tl.int64)  # 2^40: the product is exact


@triton.jit
def metadata_of(sampling_ptr, row, size):
    """Load a row's temperature, log(min_p), top_k (`size` for all), top_p, and whether these may drop a token.

    sampling_ptr: `SamplingMetadata.values` (rows, 4). size: number of tokens in a row.
    """
    temperature, log_min_p = tl.load(sampling_ptr + row * 4), tl.load(sampling_ptr + row * 4 + 1)
    top_k, top_p = tl.load(sampling_ptr + row * 4 + 2).to(tl.int64), tl.load(sampling_ptr + row * 4 + 3)
    top_k = tl.where((top_k <= 0) | (top_k > size), size, top_k).to(tl.int64)
    truncates = (temperature > 0) & ((log_min_p != float("-inf")) | (top_k < size) | (top_p < 1))
    return temperature, log_min_p, top_k, top_p, truncates


@triton.jit
def limits_of(best, log_min_p):
    """Return the lowest and highest sort key that min_p keeps; `best` is the largest logit over the temperature.

    A token of -inf is never kept: its key is below the lowest.
    """
    least = tl.maximum(best + log_min_p, -3.4028234663852886e38)
    return key_of(least, LAST_ID), key_of(best, 0)


@triton.jit
def is_finite(x):
    """Return whether x is neither NaN nor infinite."""
    return (x == x) & (tl.abs(x) != float("inf"))
