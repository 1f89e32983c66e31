"""The geometry of drafts against a loop over requests, and the entries B and C of the bug catalogue it can meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.cudagraph.backends import get_backend
from bateleur.eagle.buffers import DraftBuffers
from bateleur.eagle.geometry import stage_first, stage_next
from bateleur.metadata import BatchLimits, BatchShape, CommonAttentionMetadata, InputBuffers, KVCacheGroup, StepRows

BLOCK = 4
MAX_ROWS, MAX_TOKENS, MAX_LEN = 6, 48, 32


class Step:
    """A staged step of the target: rows of (context, tokens), some of them rejected, with padding behind."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        valid: Sequence[int] | None = None,
        *,
        drafts: int = 3,
        padding: tuple[int, int] = (0, 0),
        ids: Sequence[int] | None = None,
        lookahead: int | None = None,
        limit: int = MAX_LEN,
    ) -> None:
        context, lens = ([row[shard] for row in rows] for shard in (0, 1))
        self.context, self.lens, self.valid = context, lens, list(valid or lens)
        self.num_rows, self.num_tokens, self.drafts, self.limit = len(rows), sum(lens), drafts, limit
        width = MAX_LEN // BLOCK
        group = KVCacheGroup(BLOCK, width, lookahead_tokens=drafts if lookahead is None else lookahead)
        self.inputs = InputBuffers(BatchLimits(MAX_ROWS, MAX_TOKENS, MAX_LEN), (group,), "cpu")
        self.inputs.poison()
        self.ids = list(range(100, 100 + sum(lens))) if ids is None else list(ids)
        table = 1 + np.random.default_rng(7).permutation(len(rows) * width).reshape(len(rows), width)
        step = StepRows(
            query_lens=np.array(lens, np.int32),
            num_computed_tokens=np.array(context, np.int32),
            is_prefilling=np.zeros(len(rows), bool),
            token_ids=np.array(self.ids, np.int32),
            block_tables=(table.astype(np.int32),),
            num_computed_is_exact=np.zeros(len(rows), bool),
        )
        shape = BatchShape(
            len(rows), sum(lens), len(rows) + padding[0], sum(lens) + padding[1] + padding[0], max(lens, default=1)
        )
        self.batch: CommonAttentionMetadata = self.inputs.stage(step, shape)
        self.next = [900 + row for row in range(len(rows))]
        self.buffers = DraftBuffers(BatchLimits(MAX_ROWS, MAX_TOKENS, limit), drafts, "cpu")
        self.buffers.poison()

    def stage_first(self, given: int | None = None) -> dict[str, list[Any]]:
        """`given` rows of arguments, garbage behind the real ones."""
        given = self.num_rows if given is None else given
        next_token, num_valid = (torch.full((given,), 2**62) for _ in range(2))
        next_token[: self.num_rows] = torch.tensor(self.next, dtype=torch.int64)
        num_valid[: self.num_rows] = torch.tensor(self.valid, dtype=torch.int64)
        stage_first(self.buffers, self.batch, 0, next_token, num_valid)
        return contents(self.buffers)

    def drawn(self, step: int, given: int | None = None) -> Tensor:
        token = torch.full((self.num_rows if given is None else given,), 2**62)
        token[: self.num_rows] = 500 + 10 * step + torch.arange(self.num_rows)
        return token

    def chain(self, step: int, given: int | None = None) -> dict[str, list[Any]]:
        """Record draft `step` and stage the pass behind it."""
        stage_next(self.buffers, self.drawn(step, given), self.batch.block_tables[0], BLOCK, first=step == 0)
        return contents(self.buffers)

    def slot(self, row: int, position: int) -> int:
        block = int(self.batch.block_tables[0][row, position // BLOCK])
        return block * BLOCK + position % BLOCK if block else -1


def contents(buffers: DraftBuffers) -> dict[str, list[Any]]:
    others = {"hidden", "seeds", "temperature", "block_table"}
    return {name: tensor.tolist() for name, tensor in buffers.tensors().items() if name not in others}


def tail(values: Sequence[Any], length: int, fill: Any = 0) -> list[Any]:
    return [*values, *[fill] * (length - len(values))]


def loop_first(step: Step) -> dict[str, list[Any]]:
    """What the first pass reads, one token of one request at a time."""
    ids, positions, slots, last, starts = [], [], [], [], [0]
    for row, (context, length, valid) in enumerate(zip(step.context, step.lens, step.valid, strict=True)):
        own = step.ids[starts[row] : starts[row] + length]
        for j in range(length):
            position, kept = context + j, j < valid
            ids.append((own[j + 1] if j < valid - 1 else step.next[row]) if kept else 0)
            positions.append(min(position, step.limit - 1))
            slots.append(step.slot(row, position) if kept and position < step.limit else -1)
        last.append(starts[row] + valid - 1)
        starts.append(starts[row] + length)
    return {
        "input_ids": tail(ids, MAX_TOKENS),
        "positions": tail(positions, MAX_TOKENS),
        "slot_mapping": tail(slots, MAX_TOKENS, -1),
        "query_start_loc": tail(starts, MAX_ROWS + 1, starts[-1]),
        "seq_lens": tail([c + n for c, n in zip(step.context, step.lens, strict=True)], MAX_ROWS),
        "num_computed_tokens": tail(step.context, MAX_ROWS),
        "last_index": tail(last, MAX_ROWS),
        "token_positions": tail([c + v + 1 for c, v in zip(step.context, step.valid, strict=True)], MAX_ROWS),
        "tokens": [[-1] * step.drafts] * MAX_ROWS,
        "step": 0,
    }


def loop_chain(step: Step, number: int) -> dict[str, list[Any]]:
    """What pass `number` of the chain reads; pass 0 is the first one, over the target's tokens."""
    ids, positions, slots, tokens = [], [], [], []
    for row, (context, valid) in enumerate(zip(step.context, step.valid, strict=True)):
        position = context + valid - 1 + number
        drafts = [500 + 10 * s + row if position - number + s < step.limit else -1 for s in range(number)]
        ids.append(max(drafts[-1], 0))
        positions.append(min(position, step.limit - 1))
        slots.append(step.slot(row, position) if position < step.limit else -1)
        tokens.append(tail(drafts[: step.drafts], step.drafts, -1))
    rows = range(step.num_rows)
    return {
        "input_ids": tail(ids, MAX_TOKENS),
        "positions": tail(positions, MAX_TOKENS),
        "slot_mapping": tail(slots, MAX_TOKENS, -1),
        "query_start_loc": [min(i, step.num_rows) for i in range(MAX_ROWS + 1)],
        "seq_lens": tail([p + 1 for p in positions], MAX_ROWS),
        "num_computed_tokens": tail(positions, MAX_ROWS),
        "last_index": tail(rows, MAX_ROWS),
        "token_positions": tail([c + v + 1 + number for c, v in zip(step.context, step.valid, strict=True)], MAX_ROWS),
        "tokens": tail(tokens, MAX_ROWS, [-1] * step.drafts),
        "step": number,
    }


@st.composite
def steps(draw: st.DrawFn) -> Step:
    drafts, limit = draw(st.integers(1, 4)), draw(st.sampled_from([5, 17, MAX_LEN]))
    rows, valid = [], []
    for _ in range(draw(st.integers(0, MAX_ROWS))):
        length = draw(st.integers(1, 7))
        rows.append((draw(st.integers(0, MAX_LEN - length)), length))
        valid.append(draw(st.integers(1, length)))
    padding = draw(st.integers(0, MAX_ROWS - len(rows))), draw(st.integers(0, 3))
    lookahead = draw(st.sampled_from([0, drafts]))
    return Step(rows, valid, drafts=drafts, padding=padding, limit=limit, lookahead=lookahead)


@settings(max_examples=150, deadline=None)
@given(step=steps(), data=st.data())
def test_every_entry_of_every_pass_is_that_of_the_loop(step: Step, data: st.DataObject) -> None:
    given = data.draw(st.integers(step.num_rows, step.batch.num_reqs))
    assert step.stage_first(given) == loop_first(step)
    for number in range(step.drafts):
        assert step.chain(number, given) == loop_chain(step, number + 1)


@settings(max_examples=30, deadline=None)
@given(step=steps())
def test_c5_the_bound_holds_in_every_pass(step: Step) -> None:
    """#43991; every row's host length counts rejected drafts too."""
    bound = min(step.batch.seq_len_bound.max() + step.drafts, step.limit)
    step.stage_first()
    for number in range(step.drafts):
        assert max(step.chain(number)["seq_lens"]) <= bound


def test_b1_b2_b3_lengths_positions_and_tokens_along_scripted_rejections() -> None:
    """Three steps of one request, which accepts 0, 1 or all drafts in each; the text is 1000, 1001, ..."""
    drafts = 3
    for accepted in product((0, 1, drafts), repeat=3):
        computed = 5
        for count in accepted:
            text = [1000 + i for i in range(computed + drafts + 3)]
            right = text[computed : computed + 1 + count]
            step = Step(
                [(computed, 1 + drafts)], [1 + count], drafts=drafts, ids=tail(right, 1 + drafts, 7), lookahead=3
            )
            computed += 1 + count
            step.next = [text[computed]]
            first = step.stage_first()
            last = first["last_index"][0]
            assert first["input_ids"][: last + 1] == text[computed - count : computed + 1]
            assert first["positions"][last] == computed - 1
            assert set(first["slot_mapping"][last + 1 :]) == {-1}
            for number in range(drafts):
                staged = step.chain(number)
                assert staged["positions"][0] == computed + number
                assert staged["seq_lens"][0] == computed + number + 1
                assert staged["slot_mapping"][0] == step.slot(0, computed + number) >= 0


def test_b5_a_chunk_of_a_prompt_ends_with_the_next_token_of_the_prompt() -> None:
    """sglang#26329: not with a sampled one; all of the chunk stays."""
    prompt = [11, 12, 13, 14, 15, 16, 17]
    step = Step([(0, 4)], ids=prompt[:4])
    step.next = prompt[4:5]
    assert step.stage_first()["input_ids"][:4] == prompt[1:5]


def test_b6_c6_prompt_chunks_and_verified_rows_mix_and_shape_decides_nothing() -> None:
    """#49918 family: a chunk of exactly 1 + K tokens keeps all of them beside a row that lost three."""
    step = Step([(9, 4), (0, 4), (4, 2), (3, 1)], [1, 4, 2, 1], drafts=3)
    first = step.stage_first()
    assert first["input_ids"][:11] == [900, 0, 0, 0, 105, 106, 107, 901, 109, 902, 903]
    assert first["last_index"][:4] == [0, 7, 9, 10]


def test_c1_padded_rows_record_and_store_nothing() -> None:
    """#47066: they wrote into the drafts of other requests."""
    step = Step([(9, 4), (2, 4)], [2, 3], padding=(3, 1))
    step.stage_first(given=5)
    for number in range(3):
        staged = step.chain(number, given=5)
        assert staged["tokens"][2:] == [[-1] * 3] * 4
        assert set(staged["slot_mapping"][2:]) == {-1}


def test_c2_no_stale_index_survives_a_smaller_batch() -> None:
    """#39773: what a captured gather reads of padded rows must lie in the batch."""
    large, small = Step([(3, 4)] * 6), Step([(3, 2)])
    small.buffers = large.buffers
    large.stage_first()
    first = small.stage_first()
    assert first["last_index"] == [1, 0, 0, 0, 0, 0]
    assert first == loop_first(small)


def test_c3_starts_of_the_chain_are_clamped_over_the_whole_buffer() -> None:
    step = Step([(3, 4), (5, 4)], padding=(2, 0))
    step.stage_first()
    assert step.chain(0)["query_start_loc"] == [0, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("limit", [MAX_LEN, 20])
def test_c4_beyond_the_limit_nothing_is_stored_and_nothing_drafted(limit: int) -> None:
    """#32628, #57941: neither block 0 nor a row of the rotary table that does not exist."""
    step = Step([(limit - 3, 2)], drafts=4, limit=limit)
    step.stage_first()
    step.chain(0)
    assert step.buffers.positions[0] == limit - 1
    assert step.buffers.slot_mapping[0] == step.slot(0, limit - 1)
    for number in range(1, 4):
        staged = step.chain(number)
        assert (staged["positions"][0], staged["seq_lens"][0], staged["slot_mapping"][0]) == (limit - 1, limit, -1)
    assert staged["tokens"][0] == [500, 510, -1, -1]


def test_c4_a_draft_shorter_than_the_target_steps_aside() -> None:
    """#57941: the target's positions may be behind the end of the draft's rotary table."""
    step = Step([(10, 4), (3, 2)], limit=12)
    first = step.stage_first()
    assert first["positions"][:4] == [10, 11, 11, 11]
    assert [slot >= 0 for slot in first["slot_mapping"][:4]] == [True, True, False, False]
    for number in range(3):
        tokens = step.chain(number)["tokens"]
    assert tokens[0] == [-1, -1, -1]
    assert tokens[1] == [500 + 10 * s + 1 for s in range(3)]


def test_a11_no_two_drafts_at_the_limit_share_a_key() -> None:
    step = Step([(MAX_LEN - 2, 2)], drafts=4)
    keys = [step.stage_first()["token_positions"][0], *(step.chain(n)["token_positions"][0] for n in range(3))]
    assert keys == [MAX_LEN + 1 + n for n in range(4)]


def test_c7_sizes_of_graphs_need_not_be_multiples_of_a_row() -> None:
    """#28207: a tail shorter than 1 + K tokens belongs to nobody."""
    step = Step([(3, 3), (8, 3)], [1, 2], drafts=2, padding=(0, 2))
    first = step.stage_first()
    assert first["input_ids"][6:8] == first["positions"][6:8] == [0, 0]
    assert first["slot_mapping"][6:8] == [-1, -1]


def test_c8_without_blocks_ahead_nothing_is_stored() -> None:
    """#37637: the null block is not written to; the token is a draft nevertheless, since it may be right."""
    step = Step([(5, 3)], drafts=2, lookahead=0)
    step.stage_first()
    staged = step.chain(0)
    assert (staged["slot_mapping"][0], staged["seq_lens"][0]) == (-1, 9)
    assert step.chain(1)["tokens"][0] == [500, 510]


def test_a_row_that_drew_nothing_drafts_nothing_and_embeds_a_real_id() -> None:
    step = Step([(5, 1), (6, 1)])
    step.next[0] = -1
    assert step.stage_first()["input_ids"][:2] == [0, 901]
    stage_next(step.buffers, torch.tensor([-1, 3]), step.batch.block_tables[0], BLOCK, first=True)
    assert step.buffers.input_ids[:2].tolist() == [0, 3]
    assert step.buffers.tokens[:2, 0].tolist() == [-1, 3]


def test_a_call_behind_the_last_draft_records_nothing() -> None:
    step = Step([(5, 1)], drafts=2)
    step.stage_first()
    for number in range(4):
        staged = step.chain(number)
    assert staged["tokens"][0] == [500, 510]


def test_all_of_it_can_be_captured_and_replayed_on_another_step() -> None:
    """Same sizes, other rows, other counts: nothing was read on the host, and no address moved."""
    one, other = Step([(3, 4), (8, 4)], padding=(1, 0)), Step([(6, 5), (1, 2), (4, 2)], [2, 1, 2])
    batch, table = one.batch, one.batch.block_tables[0]
    next_token, num_valid, drawn = torch.zeros(3).long(), torch.ones(3).long(), torch.zeros(3, 3).long()

    def body(_: Any) -> None:
        stage_first(one.buffers, batch, 0, next_token, num_valid)
        for step in range(3):
            stage_next(one.buffers, drawn[step], table, BLOCK, first=step == 0)

    key = BatchExecutionDescriptor(CudaGraphMode.FULL, 9, 3, max_query_len=9)
    recording = get_backend("recorded", "cpu").capture(body, key, None)
    addresses = one.buffers.addresses()
    for name in ("input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens"):
        getattr(batch, name).copy_(getattr(other.batch, name))
    batch.slot_mappings[0].copy_(other.batch.slot_mappings[0])
    table.copy_(other.batch.block_tables[0])
    next_token.copy_(torch.tensor(other.next))
    num_valid.copy_(torch.tensor(other.valid))
    drawn.copy_(torch.stack([other.drawn(step) for step in range(3)]))
    one.buffers.poison()
    recording.replay(None)
    assert contents(one.buffers) == loop_chain(other, 3)
    assert one.buffers.addresses() == addresses


def test_wrong_arguments() -> None:
    step = Step([(5, 2), (3, 1)])
    token = torch.zeros(2, dtype=torch.int64)
    small = DraftBuffers(BatchLimits(1, 2, 8), 1, "cpu")
    with pytest.raises(ValueError, match="batch: 2 rows and 3 tokens are more than the buffers hold, 1 and 2"):
        stage_first(small, step.batch, 0, token, token)
    with pytest.raises(ValueError, match=r"next_token \(2,\) and num_valid \(1,\) must both be"):
        stage_first(step.buffers, step.batch, 0, token, token[:1])
    with pytest.raises(ValueError, match="at most the 2 rows of the batch"):
        stage_first(step.buffers, step.batch, 0, token.repeat(2), token.repeat(2))
    with pytest.raises(ValueError, match=r"token: has shape \(4,\), must be .* at most 6 rows .* and 2"):
        stage_next(step.buffers, token.repeat(2), step.batch.block_tables[0], BLOCK, first=True)
    with pytest.raises(ValueError, match=r"token: has shape \(1, 2\)"):
        stage_next(step.buffers, token[None], step.batch.block_tables[0], BLOCK)
    with pytest.raises(ValueError, match="num_speculative_tokens=0 must be at least 1"):
        DraftBuffers(BatchLimits(1, 2, 8), 0, "cpu")
