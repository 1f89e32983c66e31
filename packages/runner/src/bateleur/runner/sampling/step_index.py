"""Where the logits of a step come from, and which rows they belong to."""

# Shape letters: R rows of a step, S rows that draw, L rows of logits.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.scheduling.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Where the logits of a plan come from and go to. It depends on the plan alone, so a steady plan has one."""

    plan: StepPlan
    drawing: NDArray[np.int64]
    first_S: NDArray[np.int64]
    request_L: NDArray[np.int64]
    """(L,) which of the S rows a row of logits belongs to."""
    spot_L: NDArray[np.int64]
    """(L,) drafts before it."""
    rows: Tensor
    """(R,) rows of the request table, on the device, as is what follows."""
    query_lens: Tensor
    """(R,) int64."""
    table_rows_S: Tensor
    first_token_S: Tensor
    """(S,) the token of the step that the first logits come from."""
    hidden_L: Tensor | None
    """(L,) rows of the hidden states; None for the first L."""
    starts: Tensor
    """(S + 1,) int32, first row of logits of each row that draws."""
    spots_L: Tensor
    owner_L: Tensor

    @classmethod
    def of(cls, plan: StepPlan, upload: Callable[[NDArray[np.int64]], Tensor]) -> StepIndex:
        """Of `plan`; `upload` sends an array to the device without waiting."""
        drawing = np.flatnonzero(plan.samples)
        lens_S = np.where(drawing < plan.num_decodes, plan.query_lens[drawing], 1).astype(np.int64)
        ends_S = np.cumsum(lens_S)
        first_S = ends_S - lens_S
        request_L = np.repeat(np.arange(len(drawing)), lens_S)
        spot_L = np.arange(len(request_L)) - first_S[request_L]
        first_token_S = np.cumsum(plan.query_lens)[drawing] - lens_S
        all_decode = plan.num_decodes == len(plan.rows)
        hidden = None if all_decode else upload(first_token_S[request_L] + spot_L)
        starts = np.concatenate((first_S, ends_S[-1:])) if len(first_S) else np.zeros(1, np.int64)
        rows = upload(plan.rows.copy())
        return cls(
            plan,
            drawing,
            first_S,
            request_L,
            spot_L,
            rows,
            upload(plan.query_lens.astype(np.int64)),
            rows if len(drawing) == len(plan.rows) else upload(plan.rows[drawing]),
            upload(first_token_S),
            hidden,
            upload(starts).int(),
            upload(spot_L),
            upload(request_L),
        )
