"""What became of drafts: counts for a report, and estimates for whoever decides how many to make.

Host numpy. Legend for shapes: R rows of one step, K draft tokens at most, N rows of the engine's request table.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
FloatArray: TypeAlias = npt.NDArray[np.float64]


class AcceptStats:
    """Counts verified rows; a row without drafts is plain decoding and counted apart.

    num_steps, num_plain: rows with and without drafts. num_drafts, num_accepted: drafts that were verified, and those
        of them that were accepted.
    tried, kept: (K,) int64, how often draft i was reached (all before it were accepted), and accepted.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """Count nothing yet; `num_speculative_tokens` is K."""
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.num_steps = self.num_plain = self.num_drafts = self.num_accepted = 0
        self.tried = np.zeros(num_speculative_tokens, np.int64)
        self.kept = np.zeros(num_speculative_tokens, np.int64)

    def update(self, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add the rows of one step: drafts that were verified (-1 is none) and accepted ones, both (R,).

        `ValueError` unless 0 <= accepted <= drafts <= K.
        """
        if not (num_drafts.any() or num_accepted.any()):
            self.num_plain += len(num_drafts)
            return
        tried, kept = _outcomes(num_drafts, num_accepted, len(self.tried))
        drafted = int(np.count_nonzero(num_drafts))
        self.num_steps += drafted
        self.num_plain += len(num_drafts) - drafted
        self.num_drafts += int(num_drafts.sum())
        self.num_accepted += int(num_accepted.sum())
        self.tried += tried.sum(0)
        self.kept += kept.sum(0)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a row with drafts gets in a step: those accepted, and the one that always comes. NaN for none."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else float("nan")

    @property
    def acceptance_per_position(self) -> FloatArray:
        """(K,) float64, how often draft i was accepted when all before it were. NaN where it was never reached."""
        rates = np.full(len(self.tried), np.nan)
        np.divide(self.kept, self.tried, out=rates, where=self.tried > 0)
        return rates


class AcceptanceEstimates:
    """Running estimates of `acceptance_per_position`, one for each row of the request table.

    A request that is new is taken to be like the others; what it shows itself counts more with every draft, and
    fades with time, so that estimates follow a text that changes.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_tokens: int,
        *,
        prior: float = 0.7,
        strength: float = 4.0,
        memory: float = 32.0,
    ) -> None:
        """Know nothing yet.

        prior: estimate before anything was seen, in (0, 1).
        strength: observations that the estimate of all requests weighs against those of one; above 0.
        memory: observations after which one has faded to 1/e; at least 1.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior={prior} must be in (0, 1)")
        if strength <= 0 or memory < 1:
            raise ValueError(f"strength={strength} must be above 0 and memory={memory} at least 1")
        self._prior, self._strength, self._fade = prior, strength, float(np.exp(-1 / memory))
        self._tried = np.zeros((max_num_reqs, num_speculative_tokens))
        self._kept = np.zeros_like(self._tried)
        self._all_tried, self._all_kept = np.zeros((2, num_speculative_tokens))

    def admit(self, row: int) -> None:
        """A new request begins in row `row`."""
        self._tried[row] = self._kept[row] = 0

    def update(self, rows: IntArray, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add one step of R different rows of the table; the counts are those of `AcceptStats.update`."""
        tried, kept = _outcomes(num_drafts, num_accepted, self._tried.shape[1])
        fade = np.where(tried, self._fade, 1.0)
        self._tried[rows] = self._tried[rows] * fade + tried
        self._kept[rows] = self._kept[rows] * fade + kept
        fade = np.where(tried.any(0), self._fade, 1.0)
        self._all_tried = self._all_tried * fade + tried.sum(0)
        self._all_kept = self._all_kept * fade + kept.sum(0)

    def of(self, rows: IntArray) -> FloatArray:
        """(R, K) float64 in (0, 1): chance that draft i is accepted if all before it are."""
        common = (self._all_kept + self._strength * self._prior) / (self._all_tried + self._strength)
        own: FloatArray = (self._kept[rows] + self._strength * common) / (self._tried[rows] + self._strength)
        return own


def _outcomes(
    num_drafts: IntArray, num_accepted: IntArray, k: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(R, K) flags: which drafts were reached, and which were accepted."""
    if num_drafts.ndim != 1 or num_drafts.shape != num_accepted.shape:
        raise ValueError(
            f"num_drafts {num_drafts.shape} and num_accepted {num_accepted.shape} must both be (R,)"
        )
    if np.any((num_accepted < 0) | (num_accepted > num_drafts) | (num_drafts > k)):
        row = int(np.argmax((num_accepted < 0) | (num_accepted > num_drafts) | (num_drafts > k)))
        raise ValueError(
            f"row {row}: num_accepted={num_accepted[row]} and num_drafts={num_drafts[row]} must satisfy "
            f"0 <= accepted <= drafts <= {k}"
        )
    position = np.arange(k)
    tried = (position < num_drafts[:, None]) & (position <= num_accepted[:, None])
    return tried, position < num_accepted[:, None]
