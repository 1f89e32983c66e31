"""Acceptance counts for reports, and acceptance estimates for draft policies.

Everything is numpy on the host. Legend for shapes: R rows (requests) of one step, K draft tokens at most, N rows of the
engine's request table.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
FloatArray: TypeAlias = npt.NDArray[np.float64]


class AcceptStats:
    """Counts of verified and accepted drafts, over all steps.

    num_steps: number of requests with drafts, summed over steps. num_plain: the same for requests without drafts.
    num_drafts, num_accepted: verified and accepted drafts.
    tried, kept: (K,) int64, how often draft i was reached (all before it were accepted), and accepted.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """num_speculative_tokens: K, most drafts of a request."""
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.num_steps = self.num_plain = self.num_drafts = self.num_accepted = 0
        self.tried, self.kept = np.zeros((2, num_speculative_tokens), np.int64)

    def update(self, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add the requests of one step: numbers of verified and accepted drafts, both (R,).

        Raises `ValueError` unless 0 <= accepted <= drafts <= K.
        """
        tried, kept = _reached(len(self.tried), num_drafts, num_accepted)
        drafted = int(np.count_nonzero(num_drafts))
        self.num_steps += drafted
        self.num_plain += len(num_drafts) - drafted
        self.num_drafts += int(num_drafts.sum())
        self.num_accepted += int(num_accepted.sum())
        self.tried += tried.sum(0)
        self.kept += kept.sum(0)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens that a request with drafts emits in a step: its accepted drafts and one more. NaN if no request
        had drafts.
        """
        return 1 + self.num_accepted / self.num_steps if self.num_steps else float("nan")

    @property
    def acceptance_per_position(self) -> FloatArray:
        """Share of drafts i that are accepted if all before them are, (K,) float64; NaN if none was reached."""
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
        memory: after this many newer observations of the same request, an observation has 1/e of its weight; at least
            1. The default is small, because a text becomes easier or harder to predict.
        memory_of_all: about how many observations the estimate of all requests remembers; at least 1.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior={prior} must be in (0, 1)")
        if strength <= 0 or min(memory, memory_of_all) < 1:
            raise ValueError(
                f"strength={strength} must be above 0, memory={memory} and memory_of_all={memory_of_all} at least 1"
            )
        self._prior, self._strength, self.fade = prior, strength, float(np.exp(-1 / memory))
        self.memory_of_all = float(memory_of_all)
        self._k = num_speculative_tokens
        self.seen = np.zeros((max_num_reqs, 2 * num_speculative_tokens))
        """(N, 2 K) decayed counts of drafts that were reached, then of those that were accepted."""
        self.all_seen = np.zeros(2 * num_speculative_tokens)
        self._tried = np.tile(np.arange(num_speculative_tokens), 2)

    def admit(self, row: int) -> None:
        """Reset the estimates of row `row` of the request table, which a new request takes."""
        self.seen[row] = 0

    def update(self, rows: IntArray, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add one step of R different rows of the table; counts as for `AcceptStats.update`."""
        tried, kept = _reached(self._k, num_drafts, num_accepted)
        new = np.concatenate((tried, kept), 1)
        self.seen[rows] = self.seen[rows] * np.where(np.tile(tried, 2) > 0, self.fade, 1.0) + new
        sums = new.sum(0)
        left = self.memory_of_all / (self.memory_of_all + sums[self._tried])
        self.all_seen[:] = self.all_seen * left + sums

    def of(self, rows: IntArray) -> FloatArray:
        """Return the estimated probability that draft i is accepted if all before it are, (R, K) float64 in (0, 1)."""
        k, seen, strength = self._k, self.seen[rows], self._strength
        common = (self.all_seen[k:] + strength * self._prior) / (self.all_seen[:k] + strength)
        return np.asarray((seen[:, k:] + strength * common) / (seen[:, :k] + strength))


def _reached(k: int, num_drafts: IntArray, num_accepted: IntArray) -> tuple[IntArray, IntArray]:
    """Return which of `k` drafts of each row were reached, and which were accepted, (R, k) int64 each."""
    if num_drafts.ndim != 1 or num_drafts.shape != num_accepted.shape:
        raise ValueError(f"num_drafts {num_drafts.shape} and num_accepted {num_accepted.shape} must both be (R,)")
    wrong = (num_accepted < 0) | (num_accepted > num_drafts) | (num_drafts > k)
    if np.count_nonzero(wrong):
        row = int(wrong.argmax())
        raise ValueError(
            f"row {row}: num_accepted={num_accepted[row]} and num_drafts={num_drafts[row]} must satisfy "
            f"0 <= accepted <= drafts <= {k}"
        )
    draft, accepted = np.arange(k), num_accepted[:, None]
    tried = (draft < num_drafts[:, None]) & (draft <= accepted)
    return tried.astype(np.int64), (draft < accepted).astype(np.int64)
