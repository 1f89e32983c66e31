"""Block tables of running requests: steps name rows, and only new block ids are staged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bateleur.metadata import BatchLimits, BatchShape, BlockTable, InputBuffers, KVCacheGroup, StepRows, validate

LIMITS = BatchLimits(max_num_reqs=5, max_num_tokens=23, max_model_len=40)
GROUPS = (
    KVCacheGroup(4, 10, lookahead_tokens=3),
    KVCacheGroup(40, 3, has_slots=False),
    KVCacheGroup(40, 1, has_slots=False),
)
ROWS = 9


def make_tables() -> list[BlockTable]:
    """Return tables of ROWS rows; the last group's never change."""
    own = np.arange(1, 1 + ROWS, dtype=np.int32)[:, None]
    empty = [np.zeros((ROWS, group.max_blocks), np.int32) for group in GROUPS[:2]]
    return [*map(BlockTable, empty), BlockTable(own)]


class Engine:
    """Simulated requests that start, grow and end. Every block has one owner."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tables = make_tables()
        self.lengths: dict[int, int] = {}
        self.free = list(range(1, 200))

    def change(self) -> None:
        """End and start some requests, in reused rows, and write some states."""
        kv, states, _ = self.tables
        for row in [row for row in self.lengths if self.rng.random() < 0.3]:
            held = kv.ids[row]
            self.free += held[held > 0].tolist()
            kv.clear(row)
            states.clear(row)
            del self.lengths[row]
        free = [row for row in range(ROWS) if row not in self.lengths]
        while len(self.lengths) < LIMITS.max_num_reqs and self.rng.random() < 0.7:
            self.lengths[free.pop(int(self.rng.integers(len(free))))] = int(self.rng.integers(0, 9))
        for row in self.lengths:
            if self.rng.random() < 0.5:
                states.write(row, np.array([0, 2]), self.rng.integers(0, 99, 2))

    def step(self, *, shuffle: bool) -> tuple[StepRows, BatchShape]:
        """Schedule one token or more for most requests, and allocate their blocks."""
        rows = np.array(sorted(self.lengths), np.int64)
        if shuffle:
            rows = self.rng.permutation(rows)[: int(self.rng.integers(len(rows) + 1))]
        lens = self.rng.integers(1, 5, len(rows)).astype(np.int32)
        before = np.array([self.lengths[row] for row in rows], np.int32)
        kv = self.tables[0]
        for row, after in zip(rows.tolist(), (before + lens).tolist(), strict=True):
            held, needed = np.count_nonzero(kv.ids[row]), -(-after // 4)
            if held < needed:
                kv.write(row, np.arange(held, needed), [self.free.pop() for _ in range(held, needed)])
            self.lengths[row] = after
        num_tokens = int(lens.sum())
        ids = self.rng.integers(1, 99, num_tokens).astype(np.int32)
        step = StepRows(lens, before, np.zeros(len(rows), np.bool_), ids, block_table_rows=rows)
        longest = int(lens.max(initial=1))
        return step, BatchShape(len(rows), num_tokens, LIMITS.max_num_reqs, LIMITS.max_num_tokens, longest)

    def expected(self, rows: Any) -> list[Any]:
        """Return all block tables of the batch at full size."""
        found = []
        for table in self.tables:
            whole = np.zeros((LIMITS.max_num_reqs, table.ids.shape[1]), np.int32)
            whole[: len(rows)] = table.ids[rows]
            found.append(whole.tolist())
        return found


@pytest.mark.parametrize("sent", [False, True], ids=["in place", "sent"])
@pytest.mark.parametrize("seed", range(6))
def test_the_batch_has_the_tables_of_its_rows(make: Any, deferred: Any, seed: int, sent: bool) -> None:
    """Requests start, end and change batch rows, with other batches between, and copies run late."""
    engine = Engine(seed)
    queue = deferred if sent else None
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", tables=engine.tables, queue=queue)
    plain = InputBuffers(LIMITS, GROUPS, "cpu")
    for _ in range(25):
        engine.change()
        if not engine.lengths or max(engine.lengths.values()) > 33:
            engine.lengths = dict.fromkeys(engine.lengths, 0)
            continue
        rows, shape = engine.step(shuffle=bool(engine.rng.random() < 0.4))
        batch = buffers.stage(rows, shape)
        whole = make.whole(batch, LIMITS) if not sent else None
        expected = engine.expected(rows.block_table_rows)
        deferred.sync()
        whole = whole or make.whole(batch, LIMITS)
        assert [table.tolist() for table in whole["block_tables"]] == expected
        validate(batch, LIMITS, GROUPS, level="device")
        tables = tuple(table.ids[rows.block_table_rows] for table in engine.tables)
        given = StepRows(rows.query_lens, rows.num_computed_tokens, rows.is_prefilling, rows.token_ids, tables)
        other = make.whole(plain.stage(given, shape), LIMITS)
        for name in whole.keys() - {"block_tables"}:
            for found, same in zip(whole[name], other[name], strict=True):
                assert np.array_equal(found, same), name
        chance = engine.rng.random()
        if chance < 0.1:
            buffers.poison()
        elif chance < 0.2:
            buffers.dummy(BatchShape.of(3, 9, 3))
        elif chance < 0.3:
            buffers.stage(given, shape)
        elif chance < 0.4:
            buffers.forget()
        deferred.sync()


def test_device_counts_make_the_device_fields(make: Any, deferred: Any) -> None:
    """The host has upper bounds that it marks as inexact."""
    for queue in (None, deferred):
        tables = make_tables()
        tables[0].write(np.array([[7], [2]]), np.arange(4), [[1, 2, 3, 4], [5, 6, 7, 8]])
        buffers = InputBuffers(LIMITS, GROUPS, "cpu", tables=tables, queue=queue)
        rows = StepRows(
            query_lens=np.array([1, 3], np.int32),
            num_computed_tokens=np.array([6, 9], np.int32),
            is_prefilling=np.zeros(2, np.bool_),
            token_ids=np.zeros(4, np.int32),
            num_computed_is_exact=np.array([False, True]),
            block_table_rows=np.array([7, 2]),
            num_computed_tokens_device=torch.tensor([4, 9]),
        )
        batch = buffers.stage(rows, BatchShape(2, 4, 3, 5, 3))
        deferred.sync()
        assert batch.num_computed_tokens.tolist() == [4, 9, 0]
        assert batch.seq_lens.tolist() == [5, 12, 0]
        assert batch.seq_len_bound.upper.tolist() == [7, 12, 0]
        assert batch.positions.tolist() == [4, 9, 10, 11, 0]
        assert batch.slot_mappings[0].tolist() == [8, 29, 30, 31, -1]
        validate(batch, LIMITS, GROUPS, level="device")


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_steady_step_sends_new_cells_and_counts(deferred: Any, tokens: int) -> None:
    """256 rows of 128k tokens all get a new block: uploaded bytes do not depend on the context length."""
    rows, length, size = 256, 1 << 17, 16
    limits = BatchLimits(rows, rows * tokens, length)
    groups = (KVCacheGroup(size, length // size), KVCacheGroup(512, length // 512, has_slots=False))
    tables = [BlockTable(np.zeros((rows, group.max_blocks), np.int32)) for group in groups]
    each = np.arange(rows)
    tables[0].write(each[:, None], np.arange(8000), 1 + np.arange(rows * 8000).reshape(rows, 8000))
    buffers = InputBuffers(limits, groups, "cpu", tables=tables, queue=deferred)
    deferred.queue.clear()  # what the device does is not looked at here
    sent = []
    for step in range(20):
        deferred.copies.clear()
        computed = np.full(rows, 8000 * size - 3 + step, np.int32)
        column = (8000 * size - 3 + step + tokens - 1) // size
        if not tables[0].ids[0, column]:
            tables[0].write(each, column, 1 + column * rows + each)
        drawn = torch.zeros(rows * tokens, dtype=torch.int64)
        ids, lens = np.zeros(rows * tokens, np.int32), np.full(rows, tokens, np.int32)
        given = StepRows(lens, computed, np.zeros(rows, np.bool_), ids, sampled_token_ids=drawn, block_table_rows=each)
        buffers.stage(given, BatchShape.of(rows, rows * tokens, tokens))
        deferred.queue.clear()
        packet, moved = deferred.copies
        assert moved is drawn, "stays on the device"
        sent.append(packet.nbytes)
    begin, *steady = sent
    assert begin > 8000 * 256 * 4
    assert max(steady) < 4096
    assert sorted(steady)[len(steady) // 2] == 4 * rows


def test_what_no_table_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ids: has shape \(3, 2\) and dtype int64, must be contiguous"):
        BlockTable(np.zeros((3, 2), np.int64))
    tables = make_tables()
    with pytest.raises(ValueError, match=r"tables: have \[10, 3\] columns, must be as wide as the groups'"):
        InputBuffers(LIMITS, GROUPS, "cpu", tables=tables[:2])
    with pytest.raises(ValueError, match=r"tables: have \[9, 9, 4\] rows; all must have as many"):
        InputBuffers(LIMITS, GROUPS, "cpu", tables=[*tables[:2], BlockTable(np.ones((4, 1), np.int32))])
    one = np.ones(1, np.int32)
    step = StepRows(one, one, np.zeros(1, np.bool_), one, block_table_rows=np.array([0]))
    shape = BatchShape.of(1, 1, 1)
    with pytest.raises(ValueError, match="block_table_rows: names rows, but the buffers were made without tables"):
        InputBuffers(LIMITS, GROUPS, "cpu").stage(step, shape)
    for queue in (None, Refusing()):
        buffers = InputBuffers(LIMITS, GROUPS, "cpu", tables=tables, queue=queue)
        for row in (9, -1):
            step = StepRows(one, one, np.zeros(1, np.bool_), one, block_table_rows=np.array([row]))
            with pytest.raises(ValueError, match=rf"table_rows: \[ *{row}\] must be rows of tables of 9 rows"):
                buffers.stage(step, shape)
        step = StepRows(one, one, np.zeros(1, np.bool_), one, block_table_rows=np.array([3]))
        with pytest.raises(ValueError, match="group 0 has block 0 for position 1 of row 0"):
            buffers.stage(step, shape)
        step = StepRows(
            one, one, one == 0, one, block_table_rows=np.array([3]), num_computed_tokens_device=torch.zeros(2)
        )
        with pytest.raises(ValueError, match=r"num_computed_tokens_device: has shape \(2,\), must be \(1,\)"):
            buffers.stage(step, shape)


class Refusing:
    """A queue that never runs its work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Never runs."""

    def launch(self, work: Any) -> None:
        """Never runs."""


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_of_a_later_step_are_staged_as_if_they_were_new(width: int, sampled: bool) -> None:
    """Rows cross block boundaries, get new blocks, and other batches are staged in between."""
    tables, twins = make_tables(), make_tables()
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", tables=tables)
    fresh = InputBuffers(LIMITS, GROUPS, "cpu", tables=twins)
    rows = np.array([6, 0, 3])
    computed, num_tokens = np.array([3, 7, 1], np.int32), 3 * width
    lens, shape = np.full(3, width, np.int32), BatchShape.of(3, num_tokens, width)
    first = StepRows(lens, computed, np.zeros(3, np.bool_), np.zeros(num_tokens, np.int32), block_table_rows=rows)
    block = 1
    for step in range(9):
        for row, count in zip(rows.tolist(), computed.tolist(), strict=True):
            for column in range(-(-(count + width) // 4)):
                if not tables[0].ids[row, column]:
                    for each in (tables, twins):
                        each[0].write(row, column, block)
                    block += 1
        drawn = torch.arange(num_tokens) + 100 * step if sampled else None
        if step == 5:
            buffers.dummy(BatchShape.of(2, 6, 3))
            assert buffers.stage(first.next_step(computed, drawn), shape).num_actual_reqs == 3
        batch = buffers.stage(first.next_step(computed, drawn), shape)
        new = StepRows(lens, computed, first.is_prefilling, first.token_ids, (), None, drawn, rows)
        want = fresh.stage(new, shape)
        for name in ("input_ids", "positions", "seq_lens", "num_computed_tokens", "query_start_loc"):
            assert torch.equal(getattr(batch, name), getattr(want, name)), (step, name)
        for mine, other in zip(
            batch.slot_mappings + batch.block_tables, want.slot_mappings + want.block_tables, strict=True
        ):
            assert torch.equal(mine, other), step
        assert batch.seq_len_bound.upper.tolist() == want.seq_len_bound.upper.tolist()
        validate(batch, LIMITS, GROUPS)
        assert batch.max_seq_len == want.max_seq_len
        computed = computed + np.array([width, 1, width], np.int32)


def test_rows_that_come_in_turn_with_other_lengths_are_staged_as_if_they_were_new() -> None:
    """Query lengths grow and shrink between steps, so that padding changes."""
    tables, twins = make_tables(), make_tables()
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", tables=tables)
    fresh = InputBuffers(LIMITS, GROUPS, "cpu", tables=twins)
    rows, others = np.array([6, 0, 3]), np.array([6, 0, 4])
    block = 1
    for row in (6, 0, 3, 4):
        for each in (tables, twins):
            each[0].write(row, np.arange(9), np.arange(block, block + 9))
        block += 9
    computed = np.array([3, 7, 1], np.int32)
    lens = [np.array(each, np.int32) for each in ([3, 3, 3], [1, 1, 1], [2, 1, 3], [1, 3, 2])]
    firsts = [
        (
            StepRows(each, computed, np.zeros(3, np.bool_), np.zeros(each.sum(), np.int32), block_table_rows=where),
            BatchShape.of(3, int(each.sum()), 3),
        )
        for each, where in [*((each, rows) for each in lens), (lens[2], others)]
    ]
    order = [0, 1, 2, 3, 1, 0, 2, 3, 4, 2, 1, 0, 0, 1]
    for step, which in enumerate(order):
        if step == 11:
            buffers.dummy(BatchShape.of(2, 6, 3))
        first, shape = firsts[which]
        drawn = torch.arange(shape.num_tokens) + 100 * step
        batch = buffers.stage(first.next_step(computed, drawn), shape)
        values = first.query_lens, computed, first.is_prefilling, first.token_ids, (), None, drawn
        want = fresh.stage(StepRows(*values, first.block_table_rows), shape)
        for name, mine in buffers._whole.items():  # padding, too
            pairs = (
                zip(mine, fresh._whole[name], strict=True) if isinstance(mine, tuple) else [(mine, fresh._whole[name])]
            )
            assert all(np.array_equal(a, b) for a, b in pairs), (step, name)
        validate(batch, LIMITS, GROUPS)
        assert batch.max_seq_len == want.max_seq_len
        computed = computed + np.array([1, 0, 1], np.int32)


def test_later_rows_with_counts_that_can_not_be_are_refused() -> None:
    tables = make_tables()
    buffers = InputBuffers(LIMITS, GROUPS, "cpu", tables=tables)
    tables[0].write(2, np.arange(10), np.arange(1, 11))
    shape, rows = BatchShape.of(1, 1, 1), np.array([2])
    ones = np.ones(1, np.int32)
    first = StepRows(ones, ones, np.zeros(1, np.bool_), ones, block_table_rows=rows)
    buffers.stage(first, shape)
    for wrong, words in ((np.array([40], np.int32), "would hold 41 tokens"), (np.array([-1], np.int32), "negative")):
        with pytest.raises(ValueError, match=words):
            buffers.stage(first.next_step(wrong, None), shape)
        with pytest.raises(ValueError, match=words):
            buffers.stage(first.next_step(wrong, torch.ones(1, dtype=torch.int64)), shape)
    with pytest.raises(ValueError, match="num_computed_tokens: has dtype int64"):
        buffers.stage(first.next_step(np.array([2]), None), shape)
    assert buffers.stage(first.next_step(np.array([2], np.int32), None), shape).seq_lens.tolist() == [3]
    tables[0].write(2, 1, 0)
    batch = buffers.stage(first.next_step(np.array([3], np.int32), torch.full((1,), 7)), shape)
    for drawn in (None, torch.full((1,), 8)):
        with pytest.raises(ValueError, match="group 0 has block 0 for position 4 of row 0"):
            buffers.stage(first.next_step(np.array([4], np.int32), drawn), shape)
    assert (batch.seq_lens.tolist(), batch.input_ids.tolist()) == ([4], [7]), "nothing was written"
