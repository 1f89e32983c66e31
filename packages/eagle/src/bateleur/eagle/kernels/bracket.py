"""Brackets (intervals) that probably contain the top_k and top_p thresholds of a logit row, estimated from a sample of
its tokens.

Tokens are sampled evenly over the ids. The number or probability mass of all tokens below a sort key (see `sort_keys`)
is estimated from the samples below it. A bracket extends 4 standard errors of that estimate to both sides, so it misses
the threshold in 6 of 100,000 rows. It holds at most 4.5 % of the tokens, whatever their values are. With a small top_k,
it reaches down to about the 16th largest sample. A bracket is only a hint: `truncation_thresholds` is always exact.

Parameters: floor and ceiling are the lowest and highest sort key that min_p keeps. room is the largest number of
samples in a bracket. MASS weighs a token with its probability mass, else with 1. KIND: which penalties
apply, see `penalties_of`.

Legend for shapes: S samples of a row, T tiles of a row.
"""

import triton
import triton.language as tl

from bateleur.eagle.kernels.penalties import penalties_of
from bateleur.eagle.kernels.sort_keys import apply_temperature, is_finite, key_of, limits_of, metadata_of

LOW_K, HIGH_K, LOW_P, HIGH_P, NUM_ABOVE_K, MASS_ABOVE_K, MASS_ABOVE_P, NUM_CANDIDATES, COLUMNS = map(
    tl.constexpr, range(9)
)
"""Columns of a row's brackets, int64: the brackets of top_k and top_p, both ends included; number and mass of the
tokens above them; number of candidates, which are the tokens inside of them.
"""
_ERRORS = tl.constexpr(4.0)  # standard errors from an estimate to an end of its bracket
_FEW = tl.constexpr(16)  # with fewer samples beyond an end, its standard error is not reliable
_CLOSE = tl.constexpr(4)  # samples between two keys that are close enough


@triton.jit
def bisect(
    key_S, mass_S, tail, errors, num_above, low, high, MASS: tl.constexpr, SAMPLES: tl.constexpr
):  # fmt: skip
    """Bisect between the sort keys (int64, in logit order) `low` and `high`, until few samples are between them.
    Returns low, number of samples at or above it, high, and the same number for high.

    A key replaces `low` if at least `num_above` samples are at or above it, and the weight of the samples below it,
    plus `errors` standard errors, is at most `tail`; else it replaces `high`.

    key_S, mass_S: sort key and mass of each sample. The weight of a sample is its mass if MASS is True, else 1.
    """
    num_low, num_high = tl.sum((key_S >= low).to(tl.int32), 0), tl.zeros([], tl.int32)
    while (num_low - num_high > _CLOSE) & (high - low > 1):
        middle = low + (high - low) // 2
        num = tl.sum((key_S >= middle).to(tl.int32), 0)
        weight = (SAMPLES - num).to(tl.float32)
        square = weight
        if MASS:
            below_S = tl.where(key_S < middle, mass_S, 0.0)
            weight, square = tl.sum(below_S, 0), tl.sum(below_S * below_S, 0)
        error = tl.sqrt(tl.maximum(square - weight * weight / SAMPLES, 0.0))
        if (weight + errors * error <= tail) & (num >= num_above):
            low, num_low = middle, num
        else:
            high, num_high = middle, num
    return low, num_low, high, num_high


@triton.jit
def bracket_of(key_S, mass_S, tail, floor, ceiling, room, MASS: tl.constexpr, SAMPLES: tl.constexpr):
    """Return low and high end of a bracket: an interval of sort keys that probably contains a threshold.

    The threshold is the sort key for which the samples below it have the total weight `tail`. A sample (`key_S`) weighs
    its probability mass (`mass_S`) if MASS is True, else 1. The high end is the ceiling if at most `room` samples are
    at or above the low end. floor, ceiling: lowest and highest sort key that min_p keeps.
    """
    low, num_low, _, _ = bisect(key_S, mass_S, tail, _ERRORS, _FEW, floor, ceiling, MASS, SAMPLES)
    high = ceiling
    if SAMPLES - num_low < _FEW:
        low = floor
    if num_low > room:
        _, _, high, num_high = bisect(key_S, mass_S, tail, -_ERRORS, 0, low, ceiling, MASS, SAMPLES)
        if num_high < _FEW:
            high = ceiling
    return low, high


