"""Where the logits of a step come from, and which rows they belong to."""

# Shape letters: R rows of a step, S rows that draw, L rows of logits.

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.scheduling.scheduler import StepPlan


class StepIndex:
    """Where the logits of a plan come from and go to. It depends on the plan alone, so a steady plan has one; and is
    found when somebody asks for it.

    Attributes:
        drawing: (S,) which rows of the plan draw.
        first_S: (S,) int64, the first row of logits of each.
        num_logits: L.
    """

    def __init__(self, plan: StepPlan, upload: Callable[[NDArray[Any]], Tensor]) -> None:
        """Of `plan`; `upload` sends a fresh array to the device without waiting."""
        self.plan, self._upload = plan, upload
        self._all_decode = plan.num_decodes == len(plan.rows)
        self.drawing: NDArray[np.int64] = plan.samples.nonzero()[0]
        lens_S = plan.query_lens[self.drawing].astype(np.int64)
        if not self._all_decode:
            lens_S[self.drawing >= plan.num_decodes] = 1
        self._lens_S, self._ends_S = lens_S, lens_S.cumsum()
        self.first_S: NDArray[np.int64] = self._ends_S - lens_S
        self.num_logits = int(self._ends_S[-1]) if len(lens_S) else 0

    @cached_property
    def request_L(self) -> NDArray[np.int64]:
        """(L,) which of the S rows a row of logits belongs to."""
        return np.arange(len(self.drawing)).repeat(self._lens_S)

    @cached_property
    def spot_L(self) -> NDArray[np.int64]:
        """(L,) drafts before it."""
        found: NDArray[np.int64] = np.arange(self.num_logits) - self.first_S[self.request_L]
        return found

    @cached_property
    def _first_token(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.plan.query_lens.cumsum()[self.drawing] - self._lens_S
        return found

    @cached_property
    def rows(self) -> Tensor:
        """(R,) rows of the request table, on the device, as is what follows."""
        return self._upload(self.plan.rows.copy())

    @cached_property
    def query_lens(self) -> Tensor:
        """(R,) int64."""
        return self._upload(self.plan.query_lens.astype(np.int64))

    @cached_property
    def table_rows_S(self) -> Tensor:
        """(S,) those of `rows` that draw."""
        return self.rows if self.plan.samples.all() else self._upload(self.plan.rows[self.drawing])

    @cached_property
    def first_token_S(self) -> Tensor:
        """(S,) the token of the step that the first logits come from."""
        return self._upload(self._first_token)

    @cached_property
    def hidden_L(self) -> Tensor | None:
        """(L,) rows of the hidden states; None for the first L."""
        if self._all_decode:
            return None
        if self.num_logits == len(self.drawing):  # nobody has drafts
            return self.first_token_S
        return self._upload(self._first_token[self.request_L] + self.spot_L)

    @cached_property
    def starts(self) -> Tensor:
        """(S + 1,) int32, first row of logits of each row that draws."""
        starts = np.zeros(1 + len(self.drawing), np.int32)
        starts[1:] = self._ends_S
        return self._upload(starts)

    @cached_property
    def spots_L(self) -> Tensor:
        """`spot_L`."""
        return self._upload(self.spot_L)

    @cached_property
    def owner_L(self) -> Tensor:
        """`request_L`."""
        return self._upload(self.request_L)
