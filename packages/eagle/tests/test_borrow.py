"""The rules of borrowing, each broken alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.eagle.borrow import AttentionUse, BorrowError, LayerRule, borrow_violations, require_borrow
from bateleur.metadata import (
    BatchLimits,
    BatchShape,
    InputBuffers,
    KVGroup,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    StepRows,
)

KEY = BatchExecutionDescriptor(CudaGraphMode.FULL, 8, 2, 4, 4)
OTHER_KEY = BatchExecutionDescriptor(CudaGraphMode.FULL, 16, 4, 4, 4)
RULE = LayerRule(4, PagedAttentionBuilder)


class OtherBuilder(PagedAttentionBuilder):
    """Another class."""


@dataclass
class LazyPlan:
    """Metadata that its first reader fills."""

    plan: object = None


def both_sides(group: int = 0) -> tuple[AttentionUse, AttentionUse]:
    """What the target says of a staged step, and what a draft in KV group `group` needs."""
    groups = (KVGroup(4, 4), KVGroup(4, 4))
    buffers, builder = InputBuffers(BatchLimits(4, 16, 16), groups, "cpu"), PagedAttentionBuilder()
    rows = StepRows(
        query_lens=np.array([4, 4], np.int32),
        num_computed=np.array([3, 5], np.int32),
        is_prefilling=np.zeros(2, np.bool_),
        token_ids=np.arange(8, dtype=np.int32),
        block_tables=(np.arange(1, 9, dtype=np.int32).reshape(2, 4),) * 2,
    )
    batch = buffers.stage(rows, BatchShape(2, 8, 2, 8, 4))
    book = buffers.addresses()
    lent = AttentionUse.lent(KEY, builder.build(batch, 0), RULE, addresses=book, generation=1)
    needed = AttentionUse.needed(KEY, batch, group, RULE, addresses=dict(book), generation=1)
    return lent, needed


def test_a_pass_over_the_targets_own_step_breaks_nothing() -> None:
    lent, needed = both_sides()
    assert borrow_violations(lent, needed) == ()
    require_borrow(lent, needed)


def test_views_made_anew_are_the_same_memory() -> None:
    lent, needed = both_sides()
    fresh = {name: getattr(needed, name)[:] for name in ("query_start_loc", "seq_lens", "block_table")}
    assert borrow_violations(lent, replace(needed, **fresh)) == ()


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("B1", "query_start_loc", {"query_start_loc": torch.tensor([0, 4, 8], dtype=torch.int32)}),
    ("B1", "10 tokens instead of the target's 8", {"num_tokens": 10}),
    ("B2", "seq_lens", {"seq_lens": torch.tensor([7, 9], dtype=torch.int32)}),
    ("B2", "slot_mapping", {"slot_mapping": torch.zeros(8, dtype=torch.int64)}),
    ("B2", "-1 from the target's", {"position_offset": -1}),
    ("B3", "block_table", {"block_table": torch.zeros(2, 4, dtype=torch.int32)}),
    ("B3", "block_size is 8, the target's is 4", {"layers": replace(RULE, block_size=8)}),
    ("B3", "causal is False", {"layers": replace(RULE, causal=False)}),
    ("B3", "sliding_window is 32, the target's is None", {"layers": replace(RULE, sliding_window=32)}),
    ("B4", "OtherBuilder", {"layers": replace(RULE, builder=OtherBuilder)}),
    ("B5", "FULL 16 tokens", {"key": OTHER_KEY}),
    ("B5", "no graph instead of", {"key": None}),
    ("B6", "generation 0, the target's buffers are at 1", {"generation": 0}),
    ("B6", "buffer seq_lens", {"addresses": {"seq_lens": 12}}),
    ("B8", "1 rows are decodes, 0", {"num_decodes": 1}),
    ("B8", "max_query_len is 5", {"max_query_len": 5}),
    ("B8", "max_seq_len is 99", {"max_seq_len": 99}),
]


@pytest.mark.parametrize(("rule", "text", "change"), CASES, ids=[f"{r}-{t}" for r, t, _ in CASES])
def test_a_broken_rule_is_named_alone(rule: str, text: str, change: dict[str, Any]) -> None:
    lent, needed = both_sides()
    (violation,) = borrow_violations(lent, replace(needed, **change))
    assert violation.startswith(f"{rule}: ")
    assert text in violation


def test_b7_metadata_that_a_forward_pass_may_have_filled() -> None:
    lent, needed = both_sides()
    (violation,) = borrow_violations(replace(lent, metadata=LazyPlan()), needed)
    assert violation.startswith("B7: LazyPlan is not a frozen dataclass")


def test_an_eager_pass_bakes_nothing_so_b6_does_not_apply() -> None:
    lent, needed = both_sides()
    assert borrow_violations(lent, replace(needed, generation=None, addresses=None)) == ()


def test_a_buffer_that_the_target_got_later_is_no_violation() -> None:
    lent, needed = both_sides()
    assert lent.addresses is not None
    assert borrow_violations(replace(lent, addresses={**lent.addresses, "new": 1}), needed) == ()


def test_a_draft_in_another_group_has_other_blocks_and_slots() -> None:
    lent, needed = both_sides(group=1)
    assert [violation[:2] for violation in borrow_violations(lent, needed)] == ["B2", "B3"]


def test_metadata_of_the_unpadded_step_is_not_the_padded_steps() -> None:
    lent, needed = both_sides()
    assert isinstance(lent.metadata, PagedAttentionMetadata)
    shorter = replace(lent.metadata, slot_mapping=lent.metadata.slot_mapping[:6])
    found = borrow_violations(AttentionUse.lent(KEY, shorter, RULE, generation=1), needed)
    assert found[0] == "B1: 8 tokens instead of the target's 6"


def test_the_error_names_every_broken_rule() -> None:
    lent, needed = both_sides()
    broken = replace(needed, key=None, position_offset=1, num_decodes=2)
    with pytest.raises(BorrowError, match=r"B2: .*B5: .*B8: "):
        require_borrow(lent, broken)
    assert issubclass(BorrowError, ValueError)