@triton.jit
def sample_brackets(
    row_ptr, size, temperature, penalties, best, total, top_k, top_p, floor, ceiling, room,
    KIND: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Estimate a row's brackets: intervals of sort keys that probably contain its thresholds of top_k and top_p.
    Returns low_k, high_k, low_p, high_p.

    best: largest logit over the temperature. total: mass of the row, in units of the mass of its best token. In a row
    without top_k, the bracket of top_k is empty and below the floor, so that all kept tokens count as above it. floor,
    ceiling: lowest and highest key that min_p keeps. room: most samples in a bracket. penalties: of `penalties_of`.
    """
    sample_S = tl.arange(0, SAMPLES)
    lane_S = sample_S * (size // SAMPLES) + sample_S * (size % SAMPLES) // SAMPLES
    x_S = apply_temperature(row_ptr, lane_S, size, temperature, penalties, KIND)
    key_S, mass_S = key_of(x_S, lane_S), tl.exp(x_S - best)
    tokens_per_sample = size.to(tl.float32) / SAMPLES
    low_k, high_k, low_p, high_p, least = floor, floor - 1, floor, ceiling, floor
    if top_k < size:
        tail = (size - top_k).to(tl.float32) / tokens_per_sample
        low_k, high_k = bracket_of(key_S, mass_S, tail, floor, ceiling, room, False, SAMPLES)
        low_p, high_p = low_k, high_k
        if (top_p < 1) & (high_k < ceiling):
            least, _, _, _ = bisect(key_S, mass_S, tail, 0.0, 0, low_k, high_k, False, SAMPLES)
    if (top_p < 1) & (high_k < ceiling):
        dropped = tl.sum(tl.where(key_S < least, mass_S, 0.0), 0)
        tail = dropped + (1 - top_p) * (total / tokens_per_sample - dropped)
        low_p, high_p = bracket_of(key_S, mass_S, tail, low_k, ceiling, room, True, SAMPLES)
    return low_k, high_k, low_p, high_p


@triton.jit(do_not_specialize=["size", "num_tiles", "room"])
def bracket_kernel(
    logits_ptr, sampling_ptr, stats_ptr, best_ptr, brackets_ptr, logits_row, size, num_tiles, room,
    values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before,
    KIND: tl.constexpr, SAMPLES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Estimate each row's brackets (probable intervals of the top_k and top_p thresholds), and its largest logit.

    Grid (rows). Occupancy on sm_90: at least 1 block per SM. Reads stats_ptr (of `stats_kernel`) and sampling_ptr
    (rows, 4): temperature, log(min_p), top_k, top_p. Writes the largest logits over the temperature to best_ptr
    (rows,), NaN for a row with a NaN; the brackets to the first columns of brackets_ptr (rows, COLUMNS), and 0 to the
    others, to which `collect_kernel` adds. room: largest number of samples in a bracket. TILES: num_tiles, rounded up
    to a power of two. values_ptr to before_ptr: fields of `Penalties` (values, request rows, token counts, prompt
    masks, earlier drafts). KIND: 0 without penalties, 1 without drafts, 2 with all.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p, truncates = metadata_of(sampling_ptr, row, size)
    if not truncates:
        return
    tile_T = tl.arange(0, TILES)
    stats_ptr += (row * num_tiles + tile_T) * 2
    best_T = tl.load(stats_ptr, mask=tile_T < num_tiles, other=float("-inf"))
    total_T = tl.load(stats_ptr + 1, mask=tile_T < num_tiles, other=0.0)
    largest, broken = tl.max(best_T, 0), tl.max((best_T != best_T).to(tl.int32), 0)
    best = tl.where(broken != 0, float("nan"), tl.div_rn(largest, temperature))
    tl.store(best_ptr + row, best)
    if not is_finite(best):
        return
    floor, ceiling = limits_of(best, log_min_p)
    low_k, high_k, low_p, high_p = floor, ceiling, floor, ceiling
    if (size > SAMPLES) & ((top_k < size) | (top_p < 1)):
        total = tl.sum(total_T * tl.exp((best_T - largest) * (1.0 / temperature)), 0)
        penalties = penalties_of(
            row, size, values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before, KIND
        )
        low_k, high_k, low_p, high_p = sample_brackets(
            logits_ptr + row * logits_row, size, temperature, penalties, best, total, top_k, top_p, floor, ceiling,
            room, KIND, SAMPLES,
        )  # fmt: skip
    brackets_ptr += row * COLUMNS
    tl.store(brackets_ptr + LOW_K, low_k)
    tl.store(brackets_ptr + HIGH_K, high_k)
    tl.store(brackets_ptr + LOW_P, low_p)
    tl.store(brackets_ptr + HIGH_P, high_p)
    for column in tl.static_range(NUM_ABOVE_K, COLUMNS):
        tl.store(brackets_ptr + column, tl.zeros([], tl.int64))
