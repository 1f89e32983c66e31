"""What a step tells the recurrent layers of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prompts import Prompts


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
    pieces: MambaMetadata | None = None
    """The decode rows alone, as the graphs of a piecewise key hold them: as many rows as there can be of its tokens, of
    which those behind the decodes have none. None for other steps."""

    def decodes(self) -> MambaMetadata:
        """With the tensors of the decode rows alone, by views; the numbers remain those of the step."""
        rows = self.num_decodes
        plan, loc = self.plan.rows(0, rows), self.query_start_loc[: rows + 1]
        request_row = None if self.request_row is None else self.request_row[:rows]
        return replace(self, plan=plan, query_start_loc=loc, request_row=request_row)
