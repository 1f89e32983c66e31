"""Detects requests that write a state slot which another request uses; operators do not check for this error."""

from collections.abc import Sequence

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
        writes: list[list[int]] = [[] for _ in range(len(read))]
        for row, slot in zip(step.chunk_row.tolist(), step.chunk_write.tolist(), strict=True):
            writes[row].append(slot)
        _require_disjoint("slot", [[slot] for slot in read.tolist()], writes)
    elif isinstance(step, FoldBatch):
        folds = step.dst.tolist()
        reads = [[src] if dst else [] for src, dst in zip(step.src.tolist(), folds, strict=True)]
        _require_disjoint("slot", reads, [[dst] for dst in folds])
    elif isinstance(step, CopyPlan):
        for source in (step.conv_src, step.ssm_src):
            _require_disjoint("slot", [[slot] for slot in source.tolist()], [[dst] for dst in step.dst.tolist()])
    elif isinstance(step.plan, SlotPlan):
        plan = step.plan
        _require_disjoint("slot", [[slot] for slot in plan.ssm_read.tolist()], plan.ssm_write.tolist())
        windows = plan.conv_read.tolist(), plan.conv_write.tolist()
        _require_disjoint("slot", *([[slot] for slot in slots] for slots in windows))
    else:
        assert step.request_row is not None
        own = [[row] for row in step.request_row.tolist()]
        _require_disjoint("request row", own, own)


def _require_disjoint(what: str, reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]) -> None:
    owner: dict[int, int] = {}
    for row, slots in enumerate(writes):
        for slot in slots:
            if slot and owner.setdefault(slot, row) != row:
                raise ValueError(f"{what} {slot} is written by row {owner[slot]} and by row {row}")
    for row, slots in enumerate(reads):
        for slot in slots:
            if slot and owner.get(slot, row) != row:
                raise ValueError(f"{what} {slot} is written by row {owner[slot]} and read by row {row}")
