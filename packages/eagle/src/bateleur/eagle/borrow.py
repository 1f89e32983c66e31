"""When a draft pass may use the attention metadata of the target's step.

The first draft pass runs on the rows of the target's step, so it can use the target's attention metadata and needs no
build of its own. This is checked, because wrong metadata only lowers the acceptance rate and no output shows it.
"""

from dataclasses import is_dataclass
from typing import Protocol

from bateleur.metadata import CommonAttentionMetadata, PagedAttentionMetadata


class BorrowError(ValueError):
    """The target's attention metadata does not fit the draft pass; the message names all differences."""


class TargetState(Protocol):
    """Batch and attention metadata of a step of the target: a captured state of its graphs, or a `DraftContext`."""

    @property
    def batch(self) -> CommonAttentionMetadata:
        """Batch metadata of the step that is in the target's input buffers."""

    @property
    def attention(self) -> PagedAttentionMetadata | None:
        """Attention metadata of the KV-cache group that the draft layers use; None for a target without attention."""


def borrow_violations(
    metadata: PagedAttentionMetadata, batch: CommonAttentionMetadata, group: int, now: int | None = None
) -> tuple[str, ...]:
    """Return why a pass over `batch`, with keys in KV-cache group `group`, cannot use `metadata`; () if it can.

    Four tensors of `metadata` must have the addresses and shapes of those of `batch`: query_start_loc, seq_lens, and
    slot mapping and block table of the group. max_query_len and max_seq_len must be equal in both. `metadata` must be a
    frozen dataclass, so that the target's forward pass cannot have changed it. Nothing is read on the device.

    now: number of times that the target's buffers have been staged, for a pass that reads them later (a graph replay).
        It must equal the `generation` of the batch, else the buffers hold another step.
    """
    found = [
        f"{name} is not memory of the step"
        for name, its, ours in (
            ("query_start_loc", metadata.query_start_loc, batch.query_start_loc),
            ("seq_lens", metadata.seq_lens, batch.seq_lens),
            ("slot_mapping", metadata.slot_mapping, batch.slot_mappings[group]),
            ("block_table", metadata.block_table, batch.block_tables[group]),
        )
        if its.data_ptr() != ours.data_ptr() or its.shape != ours.shape
    ]
    for name in ("max_query_len", "max_seq_len"):
        its, ours = getattr(metadata, name), getattr(batch, name)
        if its != ours:
            found.append(f"{name} is {its}, that of the step {ours}")
    if not (is_dataclass(metadata) and metadata.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        found.append(
            f"{type(metadata).__name__} is not a frozen dataclass, so the target's forward pass may have used it up"
        )
    if now not in (None, batch.generation):
        found.append(f"staged at generation {batch.generation}, the target's buffers are at {now}")
    return tuple(found)


def require_borrow(
    metadata: PagedAttentionMetadata, batch: CommonAttentionMetadata, group: int, now: int | None = None
) -> None:
    """Raise `BorrowError` if a pass over `batch` cannot use `metadata`; arguments as for `borrow_violations`."""
    if found := borrow_violations(metadata, batch, group, now):
        raise BorrowError(f"the target's attention metadata can't be borrowed: {'; '.join(found)}")
