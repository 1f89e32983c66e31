"""The rows of one step."""

# Shape letters: R rows of a step, T tokens of a step, S rows that draw.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.request import Request

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The rows of one step: decodes, then parts of prompts. Nobody writes to its arrays."""

    requests: list[Request]
    rows: NDArray[np.int64]
    """(R,) rows of the request table."""
    query_lens: NDArray[np.int32]
    """(R,) tokens computed for each."""
    num_decodes: int
    """Leading rows past their prompt: the token they were left with, and drafts of those after it, which are still on
    the device."""
    samples: NDArray[np.bool_]
    """(R,) whether the row computes its last known token, and so draws the next."""

    @cached_property
    def num_tokens(self) -> int:
        """T, all tokens of the step."""
        return int(self.query_lens.sum())

    @cached_property
    def num_decode_tokens(self) -> int:
        """Those of the decoding rows."""
        return int(self.query_lens[: self.num_decodes].sum())

    @cached_property
    def is_prefilling(self) -> NDArray[np.bool_]:
        """(R,) whether the row is in its prompt."""
        return np.arange(len(self.rows)) >= self.num_decodes

    @cached_property
    def drawing(self) -> tuple[list[Request], NDArray[np.int64]]:
        """The S requests that draw, and their rows (S,)."""
        if self.samples.all():
            return self.requests, self.rows
        return [self.requests[i] for i in self.samples.nonzero()[0].tolist()], self.rows[self.samples]


class PerPlan(Generic[T]):
    """What is made of a plan, once while it repeats."""

    def __init__(self, make: Callable[[StepPlan], T]) -> None:
        self._make = make
        self._last: tuple[StepPlan, T] | None = None

    def __call__(self, plan: StepPlan) -> T:
        """Of `plan`."""
        if self._last is None or self._last[0] is not plan:
            self._last = plan, self._make(plan)
        return self._last[1]

    def forget(self) -> None:
        """Make it anew."""
        self._last = None
