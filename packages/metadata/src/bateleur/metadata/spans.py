"""Spans of integers, in numpy."""

import numpy as np
import numpy.typing as npt

from bateleur.metadata.bounds import IntArray


def spread(
    which: npt.NDArray[np.int64], first: IntArray, counts: IntArray
) -> tuple[npt.NDArray[np.int64], IntArray]:
    """The numbers of n spans, one span after the other: whose each is, and the number, (N,) each.

    which: (n,) who has a span. first: (n,) its first number. counts: (n,) how many it has, at least 1.
    """
    ends = counts.cumsum()
    if not len(ends) or ends[-1] == len(counts):
        return which, first
    return which.repeat(counts), np.arange(ends[-1]) + (first + counts - ends).repeat(counts)
