"""The slots of a step, and the metadata built from a staged batch."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import (
    CacheLayout,
    MambaCacheMode,
    MambaMetadataBuilder,
    RequestStates,
    SlotPlan,
    StatePolicy,
    plan_step,
)
from bateleur.metadata import BatchLimits, BatchShape, BuildPhase, InputBuffers, KVCacheGroup, StepRows, check_reads

MAX_LEN = 200


def layout(drafts: int = 0) -> CacheLayout:
    return CacheLayout(MambaCacheMode.NONE, MAX_LEN, drafts, MAX_LEN)


def as_lists(plan: SlotPlan) -> dict[str, list]:
    return {field.name: getattr(plan, field.name).tolist() for field in fields(plan)}


TABLE = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3], [10, 11, 12]], dtype=torch.int32)


def test_golden_without_drafts():
    # A new prompt, a prompt's second part, a decode, and a padded row with garbage in its other fields.
    plan = plan_step(layout(), TABLE, torch.tensor([0, 8, 30, 99]), torch.tensor([5, 3, 1, 0]))
    assert as_lists(plan) == {
        "ssm_read": [0, 7, 1, 0],
        "ssm_write": [[4], [7], [1], [0]],
        "conv_read": [0, 7, 1, 0],
        "conv_offset": [0, 0, 0, 0],
        "conv_write": [4, 7, 1, 0],
        "run_col": [0, 0, 0, 0],
    }


def test_golden_with_drafts():
    # All drafts accepted; one of two accepted, then no drafts; a new prompt with a stale count; a padded row.
    accepted = torch.tensor([3, 2, 3, 77])
    plan = plan_step(layout(2), TABLE, torch.tensor([9, 9, 0, 99]), torch.tensor([3, 1, 6, 0]), accepted)
    assert as_lists(plan) == {
        "ssm_read": [6, 8, 0, 0],
        "ssm_write": [[4, 5, 6], [7, 0, 0], [1, 2, 3], [0, 0, 0]],
        "conv_read": [4, 7, 0, 0],
        "conv_offset": [2, 1, 0, 0],
        "conv_write": [4, 7, 1, 0],
        "run_col": [0, 0, 0, 0],
    }


@pytest.mark.parametrize("accepted", [None, torch.tensor([3, 1, 2, 1])])
def test_out_keeps_its_addresses(accepted):
    out = SlotPlan.allocate(layout(2), 4, "cpu")
    before = {field.name: getattr(out, field.name).data_ptr() for field in fields(out)}
    assert len(set(before.values())) == len(before)
    for field in fields(out):
        getattr(out, field.name).fill_(77)  # a step before this one
    args = (layout(2), TABLE, torch.tensor([9, 9, 0, 99]), torch.tensor([3, 1, 6, 0]), accepted)
    assert plan_step(*args, out=out) is out
    assert before == {field.name: getattr(out, field.name).data_ptr() for field in fields(out)}
    assert as_lists(out) == as_lists(plan_step(*args))


def test_bad_plans_are_refused():
    two = torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"table has 3 columns; a layout of 3 draft tokens .* needs 4"):
        plan_step(layout(3), TABLE, TABLE[:, 0], TABLE[:, 0])
    with pytest.raises(ValueError, match=r"query_lens has shape \(2,\); the table has 4 rows"):
        plan_step(layout(), TABLE, TABLE[:, 0], two)
    with pytest.raises(ValueError, match=r"out has shape \(2, 1\)"):
        plan_step(layout(), TABLE, TABLE[:, 0], TABLE[:, 0], out=SlotPlan.allocate(layout(), 2, "cpu"))
    for wrong in (torch.tensor([1]), two):  # one number would be taken for that of all rows
        with pytest.raises(ValueError, match=rf"prev_col has shape \({len(wrong)},\); the table has 4 rows"):
            plan_step(layout(), TABLE, TABLE[:, 0], TABLE[:, 0], prev_col=wrong)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        MambaMetadataBuilder(layout(), 0, 16, "cpu")
    with pytest.raises(ValueError, match="max_num_reqs is 0"):
        MambaMetadataBuilder(layout(), 4, 0, "cpu")
    with pytest.raises(ValueError, match="states is None; the policy 'fold' and draft tokens need RequestStates"):
        MambaMetadataBuilder(layout(2), 4, 16, "cpu")


class Stage:
    """Persistent, poisoned buffers with one Mamba group, and batches staged into them."""

    def __init__(self, drafts: int = 0, *, states: bool = False) -> None:
        self.columns, self.states = 1 + drafts, states
        groups = [KVCacheGroup(MAX_LEN, width, has_slots=False) for width in (self.columns, 1)[: 1 + states]]
        self.buffers = InputBuffers(BatchLimits(16, 512, MAX_LEN), groups, "cpu")
        self.buffers.poison()

    def __call__(self, rows, *, pad_reqs=0, pad_tokens=0):
        """rows: (query_len, num_computed, is_prefilling) each; row r owns slots 1 + r * columns onwards."""
        query, computed, prompt = (np.array(column) for column in zip(*rows, strict=True))
        n, tokens = len(rows), int(query.sum())
        table = 1 + np.arange(n * self.columns, dtype=np.int32).reshape(n, -1)
        step = StepRows(
            query.astype(np.int32),
            computed.astype(np.int32),
            prompt.astype(bool),
            np.zeros(tokens, np.int32),
            (table, np.arange(1, n + 1, dtype=np.int32)[:, None])[: 1 + self.states],
        )
        shape = BatchShape(n, tokens, n + pad_reqs, tokens + pad_tokens, int(query.max()))
        return self.buffers.stage(step, shape)


LARGE = [(1, 50, False)] * 5 + [(30, 0, True), (20, 64, True), (9, 3, True)]


def test_builder_keeps_the_protocol():
    check_reads(MambaMetadataBuilder(layout(), 8, 16, "cpu"))


def test_decode_batch_owns_its_padding():
    stage, builder = Stage(), MambaMetadataBuilder(layout(), 8, 16, "cpu")
    builder.build(stage(LARGE), 0)
    meta = builder.build(stage([(1, 9, False), (1, 4, True)], pad_reqs=2, pad_tokens=2), 0, BuildPhase.RUN)
    assert (meta.num_decodes, meta.num_decode_tokens, meta.num_prefills) == (4, 4, 0)
    assert meta.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert as_lists(meta.plan)["ssm_read"] == [1, 2, 0, 0]
    assert as_lists(meta.plan)["ssm_write"] == [[1], [2], [0], [0]]
    assert (meta.prefill_chunks.max_chunks_per_row, meta.max_query_len, len(meta.prefill_chunks.chunk_row)) == (0, 1, 0)
    none = meta.prefill_chunks
    for starts in (none.chunk_start_loc, none.row_chunk_loc, none.query_start_loc):
        assert starts.tolist() == [0]


def test_mixed_batch():
    stage, builder = Stage(), MambaMetadataBuilder(layout(), 4, 16, "cpu")
    builder.build(stage(LARGE), 0)
    # A decode, a prompt's second part from token 6, and a new prompt of one token, which has no state to update.
    rows = [(1, 9, False), (7, 6, True), (1, 0, True)]
    meta = builder.build(stage(rows, pad_reqs=1, pad_tokens=3), 0)
    assert (meta.num_decodes, meta.num_decode_tokens, meta.num_prefills) == (1, 1, 3)
    assert meta.prefill_chunks.query_start_loc.tolist() == [0, 7, 8, 8]
    assert meta.prefill_chunks.chunk_start_loc.tolist() == [0, 2, 6, 7, 8]  # the first chunk completes tokens 4 to 7
    assert meta.prefill_chunks.chunk_row.tolist() == [0, 0, 0, 1]
    assert meta.prefill_chunks.row_chunk_loc.tolist() == [0, 3, 4, 4]
    assert (meta.prefill_chunks.max_chunks_per_row, meta.max_query_len, meta.chunk_size) == (3, 1, 4)
    assert as_lists(meta.plan)["conv_read"] == [1, 2, 0, 0]


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_builders_slots_are_the_plans(drafts):
    """With drafts, the accepted tokens of the last step are those of `states`: one for new requests."""
    states = RequestStates(17, "cpu") if drafts else None
    stage = Stage(drafts, states=drafts > 0)
    builder = MambaMetadataBuilder(layout(drafts), 4, 16, "cpu", states)
    decodes = [(1, 9, False), (1, 4, True), (1, 1, False)]
    for rows, pad in ((LARGE, 2), (decodes, 3), ([(1, 0, True)], 0), ([*decodes, (5, 0, True)], 1), (decodes, 0)):
        batch = stage(rows, pad_reqs=pad, pad_tokens=pad)
        lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        expected = plan_step(layout(drafts), batch.block_tables[0], batch.num_computed_tokens, lens)
        assert as_lists(builder.build(batch, 0).plan) == as_lists(expected)


def test_a_decode_batch_lives_at_the_builders_addresses():
    stage, builder = Stage(), MambaMetadataBuilder(layout(), 4, 16, "cpu")
    before = builder.addresses()
    metas = [builder.build(stage(rows, pad_reqs=1), 0) for rows in (LARGE, [(1, 9, False)], [(1, 4, True)])]
    assert builder.addresses() == before
    pointers = [{getattr(m.plan, f.name).data_ptr() for f in fields(m.plan)} for m in metas[1:]]
    assert pointers[0] == pointers[1]
    assert pointers[0] <= set(before.values())
    assert builder.signature(metas[1]).admits(builder.signature(metas[2])) is None
    assert "num_decodes is 5, but control 2" in builder.signature(metas[1]).admits(builder.signature(metas[0]))
    with pytest.raises(ValueError, match="max_num_reqs = 2"):
        MambaMetadataBuilder(layout(), 4, 2, "cpu").build(stage(LARGE), 0)


def test_decode_rows_behind_a_prompt_are_prompts():
    meta = MambaMetadataBuilder(layout(), 4, 16, "cpu").build(Stage()([(3, 0, True), (1, 9, False)]), 0)
    assert (meta.num_decodes, meta.num_prefills) == (0, 2)
    assert meta.prefill_chunks.row_chunk_loc.tolist() == [0, 1, 2]


def test_first_token_of_a_request_is_a_prompt():
    meta = MambaMetadataBuilder(layout(), 4, 16, "cpu").build(Stage()([(1, 0, True)]), 0)
    assert (meta.num_decodes, meta.num_prefills) == (0, 1)
    assert meta.prefill_chunks.row_chunk_loc.tolist() == [0, 1]


def test_drafts_are_decoded_and_short_prompts_are_not():
    states = RequestStates(4, "cpu")
    states.scatter(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    stage, builder = Stage(drafts=2, states=True), MambaMetadataBuilder(layout(2), 4, 16, "cpu", states)
    rows = [(3, 9, False), (1, 9, False), (2, 9, True)]
    meta = builder.build(stage(rows), 0)
    assert (meta.num_decodes, meta.num_decode_tokens, meta.max_query_len) == (2, 4, 3)
    assert as_lists(meta.plan)["ssm_read"] == [2, 6, 7]
    assert meta.prefill_chunks.query_start_loc.tolist() == [0, 2]


@pytest.mark.parametrize(("widths", "message"), [((3,), "group 1 is missing"), ((3, 6), "group 1 has 6 columns")])
def test_states_need_the_table_that_names_their_rows(widths, message):
    """Otherwise the blocks of an attention group would be read as request rows."""
    groups = [KVCacheGroup(MAX_LEN, width, has_slots=False) for width in widths]
    one, tables = np.ones(1, np.int32), tuple(np.ones((1, width), np.int32) for width in widths)
    batch = InputBuffers(BatchLimits(16, 512, MAX_LEN), groups, "cpu").stage(
        StepRows(one, 8 * one, np.zeros(1, bool), one, tables), BatchShape(1, 1, 1, 1, 1)
    )
    builder = MambaMetadataBuilder(layout(2), 4, 16, "cpu", RequestStates(5, "cpu"))
    with pytest.raises(ValueError, match=f"common: the table of {message}; the group after Mamba group 0"):
        builder.build(batch, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(5, 0, True), (3, 9, False)], "row 1 is past its prompt, and row 0 before it is not"),
        ([(3, 9, False), (4, 9, True), (1, 9, True), (1, 9, False)], "row 3 .*, and row 1 before it"),
    ],
)
def test_rows_with_drafts_must_lead(rows, message):
    """A scan would accept all drafts, and does not read the ring."""
    states = RequestStates(5, "cpu")
    stage, builder = Stage(drafts=2, states=True), MambaMetadataBuilder(layout(2), 4, 16, "cpu", states)
    with pytest.raises(ValueError, match=f"common: {message}"):
        builder.build(stage(rows), 0)


def test_dummy_batch_touches_only_the_null_slot():
    stage, builder = Stage(), MambaMetadataBuilder(layout(), 4, 16, "cpu")
    builder.build(stage(LARGE), 0)
    for shape in (BatchShape(4, 4, 6, 6, 1), BatchShape(2, 30, 6, 32, 30)):
        for phase in BuildPhase:
            plan = as_lists(builder.build(stage.buffers.dummy(shape), 0, phase).plan)
            assert not any([*plan["conv_write"], *plan["conv_read"], *plan["ssm_read"], *map(any, plan["ssm_write"])])


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 30)), min_size=1, max_size=6),
    decodes=st.integers(0, 4),
    chunk_size=st.integers(1, 16),
    pad=st.integers(0, 3),
)
def test_chunks_match_a_loop(loop_chunks, prompts, decodes, chunk_size, pad):
    prompts = [(q + (q == 1), n, True) for q, n in prompts]
    batch = Stage()([(1, 7, False)] * decodes + prompts, pad_reqs=pad, pad_tokens=pad)
    meta = MambaMetadataBuilder(layout(), chunk_size, 16, "cpu").build(batch, 0)
    lens, phases = [q for q, _, _ in prompts] + [0] * pad, [n % chunk_size for _, n, _ in prompts] + [0] * pad
    starts, rows, first = loop_chunks(lens, phases, chunk_size)
    assert meta.num_decodes == decodes
    assert meta.prefill_chunks.chunk_start_loc.tolist() == starts
    assert meta.prefill_chunks.chunk_row.tolist() == rows
    assert meta.prefill_chunks.row_chunk_loc.tolist() == first
    assert meta.prefill_chunks.max_chunks_per_row == max(np.diff(first))
    assert meta.prefill_chunks.query_start_loc.tolist() == [0, *np.cumsum(lens).tolist()]
    cut = meta.prefill_chunks
    assert {t.dtype for t in (cut.chunk_start_loc, cut.chunk_row, cut.query_start_loc)} == {torch.int32}


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("policy", list(StatePolicy))
def test_pieces_hold_the_decodes_of_any_batch(policy, drafts):
    # A captured graph reads all rows that its tokens can have, at one address: those behind the decodes are neutral.
    states = RequestStates(20, "cpu") if drafts or policy is StatePolicy.FOLD else None
    kind = CacheLayout(MambaCacheMode.NONE, MAX_LEN, drafts, MAX_LEN, policy)
    builder = MambaMetadataBuilder(kind, 8, 16, "cpu", states)
    stage, book = Stage(drafts, states=states is not None), dict(builder.addresses())
    decodes = [(1 + drafts, 9, False), (1, 70, False)]
    for rows in (LARGE, [*decodes, (5, 0, True)], decodes, [(9, 0, True)]):
        meta = builder.build(batch := stage(rows, pad_tokens=3), 0)
        held, n = builder.with_piecewise_decodes(meta, batch).piecewise_decodes, meta.num_decodes
        room = min(16, batch.num_tokens)
        assert (held.num_decodes, held.num_prefills, held.max_query_len) == (room, 0, 1 + drafts)
        counts = [count for count, _, prompt in rows if not prompt]
        assert held.query_start_loc.diff().tolist() == [*counts, *[0] * (room - n)]
        found = held.plan.tensors() | ({} if states is None else {"request_row": held.request_row})
        told = meta.plan.tensors() | {"request_row": meta.request_row}
        for name, tensor in found.items():
            assert tensor.shape[0] == room
            assert torch.equal(tensor[:n], told[name][:n])
            assert not tensor[n:].any()
            assert tensor.data_ptr() in book.values()
        assert held.query_start_loc.data_ptr() in book.values()


@pytest.mark.parametrize("carries", [False, True])
def test_only_settled_batches_that_carry_states_repeat(carries):
    """Without states every step of one token each repeats; with them, only one after another such step."""
    states = RequestStates(4, "cpu") if carries else None
    stage = Stage(2 if carries else 0, states=carries)
    builder = MambaMetadataBuilder(layout(2 if carries else 0), 8, 16, "cpu", states)

    def steps(rows, *, settled):
        common = stage(rows)
        return builder.num_repeatable_steps(builder.build(common, 0), common, settled=settled)

    decodes = [(1, 9, False), (1, 4, False)]
    assert steps(decodes, settled=True) == MAX_LEN
    assert steps(decodes, settled=False) == (0 if carries else MAX_LEN)
    assert steps([(1, 9, False), (3, 4, True)], settled=True) == 0
    if carries:
        assert steps([(3, 9, False), (3, 4, False)], settled=True) == 0, "drafts"
