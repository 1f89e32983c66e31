"""What became of drafts, for the counts and the estimates of an engine at once."""

from __future__ import annotations

import ctypes

import numpy as np

from bateleur.eagle.native import kernel
from bateleur.eagle.stats import AcceptanceEstimates, AcceptStats, IntArray
from bateleur.metadata.native import address


class _Book(ctypes.Structure):
    """`Book` of `learn.c`."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("fade", "memory")),
        ("k", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("totals", "counted", "seen", "all")),
    ]


class Learning:
    """`AcceptStats` and `AcceptanceEstimates` of one engine, which are told the same."""

    def __init__(self, stats: AcceptStats, estimates: AcceptanceEstimates) -> None:
        """Both of as many drafts."""
        self.stats, self.estimates = stats, estimates
        self._kernel = kernel("learn_rows")
        self._totals = np.zeros(4, np.int64)
        self._book = _Book(
            fade=estimates.fade,
            memory=estimates.memory_of_all,
            k=len(stats.tried),
            totals=address(self._totals),
            counted=address(stats.counted),
            seen=address(estimates.seen),
            all=address(estimates.all_seen),
        )
        self._book_address = ctypes.addressof(self._book)

    def update(
        self,
        rows: IntArray,
        num_drafts: IntArray,
        num_accepted: IntArray,
        allowed: IntArray | None = None,
    ) -> None:
        """Add one step of R different rows of the table, see `AcceptStats.update` and `AcceptanceEstimates.update`; in
        C, where there is a compiler.

        allowed: (R,) drafts that might have been; where these are more, and there are some, a drafter stopped. One that
            it did not make counts for the estimates as one that was not accepted, or they would say of many drafts that
            these emit more than they do.
        """
        stats, dense = self.stats, _are_columns(rows, num_drafts, num_accepted)
        if allowed is not None:
            dense &= allowed.dtype == np.int32 and allowed.flags.c_contiguous and len(allowed) == len(rows)
        if self._kernel is None or not dense:
            stats.update(num_drafts, num_accepted)
            if num_drafts.any():
                stopped = 0 if allowed is None else (allowed > num_drafts) & (num_drafts > 0)
                self.estimates.update(rows, num_drafts + stopped, num_accepted)
            return
        done = self._kernel(
            self._book_address,
            address(rows),
            address(num_drafts),
            address(num_accepted),
            None if allowed is None else address(allowed),
            len(rows),
        )
        if done < len(rows):
            stats.update(num_drafts, num_accepted)  # says what is wrong
        steps, plain, drafts, accepted = self._totals.tolist()
        # No call from here on: these are counted together.
        stats.num_steps += steps
        stats.num_plain += plain
        stats.num_drafts += drafts
        stats.num_accepted += accepted


def _are_columns(*arrays: IntArray) -> bool:
    """Whether all are as long as the first, which is not empty, dense, and int64."""
    for array in arrays:
        if array.dtype != np.int64 or array.shape != (len(arrays[0]),) or not array.flags.c_contiguous:
            return False
    return len(arrays[0]) > 0
