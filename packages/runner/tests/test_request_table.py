"""What a step does to rows of the request table, against the same said row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.engine.output_processor import append_tokens
from bateleur.runner.requests.request import RequestTable
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.scheduling.step_batch import StepBatch

ROWS, LONGEST, K, VOCAB = 7, 90, 4, 50
OUTCOME = ("num_known", "num_committed", "num_computed", "num_tokens", "num_uncertain")


def table_of(rng: np.random.Generator) -> RequestTable:
    table = RequestTable(ROWS, LONGEST, 8)
    for name in OUTCOME:
        getattr(table, name)[:] = rng.integers(5, 20, ROWS)
    return table


def scheduler_of(table: RequestTable, **settings: int) -> Scheduler:
    return Scheduler(table, None, **{"block_size": 18, "max_num_batched_tokens": 999} | settings)


def decodes(rows: np.ndarray, lens: np.ndarray) -> StepBatch:
    return StepBatch([], rows, lens, len(rows), np.ones(len(rows), np.bool_), torch.device("cpu"))


def some_rows(rng: np.random.Generator, least: int = 1) -> np.ndarray:
    return rng.permutation(ROWS)[: rng.integers(least, ROWS + 1)]


@pytest.mark.parametrize("width", [1, 1 + K])
def test_the_outcome_of_a_step_keeps_what_was_emitted_and_takes_back_the_rest(width: int) -> None:
    rng, table = np.random.default_rng(1), table_of(np.random.default_rng(0))
    scheduler = scheduler_of(table)
    for _ in range(8):
        rows = some_rows(rng)
        counts = rng.integers(1 if width == 1 else 0, width + 1, len(rows))
        tokens = rng.integers(0, VOCAB, (len(rows), width))
        lens = np.full(len(rows), width, np.int32)
        ids, drafted = table.token_ids.copy(), table.drafted.copy()
        expected = {name: getattr(table, name).copy() for name in OUTCOME}
        for row, count, line in zip(rows.tolist(), counts.tolist(), tokens, strict=True):
            for spot in range(count):
                ids[row, expected["num_known"][row] + spot] = line[spot]
                drafted[row, expected["num_known"][row] + spot] = spot < count - 1
            expected["num_known"][row] += count
            expected["num_committed"][row] += count
            expected["num_computed"][row] -= width - count
            expected["num_tokens"][row] -= width - count
            expected["num_uncertain"][row] -= width - 1
        append_tokens(table, rows, tokens, counts)
        scheduler.commit(decodes(rows, lens), counts)
        assert table.token_ids.tolist() == ids.tolist()
        assert table.drafted.tolist() == drafted.tolist()
        for name in OUTCOME:
            assert getattr(table, name).tolist() == expected[name].tolist(), name


def test_a_scheduled_step_counts_its_drafts_as_accepted_until_it_is_known() -> None:
    rng, table = np.random.default_rng(2), table_of(np.random.default_rng(0))
    scheduler = scheduler_of(table)
    for _ in range(8):
        rows = some_rows(rng)
        lens = rng.integers(1, 2 + K, len(rows), dtype=np.int32)
        table.num_draft_slots[rows] = lens - 1
        expected = {name: getattr(table, name).copy() for name in OUTCOME}
        for row, count in zip(rows.tolist(), lens.tolist(), strict=True):
            expected["num_computed"][row] += count
            expected["num_tokens"][row] = expected["num_computed"][row] + 1
            expected["num_uncertain"][row] += count - 1
        before = table.num_computed[rows].tolist()
        scheduler.batch = decodes(rows, lens)
        assert scheduler.schedule() is scheduler.batch
        assert scheduler.batch.num_computed.tolist() == before
        for name in OUTCOME:
            assert getattr(table, name).tolist() == expected[name].tolist(), name


def test_decoding_rows_get_the_blocks_of_their_next_tokens() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        table = table_of(np.random.default_rng(0))
        rows = some_rows(rng)
        table.num_computed[:], table.num_draft_slots[:] = (rng.integers(0, 88, ROWS), rng.integers(0, 1 + K, ROWS))
        table.num_blocks[:] = table.num_computed // 18
        size, ahead, cells = 18, int(rng.integers(0, 3)), []
        held = table.num_blocks.copy()
        for row in rows.tolist():
            stored = min(table.num_computed[row] + table.num_draft_slots[row] + 1 + ahead, LONGEST)
            missing = max(0, -(-stored // size) - table.num_blocks[row])
            cells += [row * 8 + table.num_blocks[row] + i for i in range(missing)]
            held[row] += missing
        scheduler = scheduler_of(table, lookahead_tokens=ahead)
        scheduler.pool = BlockPool(99)
        scheduler.batch = decodes(rows, table.num_draft_slots[rows] + np.int32(1))
        assert scheduler.schedule() is scheduler.batch
        given = table.block_table.reshape(-1)[cells].tolist()
        assert 0 not in given
        assert len(set(given)) == len(given) == np.count_nonzero(table.block_table), "one new block each, and no other"
        assert table.num_blocks.tolist() == held.tolist()


@pytest.mark.parametrize("least", [False, True])
def test_drafts_are_of_use_up_to_the_last_token_but_one(least: bool) -> None:
    """And no more than a drafter can place."""
    rng, table = np.random.default_rng(4), table_of(np.random.default_rng(0))
    seen = set()
    for _ in range(40):
        table.limit[:], longest = rng.integers(5, 40, ROWS), int(rng.integers(10, 40))
        rows = some_rows(rng, 0)
        found = table.num_useful_drafts(rows, longest, K, at_least_one=least)
        assert found.dtype == np.int32
        for row, count in zip(rows.tolist(), found.tolist(), strict=True):
            known = table.num_tokens[row] - (table.num_uncertain[row] if least else 0)
            assert count == max(0, min(K, table.limit[row] - 1 - known, longest - known))
        seen |= set(found.tolist())
    assert {0, 1, K} < seen
