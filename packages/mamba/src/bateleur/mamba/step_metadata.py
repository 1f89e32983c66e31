"""What a step tells the recurrent layers of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prompts import Prompts


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """What a step under FOLD may fold while it replays, on a CPU in C: a state that the replay passes is kept, where
    all tokens up to there are certain.

    A layer that does so for the first `through` tokens of each row behind its checkpoint, those in the ring and then
    the step's own, writes them to the plan's `fold_slot`, and counts itself: all layers do it, or none.
    """

    through: Tensor
    """(R,) int64: those in the ring, and the step's first, which is no draft."""
    layers: Tensor
    """(1,) int64: how many have done it."""
    counted: NDArray[np.int64]
    """`layers` again, for the host."""

    @classmethod
    def allocate(cls, num_reqs: int) -> OnTheWay:
        """For so many rows."""
        layers = torch.zeros(1, dtype=torch.int64)
        return cls(torch.zeros(num_reqs, dtype=torch.int64), layers, layers.numpy())

    def rows(self, count: int) -> OnTheWay:
        """Of the first rows."""
        return OnTheWay(self.through[:count], self.layers, self.counted)


@dataclass(frozen=True, slots=True)
class MambaMetadata:
    """One step of a Mamba group. Decode rows lead, and prompt rows follow; D + Pf = R counts padded rows too.

    Decode rows, D of them, continue a state by 1 (to 1 + K) tokens and take the update operators. Prompt rows, Pf of
    them, take the varlen operators, with tokens counted from the first prompt token. Padded rows have no tokens; they
    are decode rows if all real rows are, else prompt rows.
    """

    num_decodes: int
    """D."""
    num_decode_tokens: int
    """Tokens before the first prompt row; all of the padded batch's if there is none."""
    num_prefills: int
    """Pf."""
    plan: SlotPlan | ReplayPlan
    """Slots of all R rows; the kind follows from the layout's policy."""
    query_start_loc: Tensor
    """(R + 1,) int32; the first D + 1 entries are the decode rows'."""
    prompts: Prompts
    chunk_size: int
    """Most tokens of a chunk."""
    max_query_len: int
    """Bound of the tokens of a decode row, not of a prompt row: 1 without speculation."""
    request_row: Tensor | None = None
    """(R,) int64 rows of the `RequestStates`, 0 in padded rows; None where nothing is carried from step to step."""
    way: OnTheWay | None = None
    """None where nothing is folded on the way."""
    pieces: MambaMetadata | None = None
    """The decode rows alone, as the graphs of a piecewise key hold them: as many rows as there can be of its tokens, of
    which those behind the decodes have none. None for other steps."""

    def decodes(self) -> MambaMetadata:
        """With the tensors of the decode rows alone, by views; the numbers remain those of the step."""
        rows = self.num_decodes
        plan, loc = self.plan.rows(0, rows), self.query_start_loc[: rows + 1]
        request_row = None if self.request_row is None else self.request_row[:rows]
        way = None if self.way is None else self.way.rows(rows)
        return replace(self, plan=plan, query_start_loc=loc, request_row=request_row, way=way)
