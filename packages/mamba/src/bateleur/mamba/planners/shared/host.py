"""The planners of SLOTS in numpy, for steps that are planned eagerly on a CPU: plans are the host's own memory there.

A plan is some thirty operators on a number for each row, where what counts is the cost of a call: numpy's planners take
0.4 to 0.6 of the time of torch's, which would be 40 us for 64 rows (`benchmarks/mamba.py`). Inputs are cast first,
factors of 0 and 1 are int64, and constants are arrays, so that operands have one type. The torch forms are the
specification, and say why.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba.planners.plans import CopyPlan, SlotPlan
from bateleur.mamba.spec import CacheLayout

INT = np.int64
ZERO, ONE = np.array(0), np.array(1)


def require_room(layout: CacheLayout, after: NDArray[np.int64]) -> None:
    """Raise ValueError for a row whose states would lie in the columns of the next one, which `take` does not see."""
    if np.count_nonzero(after > np.array(layout.max_model_len)):
        raise ValueError(
            f"computed + query_lens is {after.max()} in some row; it must be at most max_model_len = "
            f"{layout.max_model_len}"
        )


@lru_cache(64)
def row_starts(rows: int, columns: int) -> NDArray[np.int64]:
    """(rows,) entry of a flat table where each row begins."""
    return np.arange(0, rows * columns, columns)


def arrays(plan: SlotPlan | CopyPlan) -> tuple[NDArray[np.int64], ...]:
    """The fields of a plan as numpy sees them, in their order: the same memory."""
    try:
        return plan._arrays
    except AttributeError:
        found = tuple(getattr(plan, field.name).numpy() for field in fields(plan))
        object.__setattr__(plan, "_arrays", found)  # a plan is frozen, and this is not part of its value
        return found
