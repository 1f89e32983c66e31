"""Metadata of one step for the recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prefill_chunks import PrefillChunks


@dataclass(frozen=True, slots=True)
class MambaMetadata:
    """Metadata of one step for the layers of a Mamba KV-cache group: D decode rows, then Pf prefill rows
    (requests, or padding).

    A decode row continues a state by 1 to 1 + K tokens (K drafts) and uses the update operators. A prefill row uses the
    varlen operators, whose token indices start at the first prefill token. Padded rows have no tokens. They count as
    decode rows if all real rows are decodes, otherwise as prefill rows.

    `max_query_len` bounds the tokens of a decode row. `request_row` has the rows of the requests in
    `RequestStates`. `piecewise_decodes` has the decode rows as a piecewise graph reads them: padded to the maximum
    number of rows for this number of tokens.
    """

    num_decodes: int
    """D."""
    num_decode_tokens: int
    """Tokens before the first prefill row, or all tokens of the padded batch if there is no prefill row."""
    num_prefills: int
    """Pf."""
    plan: SlotPlan | ReplayPlan
    """Slots of all R rows: a `SlotPlan` under the state policy SLOTS, a `ReplayPlan` under FOLD."""
    query_start_loc: Tensor
    """(R + 1,) int32; the first D + 1 entries belong to the decode rows."""
    prefill_chunks: PrefillChunks
    chunk_size: int
    """Maximum number of tokens of a chunk."""
    max_query_len: int
    """Upper bound of the tokens of a decode row: 1 without speculative decoding. Does not bound prefill rows."""
    request_row: Tensor | None = None
    """(R,) int64 rows of the `RequestStates`, 0 in padded rows; None if requests carry nothing between steps."""
    piecewise_decodes: MambaMetadata | None = None
    """The decode rows as a piecewise graph reads them: the maximum number of rows for this number of tokens, where rows
    after the last decode have no tokens. None for other steps."""

    def decodes(self) -> MambaMetadata:
        """Return the metadata of the decode rows: views of the tensors. Counts remain those of the whole step."""
        rows = self.num_decodes
        plan, loc = self.plan.rows(0, rows), self.query_start_loc[: rows + 1]
        request_row = None if self.request_row is None else self.request_row[:rows]
        return replace(self, plan=plan, query_start_loc=loc, request_row=request_row)
