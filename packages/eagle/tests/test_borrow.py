"""What forbids a loan, each alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.eagle.borrow import BorrowError, borrow_violations, require_borrow
from bateleur.metadata import (
    BatchLimits,
    BatchShape,
    CommonAttentionMetadata,
    InputBuffers,
    KVCacheGroup,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    StepRows,
)


@dataclass
class LazyMetadata:
    """Metadata that its first reader may fill."""

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    slot_mapping: Any
    num_decodes: int
    max_query_len: int
    max_seq_len: int


@pytest.fixture
def batch() -> CommonAttentionMetadata:
    """A step of two rows with four tokens each, in two KV groups."""
    groups = (KVCacheGroup(4, 4), KVCacheGroup(4, 4))
    buffers = InputBuffers(BatchLimits(4, 16, 16), groups, "cpu")
    rows = StepRows(
        query_lens=np.array([4, 4], np.int32),
        num_computed_tokens=np.array([3, 5], np.int32),
        is_prefilling=np.zeros(2, np.bool_),
        token_ids=np.arange(8, dtype=np.int32),
        block_tables=(np.arange(1, 9, dtype=np.int32).reshape(2, 4),) * 2,
    )
    return buffers.stage(rows, BatchShape(2, 8, 2, 8, 4))


@pytest.fixture
def metadata(batch: CommonAttentionMetadata) -> PagedAttentionMetadata:
    """What the target's layers are told of the first group."""
    return PagedAttentionBuilder().build(batch, 0)


def test_the_targets_own_step_may_be_used(batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata) -> None:
    assert borrow_violations(metadata, batch, 0) == ()
    require_borrow(metadata, batch, 0, batch.generation)
    fresh = {name: getattr(metadata, name)[:] for name in ("query_start_loc", "seq_lens", "block_table")}
    assert borrow_violations(replace(metadata, **fresh), batch, 0) == (), "views made anew"


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "slot_mapping", "block_table"])
def test_equal_numbers_elsewhere_are_not_the_memory_of_the_step(
    batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata, name: str
) -> None:
    copy = getattr(metadata, name).clone()
    found = borrow_violations(replace(metadata, **{name: copy}), batch, 0)
    assert found == (f"{name} is not memory of the step",)


@pytest.mark.parametrize(("name", "its"), [("max_query_len", 4), ("max_seq_len", 9)])
def test_host_bounds_are_those_of_the_step(
    batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata, name: str, its: int
) -> None:
    found = borrow_violations(replace(metadata, **{name: 99}), batch, 0)
    assert found == (f"{name} is 99, that of the step {its}",)


def test_metadata_that_a_forward_pass_may_have_filled(
    batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata
) -> None:
    lazy: Any = LazyMetadata(**{field.name: getattr(metadata, field.name) for field in fields(metadata)})
    (violation,) = borrow_violations(lazy, batch, 0)
    assert violation.startswith("LazyMetadata is not a frozen dataclass")


def test_a_replay_reads_buffers_that_nobody_staged_since(
    batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata
) -> None:
    (violation,) = borrow_violations(metadata, replace(batch, generation=3), 0, 4)
    assert violation == "staged at generation 3, the target's buffers are at 4"


def test_a_draft_in_another_group_has_other_blocks_and_slots(
    batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata
) -> None:
    found = borrow_violations(metadata, batch, 1)
    assert [violation.split()[0] for violation in found] == ["slot_mapping", "block_table"]


def test_metadata_of_the_unpadded_step_is_not_the_padded_steps(
    batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata
) -> None:
    shorter = replace(metadata, slot_mapping=metadata.slot_mapping[:6])
    assert borrow_violations(shorter, batch, 0) == ("slot_mapping is not memory of the step",)


def test_the_error_names_everything(batch: CommonAttentionMetadata, metadata: PagedAttentionMetadata) -> None:
    broken = replace(metadata, max_seq_len=1, seq_lens=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(BorrowError, match=r"seq_lens is not .*max_seq_len is 1.*are at 99"):
        require_borrow(broken, batch, 0, 99)
    assert issubclass(BorrowError, ValueError)
