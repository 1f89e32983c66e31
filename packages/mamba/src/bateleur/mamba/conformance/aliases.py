"""Rows that would write where another row reads or writes: the caller's error, which operators do not look for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bateleur.mamba.planners import CopyPlan, SlotPlan
from bateleur.mamba.prompts import Prompts
from bateleur.mamba.recurrence import FoldRows
from bateleur.mamba.step_metadata import MambaMetadata


def check_aliases(step: MambaMetadata | Prompts | FoldRows | CopyPlan, read: Tensor | None = None) -> None:
    """Refuse slots, and rows of rings, that two rows of a step share although one of them writes.

    step: decode rows, the chunks of prompts with `read` (Pf,), the slots they begin from, or what follows acceptance.
    Looks at values: on a device it waits. Raises ValueError naming the slot and both rows.
    """
    if isinstance(step, Prompts):
        assert read is not None
        writes: list[list[int]] = [[] for _ in range(len(read))]
        for row, slot in zip(step.chunk_row.tolist(), step.chunk_write.tolist(), strict=True):
            writes[row].append(slot)
        _apart("slot", [[slot] for slot in read.tolist()], writes)
    elif isinstance(step, FoldRows):
        folds = step.dst.tolist()
        reads = [[src] if dst else [] for src, dst in zip(step.src.tolist(), folds, strict=True)]
        _apart("slot", reads, [[dst] for dst in folds])
    elif isinstance(step, CopyPlan):
        for source in (step.conv_src, step.ssm_src):
            _apart("slot", [[slot] for slot in source.tolist()], [[dst] for dst in step.dst.tolist()])
    elif isinstance(step.plan, SlotPlan):
        plan = step.plan
        _apart("slot", [[slot] for slot in plan.ssm_read.tolist()], plan.ssm_write.tolist())
        windows = plan.conv_read.tolist(), plan.conv_write.tolist()
        _apart("slot", *([[slot] for slot in slots] for slots in windows))
    else:
        assert step.request_row is not None
        own = [[row] for row in step.request_row.tolist()]
        _apart("request row", own, own)


def _apart(what: str, reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]) -> None:
    owner: dict[int, int] = {}
    for row, slots in enumerate(writes):
        for slot in slots:
            if slot and owner.setdefault(slot, row) != row:
                raise ValueError(f"{what} {slot} is written by row {owner[slot]} and by row {row}")
    for row, slots in enumerate(reads):
        for slot in slots:
            if slot and owner.get(slot, row) != row:
                raise ValueError(f"{what} {slot} is written by row {owner[slot]} and read by row {row}")
