"""Acceptance counts for reports, and acceptance estimates for draft policies.

Everything is numpy on the host. Legend for shapes: R rows (requests) of one step, K draft tokens at most, N rows of the
engine's request table.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
FloatArray: TypeAlias = npt.NDArray[np.float64]


class AcceptStats:
    """Counts of verified and accepted drafts, over all steps.

    num_steps, num_plain: verified requests with and without drafts, summed over steps.
    num_drafts, num_accepted: verified and accepted drafts.
    tried, kept: (K,) int64, how often draft i was reached (all before it were accepted), and accepted.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """num_speculative_tokens: K, most drafts of a request."""
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.num_steps = self.num_plain = self.num_drafts = self.num_accepted = 0
        self.counted = np.zeros((2, num_speculative_tokens), np.int64)
        """Both as one array."""
        self.tried, self.kept = self.counted
        self._pairs = _Pairs(num_speculative_tokens)

    def update(self, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add the requests of one step: numbers of verified drafts (-1: no request) and of accepted ones, both (R,).

        Raises `ValueError` unless 0 <= accepted <= drafts <= K.
        """
        often = self._pairs.count(self._pairs.number(num_drafts, num_accepted))
        drafted = len(num_drafts) - int(often[0])
        self.num_plain += len(num_drafts) - drafted
        if not drafted:
            return
        self.num_steps += drafted
        self.num_drafts += int(often @ self._pairs.num_drafts)
        self.num_accepted += int(often @ self._pairs.num_accepted)
        k, sums = len(self.tried), often @ self._pairs.tried_kept
        self.tried += sums[:k]
        self.kept += sums[k:]

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens that a request with drafts emits in a step: the accepted drafts and one more. NaN without any."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else float("nan")

    @property
    def acceptance_per_position(self) -> FloatArray:
        """Share of drafts at index i, (K,) float64, accepted if all before it were. NaN if none was reached."""
        rates = np.full(len(self.tried), np.nan)
        np.divide(self.kept, self.tried, out=rates, where=self.tried > 0)
        return rates


class AcceptanceEstimates:
    """Running estimates of `acceptance_per_position`, one for each row of the request table.

    A new request starts from the mean of all requests. Its own observations weigh more with every draft, and older
    ones decay, so that estimates follow the text.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_tokens: int,
        *,
        prior: float = 0.7,
        strength: float = 8.0,
        memory: float = 16.0,
        memory_of_all: float = 256.0,
    ) -> None:
        """prior: estimate before any observation, in (0, 1).
        strength: weight of the estimate of all requests, in observations of one request; above 0.
        memory: observations of a request after which one has decayed to 1/e; at least 1. It is short, because a text
            becomes easier or harder to predict.
        memory_of_all: the same for all requests; at least 1. A step decays it by as much as it adds.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior={prior} must be in (0, 1)")
        if strength <= 0 or min(memory, memory_of_all) < 1:
            raise ValueError(
                f"strength={strength} must be above 0, memory={memory} and memory_of_all={memory_of_all} at least 1"
            )
        self._prior, self._strength, self.fade = prior, strength, float(np.exp(-1 / memory))
        self.memory_of_all = float(memory_of_all)
        self._k, self._pairs = num_speculative_tokens, _Pairs(num_speculative_tokens)
        self.seen = np.zeros((max_num_reqs, 2 * num_speculative_tokens))
        """(N, 2 K) decayed counts of drafts that were reached, then of those that were accepted."""
        self.all_seen = np.zeros(2 * num_speculative_tokens)
        self._tried = np.tile(np.arange(num_speculative_tokens), 2)
        tried = np.tile(self._pairs.tried_kept[:, :num_speculative_tokens], 2)
        self._fades = np.where(tried > 0, self.fade, 1.0)
        self._adds = self._pairs.tried_kept.astype(np.float64)

    def admit(self, row: int) -> None:
        """Reset the estimates of row `row` of the request table, which a new request takes."""
        self.seen[row] = 0

    def update(self, rows: IntArray, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add one step of R different rows of the table; the counts are those of `AcceptStats.update`."""
        pair = self._pairs.number(num_drafts, num_accepted)
        self.seen[rows] = self.seen[rows] * self._fades[pair] + self._adds[pair]
        sums = self._pairs.count(pair) @ self._adds
        left = self.memory_of_all / (self.memory_of_all + sums[self._tried])
        self.all_seen[:] = self.all_seen * left + sums

    def of(self, rows: IntArray) -> FloatArray:
        """Return the estimated probability that draft i is accepted if all before it are, (R, K) float64 in (0, 1)."""
        k, seen, strength = self._k, self.seen[rows], self._strength
        common = (self.all_seen[k:] + strength * self._prior) / (self.all_seen[:k] + strength)
        own: FloatArray = (seen[:, k:] + strength * common) / (seen[:, :k] + strength)
        return own


class _Pairs:
    """Numbers all pairs (drafts, accepted drafts) of a request; `C = (1 + K) ** 2`, some of which cannot occur.

    num_drafts, num_accepted: (C,) int64.
    tried_kept: (C, 2 K) int64, 1 for drafts that were reached, then for those that were accepted.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self.num_drafts, self.num_accepted = np.divmod(np.arange((1 + k) ** 2), 1 + k)
        drafts, accepted, position = self.num_drafts[:, None], self.num_accepted[:, None], np.arange(k)
        tried = (position < drafts) & (position <= accepted)
        self.tried_kept = np.concatenate((tried, position < accepted), 1).astype(np.int64)

    def number(self, num_drafts: IntArray, num_accepted: IntArray) -> IntArray:
        """Return the number of each request's pair, (R,). Raises `ValueError` for impossible counts."""
        if num_drafts.ndim != 1 or num_drafts.shape != num_accepted.shape:
            raise ValueError(f"num_drafts {num_drafts.shape} and num_accepted {num_accepted.shape} must both be (R,)")
        wrong = (num_accepted < 0) | (num_accepted > num_drafts) | (num_drafts > self._k)
        if np.count_nonzero(wrong):
            row = int(wrong.argmax())
            raise ValueError(
                f"row {row}: num_accepted={num_accepted[row]} and num_drafts={num_drafts[row]} must satisfy "
                f"0 <= accepted <= drafts <= {self._k}"
            )
        return num_drafts * (1 + self._k) + num_accepted

    def count(self, pair: IntArray) -> npt.NDArray[np.int64]:
        """Return how often each pair occurs, (C,)."""
        return np.bincount(pair, minlength=len(self.num_drafts))
