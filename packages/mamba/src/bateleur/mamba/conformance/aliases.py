"""Detects requests that write a state slot which another request uses; operators do not check for this error."""

from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.planners import CopyPlan, SlotPlan
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.recurrence import FoldBatch


def check_aliases(step: MambaMetadata | PrefillChunks | FoldBatch | CopyPlan, read: Tensor | None = None) -> None:
    """Raise ValueError if a request writes a state slot or ring (of later inputs) of another request.

    The message names the slot and the requests. Waits for the device.

    Args:
        step: decode rows, prefill chunks, or the copies or folds after a step.
        read: (prefills,) state slots that prefills start from; only for `PrefillChunks`.
    """
    if isinstance(step, PrefillChunks):
        assert read is not None
        _require_disjoint("slot", read, step.chunk_write, step.chunk_row)
    elif isinstance(step, FoldBatch):
        _require_disjoint("slot", step.src * (step.dst != 0), step.dst)
    elif isinstance(step, CopyPlan):
        _require_disjoint("slot", step.conv_src, step.dst)
        _require_disjoint("slot", step.ssm_src, step.dst)
    elif isinstance(step.plan, SlotPlan):
        _require_disjoint("slot", step.plan.ssm_read, step.plan.ssm_write)
        _require_disjoint("slot", step.plan.conv_read, step.plan.conv_write)
    else:
        assert step.request_row is not None
        _require_disjoint("request row", step.request_row, step.request_row)


def _require_disjoint(what: str, reads: Tensor, writes: Tensor, row_of_write: Tensor | None = None) -> None:
    """Raise ValueError if a row writes a slot (not 0) that another row reads or writes; row r reads reads[r].

    writes: (R, ...), or (n,) with the row of each write in `row_of_write`. what: noun for a slot in the error.
    """
    owner: dict[int, int] = {}
    rows = range(len(writes)) if row_of_write is None else row_of_write.tolist()
    for row, slots in zip(rows, writes[:, None].flatten(1).tolist(), strict=True):
        for slot in slots:
            if slot and owner.setdefault(slot, row) != row:
                raise ValueError(f"{what} {slot} is written by row {owner[slot]} and by row {row}")
    for row, slot in enumerate(reads.tolist()):
        if slot and owner.get(slot, row) != row:
            raise ValueError(f"{what} {slot} is written by row {owner[slot]} and read by row {row}")
