"""The threshold that min_p, top_k and top_p set in each row, without a sort.

The specification is `bateleur.eagle.sampling_metadata.thresholds_by_sort`. A row keeps the tokens whose sort key
(see `sort_keys`) is at least a threshold. Four launches find it; the first and the third read the whole row, split over
programs:

1. `stats_kernel` (rows, tiles): the largest logit of each tile, and the sum of exp, for estimates.
2. `bracket_kernel` (rows): estimate from 8,192 sampled tokens where the thresholds are (see `bracket`).
3. `collect_kernel` (rows, tiles): list the candidates, which are the tokens inside of the brackets, and sum number and
   mass of the tokens above the brackets.
4. `threshold_kernel` (rows): search the candidates for the threshold. If there are more than the list holds, search
   the row instead. If the sums show that a threshold is outside of its bracket, search the row without brackets.
   A search ends after at most 29 passes over the list or the row.

The sums are integers (mass in units of 2^-40), so the result is exact, and independent of tiles, brackets and the
order of the list. A program of a row that is greedy or keeps every token returns at once.

A search of the row itself takes about 0.3 ms a pass for 248,320 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.eagle.kernels.bracket import (
    COLUMNS,
    HIGH_K,
    HIGH_P,
    LOW_K,
    LOW_P,
    MASS_ABOVE_K,
    MASS_ABOVE_P,
    NUM_ABOVE_K,
    NUM_CANDIDATES,
    bracket_kernel,
)
from bateleur.eagle.kernels.penalties import arguments, penalties_of
from bateleur.eagle.kernels.sort_keys import (
    NO_KEY,
    apply_temperature,
    float_of,
    id_of,
    is_finite,
    key_of,
    limits_of,
    logits_of,
    mass_of,
    metadata_of,
)
from bateleur.eagle.sampling_metadata import Penalties

_TILE = 2048  # tokens of a program of `stats_kernel`; half of them for `collect_kernel`
_SAMPLES = 8192
_BLOCK = 512  # keys that a pass of `threshold_kernel` reads at a time
_MOST = 1 << 23  # tokens; the ids of a tile beyond them still fit into a key
_PIVOTS = tl.constexpr(4)  # parts into which a pass of `select` divides its range


@triton.jit
def stats_kernel(
    logits_ptr, sampling_ptr, stats_ptr, logits_row, size,
    values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute for each tile the largest logit (NaN if any is NaN), and the sum of exp((logit - largest) / temperature).

    Grid (rows, tiles). Occupancy on sm_90: at least 5 blocks per SM. Writes stats_ptr (rows, tiles, 2). Reads
    sampling_ptr (rows, 4): temperature, log(min_p), top_k, top_p. values_ptr to before_ptr: fields of `Penalties`
    (values, request rows, token counts, prompt masks, drafts). KIND: 0 without penalties, 1 without drafts.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _, _, _, truncates = metadata_of(sampling_ptr, row, size)
    if not truncates:
        return
    penalties = penalties_of(row, size, values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before, KIND)
    lane_L = tile * TILE + tl.arange(0, TILE)
    logits_L = logits_of(logits_ptr + row * logits_row, lane_L, size, penalties, KIND)
    largest, broken = tl.max(logits_L, 0), tl.max((logits_L != logits_L).to(tl.int32), 0)
    origin = tl.where(is_finite(largest), largest, 0.0)  # infinity minus itself is NaN
    total = tl.sum(tl.exp((logits_L - origin) * (1.0 / temperature)), 0)
    stats_ptr += (row * tl.num_programs(1) + tile) * 2
    tl.store(stats_ptr, tl.where(broken != 0, float("nan"), largest))
    tl.store(stats_ptr + 1, total)


@triton.jit(do_not_specialize=["logits_row"])  # one token per thread, as for the atomics
def collect_kernel(
    logits_ptr, sampling_ptr, best_ptr, brackets_ptr, candidates_ptr, logits_row, size, capacity,
    values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List candidates: the sort keys inside of a row's brackets (probable intervals of the top_k and top_p thresholds).

    Grid (rows, tiles). Occupancy on sm_90: at least 7 blocks per SM. Reads best_ptr and brackets_ptr as
    `bracket_kernel` left them. Writes candidates_ptr (rows, capacity); keys beyond the capacity are counted, not
    stored. Adds the number of candidates, and number and mass of the tokens above the brackets, to columns of
    brackets_ptr. sampling_ptr, and penalties (values_ptr to KIND): as for `stats_kernel`.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, log_min_p, top_k, top_p, _ = metadata_of(sampling_ptr, row, size)
    if (temperature <= 0) | ((top_k == size) & (top_p >= 1)):
        return
    best = tl.load(best_ptr + row)
    if not is_finite(best):
        return
    brackets_ptr += row * COLUMNS
    low_k, high_k = tl.load(brackets_ptr + LOW_K), tl.load(brackets_ptr + HIGH_K)
    low_p, high_p = tl.load(brackets_ptr + LOW_P), tl.load(brackets_ptr + HIGH_P)
    _, ceiling = limits_of(best, log_min_p)
    penalties = penalties_of(row, size, values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before, KIND)
    lane_L = tile * TILE + tl.arange(0, TILE)
    x_L = apply_temperature(logits_ptr + row * logits_row, lane_L, size, temperature, penalties, KIND)
    key_L = key_of(x_L, lane_L)
    if (high_k < ceiling) | (high_p < ceiling):
        mass_L = mass_of(x_L, best)
        num_k = tl.sum((key_L > high_k).to(tl.int32), 0)
        mass_k = tl.sum(tl.where(key_L > high_k, mass_L, 0), 0)
        mass_p = tl.sum(tl.where(key_L > high_p, mass_L, 0), 0)
        tl.atomic_add(brackets_ptr + NUM_ABOVE_K, num_k.to(tl.int64), sem="relaxed")
        tl.atomic_add(brackets_ptr + MASS_ABOVE_K, mass_k, sem="relaxed")
        tl.atomic_add(brackets_ptr + MASS_ABOVE_P, mass_p, sem="relaxed")
    inside_L = ((key_L >= low_k) & (key_L <= high_k)) | ((key_L >= low_p) & (key_L <= high_p))
    counter_ptr_L = brackets_ptr + NUM_CANDIDATES + tl.zeros([TILE], tl.int32)
    at_L = tl.atomic_add(counter_ptr_L, 1, mask=inside_L, sem="relaxed")
    tl.store(candidates_ptr + row * capacity + at_L, key_L, mask=inside_L & (at_L < capacity))


@triton.jit
def read_keys(source, start, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Load BLOCK sort keys from index `start` of a source (candidates or logit row); the key of -inf beyond its end.

    source: (whether to read the list of candidates, number of keys, pointer to this list, arguments to read the row).
    """
    listed, num, candidates_ptr, row_of = source
    at_L = start + tl.arange(0, BLOCK)
    if listed:
        key_L = tl.load(candidates_ptr + at_L, mask=at_L < num, other=NO_KEY)
    else:
        # Loads the row's parameters again, so that no search keeps them in registers.
        row, logits_ptr, logits_row, sampling_ptr, size, tables = row_of
        penalties = penalties_of(row, size, *tables, KIND)
        x_L = apply_temperature(
            logits_ptr + row * logits_row, at_L, size, tl.load(sampling_ptr + row * 4), penalties, KIND
        )
        key_L = key_of(x_L, at_L)
    return key_L


