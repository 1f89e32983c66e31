"""Verification under the acceptance rule `Rule.COUPLED`, which accepts a draft if it equals the target's own sample.

One pass over the logits computes noise, argmax and NaN flag of every logit row, then the output of every request.

A program computes the noise of a tile only if an upper bound of its perturbed logits exceeds the best one so far. The
bound needs no logarithm, so the two logarithms of the noise are computed for a few tiles of a row only. The result does
not depend on tiles or splits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bateleur.eagle.kernels.penalties import NATIVE, arguments, penalised, penalties_of
from bateleur.eagle.kernels.truncation import truncation_thresholds
from bateleur.eagle.noise import HashedVocab, Keys, Role, names
from bateleur.eagle.rules import Drafts, RejectionOutput, Rows
from bateleur.eagle.sample import SampledTokens
from bateleur.eagle.sampling_metadata import Penalties, SamplingMetadata

_BLOCK = 512  # for one warp, because reductions in a warp need no barrier
_PROGRAMS = 2560  # about 20 warps for each multiprocessor of an H200; longer splits would skip more tiles


@triton.jit
def fmix64(x):
    """Return the finaliser of MurmurHash3 of a uint64; see `bateleur.eagle.noise`."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def row_words(seed, position):
    """Return low and high word, uint32 each, of the hashed noise key (seed and `position`) of a row.

    position: int64 that packs position, draft index and role, as `noise.names` returns it. It is the position itself if
        draft index and role are 0.
    """
    row = fmix64(fmix64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64, bitcast=True))
    return row.to(tl.uint32), (row >> 32).to(tl.uint32)


@triton.jit
def uniform(word_L, low, high):
    """Return `noise.uniform`: numbers in (0, 1) of hashed token ids `word_L`. low, high: halves of the row's key."""
    x_L = ((word_L.to(tl.uint32, bitcast=True) ^ low) * 0x7FEB352D) ^ high
    x_L = (x_L ^ (x_L >> 15)) * 0x846CA68B
    x_L = (x_L ^ (x_L >> 16)) * 0x2C1B3C6D
    return (x_L & 0x7FFFFFFF).to(tl.float32) * 4.656612595521636e-10 + 2.3283064365386963e-10


@triton.jit
def gumbel(u_L):
    """Return Gumbel noise -log(-log1p(-u)), with torch's log1p."""
    if NATIVE:
        return -tl.log(-libdevice.log1p(-u_L))
    one_L = 1.0 - u_L
    rest_L = one_L - 1.0  # the rounding of 1 - u cancels
    small_L = rest_L == 0.0
    return -tl.log(tl.where(small_L, u_L, tl.log(one_L) * (u_L / tl.where(small_L, 1.0, rest_L))))


@triton.jit
def gumbel_bound(u_L):
    """Return an upper bound of `gumbel` without computing a logarithm: the bits of the float u bound log2(u)."""
    octaves_L = (0x3F800000 - u_L.to(tl.int32, bitcast=True)).to(tl.float32)
    return tl.fma(octaves_L, 8.262958e-08, 1e-3)  # log(2) / 2^23, and a margin for the rounding of logarithms


