"""Draws on a CPU that look at a whole vocabulary once, for its largest logits by blocks, and then at few tokens.

A token is drawn where logit / temperature + noise is largest, so what matters is who can win:

* min_p and top_k are thresholds. That of top_k is at least the k-th of the blocks' largest logits, and the few tokens
  above that are ranked among themselves.
* top_p needs no threshold. The winner of a larger set that belongs to the nucleus is the winner of the nucleus; one
  that does not is struck out, with all that are not above it, and the rest draws again. Whether a token belongs is
  decided by sums in float32 and what they may be wrong by, first of the blocks that matter, then of all.
* Without any of them the likely tokens say what there is to beat. If that takes much noise, the lanes that have so much
  are found from their bits backwards, for the hash of `noise` is a bijection. Else the noise of all is hashed, a chunk
  at a time, and lanes are looked at whose noise could lift their block's largest logit.

Noise costs two logarithms where it is known to a rounding, and none for a bound. What can't be decided so (an infinite
logit, a nucleus whose edge is nearer than sums can tell) is left to `Law.apply`, by rows; so the tokens are those that
it gives, bit for bit.

Legend for shapes: N rows, V vocabulary in B blocks of 128, n candidates of a row, in the order of their ids.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle.law import LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P
from bateleur.eagle.noise import FLOOR, FMIX32, LANE_MIX, LANE_OFFSET, SCALE, gumbel_

BLOCK = 128
_CHUNK = 256  # blocks that are hashed at a time: what they need stays in the cache
_ERROR = 1e-5  # of sums of masses in float32, relative, and more than what is cut off below 2^-40 of each
_STEEP = 1e-4  # a nucleus that leaves less mass than that is decided exactly
_LEAST = np.finfo(np.float32).min
_LOUD = 1 << 11  # lanes with bits below that have 13.9 of noise at least
_FEW = 64  # candidates of which all get their noise at once
_MIX = tuple(np.uint32(factor % (1 << 32)) for factor in LANE_MIX)
_UNMIX, _UNFMIX = (
    tuple(np.uint32(pow(factor % (1 << 32), -1, 1 << 32)) for factor in factors)
    for factors in (LANE_MIX, FMIX32)
)

Floats: TypeAlias = NDArray[np.float32]
Words: TypeAlias = NDArray[np.uint32]


class _Candidates(NamedTuple):
    """lanes: (n,) ascending. logits: (n,) over the temperature."""

    lanes: NDArray[np.int64]
    logits: Floats

    def take(self, chosen: NDArray[np.int64]) -> _Candidates:
        return _Candidates(self.lanes[chosen], self.logits[chosen])


class _Noise(NamedTuple):
    """Of one row. words: (V,) hashed lanes."""

    words: Words
    low: np.uint32
    high: np.uint32

    def bits(self, words: Words) -> NDArray[np.int32]:
        """The lowest 31 random bits of hashed lanes."""
        x = words ^ self.low
        shifted = np.empty_like(x)
        x *= _MIX[0]
        x ^= self.high
        for shift, factor in zip((15, 16), _MIX[1:], strict=True):
            np.right_shift(x, np.uint32(shift), out=shifted)
            x ^= shifted
            x *= factor
        x &= np.uint32(0x7FFFFFFF)
        return x.view(np.int32)

    def loudest(self, depth: int) -> NDArray[np.int64]:
        """The lanes whose bits are below `depth`: those with the most noise."""
        x = _before_last_rounds(depth) ^ self.high
        x *= _UNMIX[0]
        x ^= self.low
        _unshift(x, 16)
        for shift, factor in ((13, _UNFMIX[1]), (16, _UNFMIX[0])):
            x *= factor
            _unshift(x, shift)
        x -= np.uint32(LANE_OFFSET % (1 << 32))
        return np.sort(x[x < len(self.words)]).astype(np.int64)

    def winner(self, some: _Candidates) -> tuple[int, float]:
        """Which candidate has the first largest logit with its noise, and that sum."""
        u = _uniform(self.bits(self.words[some.lanes]))
        if len(u) <= _FEW:
            scores = _scores(some.logits, u)
            at = int(scores.argmax())
            return at, float(scores[at])
        bound = some.logits + _gumbel_bound(u)
        at = int(bound.argmax())
        chosen = np.flatnonzero(bound >= _scores(some.logits[at : at + 1], u[at : at + 1].copy()))
        scores = _scores(some.logits[chosen], u[chosen])
        at = int(scores.argmax())
        return int(chosen[at]), float(scores[at])


@cache
def _before_last_rounds(depth: int) -> Words:
    """What becomes bits whose lowest 31 are 0, 0, 1, 1, 2, ... by the last two rounds of the hash, (2 * depth,)."""
    x = np.arange(depth, dtype=np.uint32).repeat(2)
    x[1::2] |= np.uint32(1 << 31)
    for shift, factor in ((16, _UNMIX[2]), (15, _UNMIX[1])):
        x *= factor
        _unshift(x, shift)
    return x


def _unshift(x: Words, shift: int) -> None:
    """Undo x ^= x >>> shift, in place."""
    shifted = x >> np.uint32(shift)
    if 2 * shift < 32:
        shifted ^= x >> np.uint32(2 * shift)
    x ^= shifted


class _Row(NamedTuple):
    """blocks: (B, 128) logits. peaks: (B,) their maxima over the temperature."""

    blocks: Floats
    peaks: Floats
    temperature: np.float32
    noise: _Noise

    def of(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64] | None, Floats]:
        """Some blocks, ascending, or None for all if it is most of them; and the logits in them."""
        some = index if 2 * len(index) < len(self.peaks) else None
        return some, (self.blocks if some is None else self.blocks[some]).reshape(-1)

    def at_least(self, least: np.float32, most: int | None = None) -> _Candidates | None:
        """Tokens whose logit over the temperature is at least `least`; only blocks are read whose peak is. None if
        these are more than `most`.
        """
        index, logits = self.of(np.flatnonzero(self.peaks >= least))
        if self.temperature != 1:
            logits = logits / self.temperature
        tall = logits >= least
        if most is not None and np.count_nonzero(tall) > most:
            return None
        chosen = np.flatnonzero(tall)
        return _Candidates(_lanes_of(index, chosen), logits[chosen])

    def candidates(self, lanes: NDArray[np.int64]) -> _Candidates:
        return _Candidates(lanes, self.blocks.reshape(-1)[lanes] / self.temperature)


def argmax_of(blocks: Floats, peaks: Floats) -> int:
    """The first maximum of a row, by its blocks (B, 128) and their maxima (B,)."""
    block = int(peaks.argmax())
    return block * BLOCK + int(blocks[block].argmax())


def draw_of(blocks: Floats, peaks: Floats, law: Floats, noise: _Noise) -> int | None:
    """The token of a row without NaN whose largest logit is above -inf; None where it takes the whole row to tell.

    law: a row of `Law.host` that draws; its top_k is 0 or below V.
    """
    row = _Row(blocks, peaks / law[TEMPERATURE], law[TEMPERATURE], noise)
    best, top_k, top_p = row.peaks.max(), int(law[TOP_K]), float(law[TOP_P])
    if best == np.inf or top_k > len(peaks) or 0 < 1 - top_p < _STEEP:
        return None
    least = max(best + law[LOG_MIN_P], _LEAST)
    if top_k:
        least = max(least, _kth(row.peaks, top_k))
    elif law[LOG_MIN_P] == -np.inf:
        return _plain(row) if top_p >= 1 else _nucleus(row, best, top_p)
    some = row.at_least(least)
    assert some is not None
    if top_k and len(some.lanes) > top_k:
        some = _top(some, top_k)
    if top_p < 1:
        mass = np.exp(some.logits - best)
        total = float(mass.sum())
        return _of_nucleus(some, mass, top_p, (total, total), noise)
    return int(some.lanes[noise.winner(some)[0]])


def _kth(values: Floats, k: int) -> np.float32:
    """The k-th largest of at least k values."""
    return np.float32(np.partition(values, len(values) - k)[len(values) - k])


def _lanes_of(index: NDArray[np.int64] | None, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lanes of places in blocks that lie one behind the other."""
    return chosen if index is None else index[chosen // BLOCK] * BLOCK + chosen % BLOCK


def _top(some: _Candidates, k: int) -> _Candidates:
    """The k largest; of equal logits the lowest ids."""
    least = _kth(some.logits, k)
    kept = some.logits > least
    tied = np.flatnonzero(some.logits == least)
    kept[tied[: k - int(np.count_nonzero(kept))]] = True
    return some.take(np.flatnonzero(kept))


def _of_nucleus(
    some: _Candidates, mass: Floats, top_p: float, total: tuple[float, float], noise: _Noise
) -> int | None:
    """Draw, and strike out what is outside. total: the mass of all tokens is between these."""
    least, most = top_p * total[0] * (1 - _ERROR), top_p * total[1] * (1 + _ERROR)
    while True:
        at, _ = noise.winner(some)
        above = some.logits > some.logits[at]
        above[:at] |= some.logits[:at] == some.logits[at]
        inside = np.flatnonzero(above)
        mass = mass[inside]
        before = float(mass.sum())
        if before * (1 + _ERROR) < least:
            return int(some.lanes[at])
        if before * (1 - _ERROR) < most:
            return None
        some = some.take(inside)


def _nucleus(row: _Row, best: np.float32, top_p: float) -> int | None:
    """The winner of a row that only top_p truncates."""
    # What a block has at most. The lowest blocks that have little together are left out; none of the nucleus is there.
    mass_B = np.exp(row.peaks - best) * np.float32(BLOCK)
    below_B = np.sort(mass_B)
    few = int(np.searchsorted(below_B.cumsum(), min(0.2 * (1 - top_p), 0.01)))
    excluded = float(below_B[:few].sum()) * (1 + _ERROR)
    token = _nucleus_among(row, np.flatnonzero(mass_B >= below_B[few]), best, top_p, excluded)
    return _nucleus_among(row, np.arange(len(mass_B)), best, top_p, 0.0) if token is None and few else token


def _nucleus_among(
    row: _Row, index: NDArray[np.int64], best: np.float32, top_p: float, excluded: float
) -> int | None:
    """`excluded` is at least the mass that is not in these blocks."""
    some, logits = row.of(index)
    mass = logits / row.temperature
    mass -= best
    np.exp(mass, out=mass)
    total = float(torch.from_numpy(mass).sum())
    # Tokens of so little mass that all of them together have less than what the nucleus leaves.
    heavy = np.flatnonzero(mass >= 0.97 * ((1 - top_p) * total - excluded) / len(mass))
    found = _Candidates(_lanes_of(some, heavy), logits[heavy] / row.temperature)
    return _of_nucleus(found, mass[heavy], top_p, (total, total + excluded), row.noise)


def _plain(row: _Row) -> int:
    """The winner among all tokens of a row."""
    noise, size = row.noise, len(row.noise.words)
    edge = max(_kth(row.peaks, 1 + len(row.peaks) // 32), _LEAST)
    likely = row.at_least(edge)
    assert likely is not None
    some = row.candidates(np.append(likely.lanes, noise.loudest(_LOUD)))
    at, lead = noise.winner(some)
    first = int(some.lanes[at])
    # Noise is at most -log(u). A sum may have been rounded up, and logarithms are.
    slack = 1e-3 + abs(lead) * 2.0**-22
    least = np.float32(lead - slack - math.log(2.0**31 / _LOUD))
    rest = row.at_least(max(np.nextafter(least, np.float32(-np.inf)), _LEAST), most=size // 8)
    if rest is None:
        rest = row.candidates(_lifted(row.peaks - (lead - slack), noise))
    if not len(rest.lanes):
        return first
    at, score = noise.winner(rest)
    return min((-lead, first), (-score, int(rest.lanes[at])))[1]


def _lifted(short: NDArray[np.floating], noise: _Noise) -> NDArray[np.int64]:
    """Lanes with noise enough for what their block lacks; `short` (B,) is at most 0 where it lacks something."""
    # Such are the uniform numbers that are small enough.
    reach = np.minimum(
        np.exp(np.minimum(short, 0), dtype=np.float64) * (2.0**31 * (1 + 1e-6)) + 0.5, 2.0**31 - 1
    )
    reach = reach.astype(np.int32)
    lanes = []
    for start in range(0, len(reach), _CHUNK):
        limit = reach[start : start + _CHUNK]
        bits = noise.bits(noise.words[start * BLOCK : (start + len(limit)) * BLOCK]).reshape(-1, BLOCK)
        blocks = np.flatnonzero(torch.from_numpy(bits).amin(1).numpy() < limit)
        hits = np.flatnonzero(bits[blocks] < limit[blocks, None])
        lanes.append(_lanes_of(blocks + start, hits))
    return np.concatenate(lanes)


def _uniform(bits: NDArray[np.int32]) -> Floats:
    """As `noise.unit`."""
    u = bits.astype(np.float32)
    u *= np.float32(SCALE)
    u += np.float32(FLOOR)
    return u


def _gumbel_bound(u: Floats) -> Floats:
    """An upper bound of Gumbel noise, which is at most -log(u): the bits of a float are its logarithm, from below."""
    bound = (0x3F800000 - u.view(np.int32)).astype(np.float32)
    bound *= np.float32(8.262958e-08)  # log(2) / 2^23, and more than the logarithms round
    bound += np.float32(1e-3)
    return bound


def _scores(logits: Floats, u: Floats) -> Floats:
    """Logits with their noise, by the operators of `draw`, so that their bits are its; overwrites `u`."""
    noise: Floats = gumbel_(torch.from_numpy(u)).numpy()
    return noise + logits


def blocks_of(rows: Tensor, fill: float) -> Tensor:
    """(N, V) or (V,) as (.., B, 128): a view where blocks divide it, else a copy that ends in `fill`."""
    short = -rows.shape[-1] % BLOCK
    rows = pad(rows, (0, short), value=fill) if short else rows
    return rows.reshape(*rows.shape[:-1], -1, BLOCK)


def draw_rows(logits: Tensor, values: Tensor, words: Tensor, low: Tensor, high: Tensor) -> NDArray[np.int64]:
    """The tokens of N rows, -1 in a bad one, -2 in one that `Law.apply` has to tell.

    logits: (N, V) float32 on the CPU. values: (N, 4) as of `Law`. words: (V,), see `Lanes`. low, high: (N, 1), see
        `noise.row_words`.
    """
    blocks_T = blocks_of(logits, -torch.inf)
    peaks_T = blocks_T.amax(-1)
    blocks, peaks = blocks_T.numpy(), peaks_T.numpy()
    hashed = blocks_of(words, 0).reshape(-1).numpy().view(np.uint32)
    lows, highs, laws = (each.numpy() for each in (low, high, values))
    lows, highs = lows.view(np.uint32), highs.view(np.uint32)
    top_k = laws[:, TOP_K]
    laws = laws.copy()
    laws[:, TOP_K] = np.where(top_k < logits.shape[1], top_k, 0)
    tokens = np.empty(len(blocks), np.int64)
    for row, law in enumerate(laws):
        if not peaks[row].max() > -np.inf:
            tokens[row] = -1
        elif not law[TEMPERATURE] > 0:
            tokens[row] = argmax_of(blocks[row], peaks[row])
        else:
            token = draw_of(blocks[row], peaks[row], law, _Noise(hashed, lows[row, 0], highs[row, 0]))
            tokens[row] = -2 if token is None else token
    return tokens