@triton.jit
def weigh(source, best, low, high, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Return mass and largest of the sort keys in [low, high], int64. source: see `read_keys`. best: largest logit."""
    mass_L, largest_L = tl.zeros([BLOCK], tl.int64), tl.full([BLOCK], NO_KEY, tl.int64)
    for start in range(0, source[1], BLOCK):
        key_L = read_keys(source, start, BLOCK, KIND)
        inside_L = (key_L >= low) & (key_L <= high)
        mass_L += tl.where(inside_L, mass_of(float_of(key_L), best), 0)
        largest_L = tl.maximum(largest_L, tl.where(inside_L, key_L, NO_KEY))
    return tl.sum(mass_L, 0), tl.max(largest_L, 0)


@triton.jit
def select(
    source, best, above, goal, low, high, MASS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Find the largest sort key in [low, high] such that number, or mass if MASS, of keys not below it reaches `goal`.

    source: see `read_keys`. best: largest logit over the temperature. above: number or mass of the keys above `high`,
    which the source need not contain. Returns the key, and whether it exists. It does not exist if the keys above
    `high` reach the goal, or if all keys not below `low` miss it.
    """
    top, pivot_P = high, tl.arange(0, _PIVOTS).to(tl.int64)
    num_above, reached, num_left = tl.zeros([], tl.int64), above.to(tl.float64) < goal, 2
    while num_left > 1:
        step = (high - low + _PIVOTS) // _PIVOTS
        from_P = low + pivot_P * step
        num_PL, mass_PL = tl.zeros([_PIVOTS, BLOCK], tl.int32), tl.zeros([_PIVOTS, BLOCK], tl.int64)
        for start in range(0, source[1], BLOCK):
            key_L = read_keys(source, start, BLOCK, KIND)
            inside_PL = (key_L[None, :] >= from_P[:, None]) & (key_L[None, :] <= top)
            num_PL += inside_PL.to(tl.int32)
            if MASS:
                mass_PL += tl.where(inside_PL, mass_of(float_of(key_L), best)[None, :], 0)
        num_P = tl.sum(num_PL, 1).to(tl.int64)
        weight_P = above + (tl.sum(mass_PL, 1) if MASS else num_P)
        enough_P = (weight_P.to(tl.float64) >= goal) & (from_P <= high)
        num_enough = tl.sum(enough_P.to(tl.int64), 0)
        reached &= num_enough > 0
        low += (num_enough - 1) * step
        high = tl.minimum(high, low + step - 1)
        num_above = tl.maximum(num_above, tl.max(tl.where(enough_P, 0, num_P), 0))
        num_left = tl.min(tl.where(enough_P, num_P, 1 << 62), 0) - num_above  # keys in [low, high]
        num_left = tl.where(reached, num_left, 0).to(tl.int32)
    _, key = weigh(source, best, low, high, BLOCK, KIND)
    return key, reached


@triton.jit
def ends_of(brackets_ptr, LOW: tl.constexpr, given, floor, ceiling):
    """Return low and high end of a row's bracket (interval of sort keys), from column LOW on, or floor and ceiling."""
    low, high = tl.load(brackets_ptr + LOW), tl.load(brackets_ptr + LOW + 1)
    return tl.where(given, low, floor), tl.where(given, high, ceiling)


@triton.jit
def find_threshold(
    source, brackets_ptr, given, best, top_k, top_p, size, floor, ceiling, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Return the lowest sort key (int64, in the order of logits) that a row keeps, and whether it is valid.

    given: search only in the row's brackets, which are intervals of keys that `bracket_kernel` estimated. The result is
    invalid if the threshold is outside of them. If not given, search from floor to ceiling, the lowest and highest key
    that min_p keeps. source: candidates or logit row, see `read_keys`. best: largest logit over the temperature.
    """
    low, high = ends_of(brackets_ptr, LOW_K, given, floor, ceiling)
    threshold, valid = floor, low == floor
    if top_k < size:
        above, goal = tl.where(given, tl.load(brackets_ptr + NUM_ABOVE_K), 0), top_k.to(tl.float64)
        key, reached = select(source, best, above, goal, low, high, False, BLOCK, KIND)
        # If min_p leaves fewer than top_k tokens, all of them stay.
        threshold, valid = tl.where(reached, key, floor), reached | (valid & (above < top_k))
    if valid & (top_p < 1):
        mass, _ = weigh(source, best, tl.maximum(low, threshold), high, BLOCK, KIND)
        mass += tl.where(given, tl.load(brackets_ptr + MASS_ABOVE_K), 0)
        # The best token reaches one unit: it stays under any top_p.
        goal = tl.maximum(mass.to(tl.float64) * top_p.to(tl.float64), 1.0)
        low, high = ends_of(brackets_ptr, LOW_P, given, floor, ceiling)
        above = tl.where(given, tl.load(brackets_ptr + MASS_ABOVE_P), 0)
        threshold, valid = select(source, best, above, goal, low, high, True, BLOCK, KIND)
    return threshold, valid


@triton.jit
def threshold_kernel(
    logits_ptr, sampling_ptr, best_ptr, brackets_ptr, candidates_ptr, least_ptr, last_ptr, logits_row, size, capacity,
    values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find each row's threshold: the smallest kept logit over the temperature, and the last kept id equal to it.

    Grid (rows). Occupancy on sm_90: at least 2 blocks per SM. Writes the logit, -inf in a row that keeps all tokens, to
    least_ptr and the id to last_ptr, (rows,) each. Reads best_ptr, brackets_ptr and candidates_ptr as `bracket_kernel`
    and `collect_kernel` left them. sampling_ptr, and penalties (values_ptr to KIND): as for `stats_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    _, log_min_p, top_k, top_p, truncates = metadata_of(sampling_ptr, row, size)
    tl.store(least_ptr + row, float("-inf"))
    tl.store(last_ptr + row, size)
    if not truncates:
        return
    best = tl.load(best_ptr + row)
    if not is_finite(best):
        return
    floor, ceiling = limits_of(best, log_min_p)
    threshold = floor
    if (top_k < size) | (top_p < 1):
        brackets_ptr += row * COLUMNS
        num_candidates = tl.load(brackets_ptr + NUM_CANDIDATES).to(tl.int32)
        listed, attempt = num_candidates <= capacity, 0
        tables = (values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before)
        row_of = (row, logits_ptr, logits_row, sampling_ptr, size, tables)
        while attempt < 2:
            num, given = tl.where(listed, num_candidates, size), attempt == 0
            source = (listed, num, candidates_ptr + row * capacity, row_of)
            threshold, valid = find_threshold(
                source, brackets_ptr, given, best, top_k, top_p, size, floor, ceiling, BLOCK, KIND
            )
            attempt = tl.where(valid, 2, attempt + 1)
            listed = listed & (attempt == 0)
    tl.store(least_ptr + row, float_of(threshold))
    tl.store(last_ptr + row, tl.minimum(id_of(threshold), size).to(tl.int32))


def capacity_of(size: int) -> int:
    """Return how many candidates (sort keys near a threshold) are stored for a row of ``size`` tokens."""
    share: int = triton.next_power_of_2(size // 16)
    return max(_SAMPLES, share)


def truncation_thresholds(logits: Tensor, values: Tensor, penalties: Penalties | None = None) -> tuple[Tensor, Tensor]:
    """Find the thresholds of min_p, top_k and top_p in each row, in four launches; returns (N,) float32 and (N,) int32.

    The first result is the smallest kept logit over the temperature, the second the last kept id equal to it. The
    workspace is 8 * `capacity_of(V)` bytes a row: 64 KiB for at most 2^17 tokens, 128 KiB for at most 2^18.

    logits: (N, V), dense in the last dimension.
    values: (N, 4) float32: temperature, log(min_p), top_k, top_p.
    penalties: penalties that are applied to the logits first.

    Raises `ValueError` if V is more than 2^23.
    """
    num_rows, size = logits.shape
    if size > _MOST:
        raise ValueError(f"logits: {size} tokens in a row; at most {_MOST} are supported")
    capacity, device, row = capacity_of(size), logits.device, logits.stride(0)
    padded = max(16, triton.next_power_of_2(size))
    tile, values = min(_TILE, padded), values.contiguous()
    tiles, room = triton.cdiv(size, tile), capacity * _SAMPLES // (2 * size)
    stats = torch.empty(num_rows, tiles, 2, device=device)
    best, least = torch.empty(num_rows, device=device), torch.empty(num_rows, device=device)
    brackets = torch.empty(num_rows, COLUMNS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(num_rows, capacity, dtype=torch.int64, device=device)
    last = torch.empty(num_rows, dtype=torch.int32, device=device)
    of_penalties, kind = arguments(penalties, least)
    # A fused multiply-add would round masses differently from torch.
    common = {"KIND": kind, "enable_fp_fusion": False}
    stats_kernel[num_rows, tiles](logits, values, stats, row, size, *of_penalties, TILE=tile, num_warps=4, **common)
    bracket_kernel[(num_rows,)](
        logits, values, stats, best, brackets, row, size, tiles, room, *of_penalties,
        SAMPLES=_SAMPLES, TILES=triton.next_power_of_2(tiles), num_warps=16, **common,
    )  # fmt: skip
    collect_kernel[num_rows, triton.cdiv(size, tile // 2)](
        logits, values, best, brackets, candidates, row, size, capacity, *of_penalties,
        TILE=tile // 2, num_warps=4, **common,
    )  # fmt: skip
    # Without a bound of registers ptxas spills for a third block that no row would use.
    threshold_kernel[(num_rows,)](
        logits, values, best, brackets, candidates, least, last, row, size, capacity, *of_penalties,
        BLOCK=min(_BLOCK, padded), num_warps=8, maxnreg=128, **common,
    )  # fmt: skip
    return least, last
