"""When a draft pass may use the attention metadata of the target's step.

The first pass of a draft runs on the rows of the target's step, so what the target's attention layers were told fits
the draft's as well, and nothing has to be built again. It fits only as long as everything that the metadata says is
true of the draft too, and nothing else would notice: a draft on wrong metadata is a worse draft, and no wrong text.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Protocol

from torch import Tensor

from bateleur.metadata import CommonAttentionMetadata, PagedAttentionMetadata


class BorrowError(ValueError):
    """The target's attention metadata does not fit the draft pass; the text names all that differs."""


class TargetState(Protocol):
    """What the states of the target's captures must have for a drafter; a `DraftContext` has it, too."""

    @property
    def batch(self) -> CommonAttentionMetadata:
        """The step as it was staged."""
        ...

    @property
    def attention(self) -> PagedAttentionMetadata | None:
        """What the attention layers of the draft's KV group are told; None for a target without any."""
        ...


def borrow_violations(
    metadata: PagedAttentionMetadata, batch: CommonAttentionMetadata, group: int, now: int | None = None
) -> tuple[str, ...]:
    """Name what forbids that a pass over the rows of `batch`, with its keys in KV group `group`, uses `metadata`.

    Its tensors must be memory of the batch, which holds the slots and blocks of the group, and its host bounds those of
    the batch. A forward pass must not be able to use it up. A replay reads the target's buffers at any time, so nothing
    may have been staged since: `now` is the generation of the buffers. Nothing is read on the device.
    """
    memory = {
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "slot_mapping": batch.slot_mappings[group],
        "block_table": batch.block_tables[group],
    }
    found = [
        f"{name} is not memory of the step"
        for name, tensor in memory.items()
        if not _same(getattr(metadata, name), tensor)
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
    """Raise `BorrowError` for what `borrow_violations` finds."""
    if found := borrow_violations(metadata, batch, group, now):
        raise BorrowError(f"the target's attention metadata can't be borrowed: {'; '.join(found)}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)