@triton.jit
def draw_kernel(
    logits_ptr, words_ptr, starts_ptr, seeds_ptr, positions_ptr, temperature_ptr, best_ptr, token_ptr,
    sampling_ptr, least_ptr, last_ptr, logits_row, size, share, temperature_step,
    values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before,
    BLOCK: tl.constexpr, DIVIDE: tl.constexpr, TRUNCATION: tl.constexpr, SINGLE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sample each logit row by Gumbel-max: the first maximum of each share of the row, NaN if the share holds one.

    Grid (requests, logit rows of a request, shares of a row). Occupancy on sm_90: at least 24 blocks per SM.
    DIVIDE: divide logits by their row's temperature. TRUNCATION: leave out logits below the row's threshold
    (`least_ptr`, `last_ptr`). SINGLE: every request has one row, and `starts_ptr` is not read. share: tokens of a
    share. temperature_step: stride of temperature_ptr. values_ptr to before_ptr: fields of `Penalties` (values, request
    rows, token counts, prompt masks, earlier drafts). KIND: 0 for none, see `penalties_of`.

    Writes the maximum to best_ptr and its token id to token_ptr, in the shape of the grid. Reads the other pointers:
    words_ptr has hashed token ids, sampling_ptr `SamplingMetadata.values`. positions_ptr: see `row_words`.
    """
    request, row_of_request, shard = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = request + row_of_request
    if not SINGLE:
        row = tl.load(starts_ptr + request) + row_of_request
        if row >= tl.load(starts_ptr + request + 1):
            return
    row = row.to(tl.int64)
    row_ptr = logits_ptr + row * logits_row
    penalties = penalties_of(row, size, values_ptr, owners_ptr, counts_ptr, prompts_ptr, before_ptr, num_before, KIND)
    noisy = tl.load(temperature_ptr + request * temperature_step) > 0
    low, high = row_words(tl.load(seeds_ptr + request), tl.load(positions_ptr + request) + row_of_request)
    best, token, broken = float("-inf"), 0, 0
    if DIVIDE:
        temperature = tl.where(noisy, tl.load(sampling_ptr + row * 4), 1.0)
    if TRUNCATION:
        least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
    stop = tl.minimum((shard + 1) * share, size)
    noisy_stop = tl.where(noisy, stop, 0)
    for start in range(shard * share, stop, BLOCK):
        lane_L = start + tl.arange(0, BLOCK)
        logits_L = tl.load(row_ptr + lane_L, mask=lane_L < stop, other=float("-inf")).to(tl.float32)
        logits_L = penalised(logits_L, lane_L, stop, penalties, KIND)
        if DIVIDE:
            logits_L = tl.div_rn(logits_L, tl.zeros_like(logits_L) + temperature)
        if TRUNCATION:
            dropped_L = (logits_L < least) | ((logits_L == least) & (lane_L > last))
            logits_L = tl.where(dropped_L, float("-inf"), logits_L)  # NaN compares as not below
        word_L = tl.load(words_ptr + lane_L, mask=lane_L < noisy_stop, other=0)
        bound_L = logits_L
        if noisy:
            bound_L = logits_L + gumbel_bound(uniform(word_L, low, high))
        if tl.max((bound_L <= best).to(tl.int32) ^ 1, 0) != 0:  # NaN compares as not below
            value_L = logits_L
            if noisy:
                value_L = logits_L + gumbel(uniform(word_L, low, high))
            broken |= tl.max((value_L != value_L).to(tl.int32), 0)
            top = tl.max(value_L, 0)
            if top > best:
                best = top
                token = start + tl.argmax(value_L, 0, tie_break_left=True)
    at = (request * tl.num_programs(1) + row_of_request) * tl.num_programs(2) + shard
    tl.store(best_ptr + at, tl.where(broken != 0, float("nan"), best))
    tl.store(token_ptr + at, token)


@triton.jit(do_not_specialize=["shares"])
def emit_kernel(
    best_ptr, token_ptr, starts_ptr, drafts_ptr, out_ptr, emitted_ptr, bad_ptr, drafts_row, num_drafts, shares,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Combine the maxima of the shares of each logit row, and emit each request's samples up to the first that differs
    from its draft.

    Grid (requests). Occupancy on sm_90: at least 4 blocks per SM.
    SINGLE: every request has one row and no draft, and a row with a NaN gets token 0.
    Reads best_ptr and token_ptr (results of `draw_kernel`), starts_ptr (`Rows.query_start_loc`) and drafts_ptr. Writes
    out_ptr, emitted_ptr and bad_ptr, the fields of `RejectionOutput`.
    """
    request = tl.program_id(0).to(tl.int64)
    place_C, share_S = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    num_rows = 1
    if not SINGLE:
        num_rows = tl.load(starts_ptr + request + 1) - tl.load(starts_ptr + request)
    real_C = (place_C <= num_drafts) & (place_C < num_rows)
    at_CS = (request * (num_drafts + 1) + place_C[:, None]) * shares + share_S[None, :]
    real_CS = real_C[:, None] & (share_S[None, :] < shares)
    best_CS = tl.load(best_ptr + at_CS, mask=real_CS, other=float("-inf"))
    token_CS = tl.load(token_ptr + at_CS, mask=real_CS, other=0)
    broken_C = tl.max((best_CS != best_CS).to(tl.int32), 1)
    best_CS = tl.where(best_CS != best_CS, float("-inf"), best_CS)
    winner_C = tl.argmax(best_CS, 1, tie_break_left=True)
    token_C = tl.sum(tl.where(share_S[None, :] == winner_C[:, None], token_CS, 0), 1).to(tl.int64)
    bad_C = (broken_C != 0) | (tl.max(best_CS, 1) == float("-inf"))
    tested_C = (place_C < num_drafts) & (place_C + 1 < num_rows)
    draft_C = tl.load(drafts_ptr + request * drafts_row + place_C, mask=tested_C, other=-1)
    same_C = tested_C & (draft_C == token_C) & (bad_C == 0)
    accepted = tl.min(tl.where(same_C, BLOCK_C, place_C), 0)
    emitted_C = real_C & (place_C <= accepted) & (bad_C == 0)
    out_ptr += request * (num_drafts + 1)
    tl.store(out_ptr + place_C, tl.where(emitted_C, token_C, 0 if SINGLE else -1), mask=place_C <= num_drafts)
    tl.store(emitted_ptr + request, tl.sum(emitted_C.to(tl.int64), 0))
    reached_C = real_C & bad_C & (place_C == accepted)
    tl.store(bad_ptr + request, tl.max(reached_C.to(tl.int32), 0) != 0)


def tile_options(size: int, num_rows: int, kind: int = 0) -> tuple[dict[str, Any], int]:
    """Return launch options of `draw_kernel` for at most ``num_rows`` rows of ``size`` tokens, and how many tokens of a
    row one program samples from (a share).

    kind: KIND of `penalties_of`.
    """
    block = block_of(size, _BLOCK)
    shares = min(triton.cdiv(size, block), triton.cdiv(_PROGRAMS, num_rows))
    share = triton.cdiv(triton.cdiv(size, shares), block) * block
    if kind:
        block = max(16, block // 2)  # else the inputs of penalties would take the registers of other programs
    # A fused multiply-add would round a uniform number differently from torch.
    return {"BLOCK": block, "KIND": kind, "num_warps": 1, "enable_fp_fusion": False}, share


def block_of(size: int, most: int) -> int:
    """Return how many tokens of a row of ``size`` tokens a program reads at a time, at most ``most``."""
    return min(most, max(16, int(triton.next_power_of_2(size))))


def emit_options(rows_per_request: int, size: int) -> dict[str, Any]:
    """Return launch options of `emit_kernel` for rows of `size` tokens, whatever their number.

    rows_per_request: most logit rows of a request.
    """
    shares = min(triton.cdiv(size, block_of(size, _BLOCK)), _PROGRAMS)
    block_c, block_s = triton.next_power_of_2(rows_per_request), triton.next_power_of_2(shares)
    num_warps = max(1, min(8, block_c * block_s // 512))
    return {"BLOCK_C": block_c, "BLOCK_S": block_s, "num_warps": num_warps, "enable_fp_fusion": False}


def coupled(
    logits: Tensor,
    drafts: Drafts,
    rows: Rows,
    vocab: HashedVocab | None,
    *,
    greedy: bool = False,
    metadata: SamplingMetadata | None = None,
) -> RejectionOutput:
    """Verify drafts under `Rule.COUPLED`. The arguments and the result are those of `bateleur.eagle.verify`.

    Logits are contiguous in their last dimension, float32 or narrower, with at least one row. Greedy rows are detected
    on the device. Two launches, and the four of `truncation_thresholds` before them if rows may drop tokens.
    """
    starts, tokens = rows.query_start_loc.contiguous(), drafts.tokens.contiguous()
    return _launch(logits, tokens, starts, rows.seeds, rows.first_position, rows.temperature, vocab, metadata)


def sample(logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role, vocab: HashedVocab) -> SampledTokens:
    """Sample one token per row, as `bateleur.eagle.sample` (same arguments), by a verification without drafts."""
    return draw(logits, metadata.temperature, keys, role, vocab, metadata)


def draw(
    logits: Tensor,
    temperature: Tensor,
    keys: Keys,
    role: Role,
    vocab: HashedVocab,
    metadata: SamplingMetadata | None = None,
) -> SampledTokens:
    """Sample one token per row in two launches, with the arguments and result of `bateleur.eagle.draw`.

    metadata: if given, the logits are not processed yet, as for `bateleur.eagle.sample`.
    """
    none = keys.seed.new_empty(len(logits), 0)
    output = _launch(logits, none, None, keys.seed, names(keys, role), temperature, vocab, metadata)
    return SampledTokens(output.tokens[:, 0], output.bad)


def _launch(
    logits: Tensor,
    drafts: Tensor,
    starts: Tensor | None,
    seeds: Tensor,
    first_position: Tensor,
    temperature: Tensor,
    vocab: HashedVocab | None,
    metadata: SamplingMetadata | None,
) -> RejectionOutput:
    """Sample each logit row, and verify drafts (R, K) with the samples. seeds, temperature: see `Rows`.

    starts: `Rows.query_start_loc`; None if every request has one logit row.
    first_position: see `Rows`. If `starts` is None, (R,) int64 that pack position, draft index and role, as
        `noise.names` returns them.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"logits: strides {logits.stride()} must be dense in the last dimension")
    (num_reqs, num_drafts), size, device = drafts.shape, logits.shape[1], logits.device
    hashes = (HashedVocab.of(size, device) if vocab is None else vocab).hashes
    values = thresholds = penalties = None
    if metadata is not None:
        values, penalties = metadata.values, metadata.penalties
        if metadata.truncates(size):
            thresholds = truncation_thresholds(logits, values, penalties)
    rows = starts, seeds, first_position, temperature
    best, token = draw_shares(logits, hashes, *rows, values, thresholds, penalties, num_drafts + 1)
    out = torch.empty(num_reqs, num_drafts + 1, dtype=torch.int64, device=device)
    emitted = torch.empty(num_reqs, dtype=torch.int64, device=device)
    bad = torch.empty(num_reqs, dtype=torch.bool, device=device)
    emit_kernel[(num_reqs,)](
        best, token, out if starts is None else starts, drafts, out, emitted, bad, num_drafts, num_drafts,
        best.shape[2], SINGLE=starts is None, **emit_options(num_drafts + 1, size),
    )  # fmt: skip
    return RejectionOutput(out, emitted, bad)


def draw_shares(
    logits: Tensor,
    hashes: Tensor,
    starts: Tensor | None,
    seeds: Tensor,
    first_position: Tensor,
    temperature: Tensor,
    values: Tensor | None,
    thresholds: tuple[Tensor, Tensor] | None,
    penalties: Penalties | None = None,
    rows_per_request: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the largest perturbed logit, and its token id, of each share of each logit row, in one launch.

    Both results are (requests, rows of a request, shares). A share is the part of a row that one program reads. starts,
    seeds, first_position, temperature: of each request, see `_launch`. hashes: (V,) hashed token ids. values: (N, 4)
    float32 temperature, log(min_p), top_k, top_p; None if logits are divided by the temperature already. thresholds:
    smallest kept logit of each row, and last kept id equal to it. rows_per_request: most logit rows of a request.
    """
    num_reqs, size = len(seeds), logits.shape[1]
    of_penalties, kind = arguments(penalties, logits)
    options, share = tile_options(size, num_reqs * rows_per_request, kind)
    shape = num_reqs, rows_per_request, triton.cdiv(size, share)
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)  # also in place of tensors that are not read
    token = torch.empty(shape, dtype=torch.int32, device=logits.device)
    least, last = (best, best) if thresholds is None else (each.contiguous() for each in thresholds)
    draw_kernel[shape](
        logits, hashes, best if starts is None else starts, seeds.contiguous(), first_position.contiguous(),
        temperature, best, token, best if values is None else values.contiguous(), least, last,
        logits.stride(0), size, share, temperature.stride(0), *of_penalties,
        DIVIDE=values is not None, TRUNCATION=thresholds is not None, SINGLE=starts is None, **options,
    )  # fmt: skip
    return best, token
