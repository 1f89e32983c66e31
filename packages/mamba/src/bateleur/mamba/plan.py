"""Which slots a step reads and writes: a pure function of the batch, on the device.

Legend: R rows (padded ones included), K draft tokens, `computed` tokens of a row before the step, `accepted` tokens
that survived of those the row computed in its previous step (1 to 1 + K; 1 when nothing was drafted).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bateleur.mamba.spec import CacheLayout


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Read and write slots of every row of a step, all int64 on the device of the block table.

    Slot 0 is null: reading it means a zero state, writing it means dropping the write. A row without tokens has 0
    everywhere, so padded rows are neutral whatever their other fields hold.
    """

    ssm_read: Tensor
    """(R,) slot of the SSM state to start from."""
    ssm_write: Tensor
    """(R, 1 + K) slot for the SSM state after each token; a prompt writes its final state to column 0 alone."""
    conv_read: Tensor
    """(R,) slot of the conv window to start from."""
    conv_offset: Tensor
    """(R,) entry of that slot where the window begins: accepted - 1."""
    conv_write: Tensor
    """(R,) slot for the conv window."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan:
        """A neutral plan of `num_reqs` rows, to be refilled in place through `plan_step(..., out=...)`."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        r = num_reqs
        return cls(zeros(r), zeros(r, 1 + layout.num_speculative_tokens), zeros(r), zeros(r), zeros(r))


def plan_step(
    layout: CacheLayout,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None = None,
    out: SlotPlan | None = None,
) -> SlotPlan:
    """The slots of one step in cache mode `none`.

    A request owns the slots of its table row. Its previous step left the state after token i in column i, and the conv
    window, widened to hold every token's, in column 0; so this one reads column accepted - 1 and column 0 at offset
    accepted - 1. A row with nothing computed starts from zeros.

    Args:
        layout: of the group the table belongs to.
        table: (R, columns) integer block table; at least 1 + K columns.
        computed: (R,) tokens before the step, accepted ones only.
        query_lens: (R,) tokens of the step; 0 in padded rows.
        accepted: (R,) in [1, 1 + K] in rows with tokens and a state, ignored in others; None means 1 in all.
        out: buffers to fill instead of allocating; their addresses are kept.

    Raises:
        ValueError: the table is too narrow, or a row count differs.
    """
    num_rows, columns = table.shape
    width = 1 + layout.num_speculative_tokens
    if columns < width:
        raise ValueError(
            f"table has {columns} columns; {layout.num_speculative_tokens} draft tokens need {width}"
        )
    for name, rows in (("computed", computed), ("query_lens", query_lens), ("accepted", accepted)):
        if rows is not None and rows.shape != (num_rows,):
            raise ValueError(f"{name} has shape {tuple(rows.shape)}; the table has {num_rows} rows")
    if out is not None and out.ssm_write.shape != (num_rows, width):
        raise ValueError(f"out has shape {tuple(out.ssm_write.shape)}; the step needs {(num_rows, width)}")
    plan = _plan_none(width, table, computed, query_lens, accepted)
    if out is None:
        return plan
    for field in fields(SlotPlan):
        getattr(out, field.name).copy_(getattr(plan, field.name))
    return out


def _plan_none(
    width: int, table: Tensor, computed: Tensor, query_lens: Tensor, accepted: Tensor | None
) -> SlotPlan:
    """Without `out`, fields that are always equal may share memory."""
    if width == 1:
        running = table[:, 0].to(torch.int64, copy=True).masked_fill_(query_lens == 0, 0)
        read = running.masked_fill(computed == 0, 0)
        return SlotPlan(read, running[:, None], read, torch.zeros_like(read), running)
    slots = table[:, :width].to(torch.int64)
    tokens = query_lens[:, None]
    write = torch.where(tokens > torch.arange(width, device=table.device), slots, 0)
    running = write[:, 0]
    resumes = computed > 0
    conv_read = torch.where(resumes, running, 0)
    if accepted is None:
        return SlotPlan(conv_read, write, conv_read, torch.zeros_like(conv_read), running)
    offset = torch.where(resumes & (query_lens > 0), accepted.to(torch.int64) - 1, 0)
    # Take from the table and not from `write`: the state may lie in a column that this shorter step does not write.
    ssm_read = torch.where(conv_read > 0, slots.gather(1, offset[:, None])[:, 0], 0)
    return SlotPlan(ssm_read, write, conv_read, offset, running)
