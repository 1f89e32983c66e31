"""What a step did to rows of the request table, in C and in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.metadata.native import missing
from bateleur.runner.engine.output_processor import OutputProcessor
from bateleur.runner.requests.request_table import RequestTable

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no compiler: {missing()}")
ROWS, LONGEST, K, VOCAB = 7, 90, 4, 50


def outcome(rng: np.random.Generator, rows: np.ndarray, drafts: bool) -> np.ndarray:
    """(R, 2 + J + K) what `OutputProcessor.fetch` sends."""
    width = 1 + K if drafts else 1
    counts, bad = rng.integers(0 if drafts else 1, width + 1, len(rows)), rng.random(len(rows)) < 0.1
    tokens = np.where(np.arange(width) < counts[:, None], rng.integers(0, VOCAB, (len(rows), width)), -1)
    tested = rng.integers(-1, VOCAB, (len(rows), K if drafts else 0))
    return np.concatenate((counts[:, None], bad[:, None], tokens, tested), 1).astype(np.int64)


def table_of(rng: np.random.Generator) -> RequestTable:
    table = RequestTable(ROWS, LONGEST, 8)
    for array in (table.num_known, table.num_settled, table.num_computed, table.num_tokens, table.slack):
        array[:] = rng.integers(5, 20, ROWS)
    return table


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_is_settled_in_c_as_in_numpy(drafts: bool) -> None:
    tables = [table_of(np.random.default_rng(0)) for _ in range(2)]
    assert tables[0]._settle is not None
    tables[1]._settle = None
    rng = np.random.default_rng(1)
    for _ in range(8):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
        packed = outcome(rng, rows, drafts)
        tokens, counts = packed[:, 2 : 3 + K * drafts], packed[:, 0].copy()
        lens = np.full(len(rows), 1 + K * drafts, np.int32)
        found = [[each.copy() for each in table.settle(rows, lens, tokens, counts)] for table in tables]
        for native, plain in zip(*found, strict=True):
            assert native.tolist() == plain.tolist()
        for name in (
            "token_ids",
            "drafted",
            "num_known",
            "num_settled",
            "num_computed",
            "num_tokens",
            "slack",
        ):
            assert getattr(tables[0], name).tolist() == getattr(tables[1], name).tolist(), name
    with pytest.raises(AssertionError, match="row 1 keeps no more tokens than the step computed"):
        tables[0].settle(np.arange(2), np.ones(2, np.int32), np.ones((2, 2), np.int64), np.array([1, 2]))


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_are_read_in_c_as_in_numpy(drafts: bool) -> None:
    rng, tokenizer = np.random.default_rng(2), Any
    for _ in range(40):
        table = table_of(rng)
        table.watched_from[:] = rng.choice([0, 22, LONGEST], ROWS, p=[0.1, 0.3, 0.6])
        native, plain = (OutputProcessor(tokenizer, table, VOCAB) for _ in range(2))  # type: ignore[arg-type]
        native._stops[1][rng.integers(0, VOCAB, 2)] = True
        plain._stops, plain._kernel = native._stops, None
        assert native._kernel is not None
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
        args = (rows, outcome(rng, rows, drafts), 1 + K * drafts, None)
        for found, exact in zip(native._read(*args), plain._read(*args), strict=True):
            assert list(found) == list(exact)


def test_what_rows_lack_is_found_in_c_as_in_numpy() -> None:
    rng, names = np.random.default_rng(3), ("num_computed", "num_tokens", "slack", "num_places", "num_blocks")
    tables = [table_of(np.random.default_rng(0)) for _ in range(2)]
    assert tables[0]._cover is not None
    tables[1]._cover = tables[1]._advance = None
    for _ in range(60):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
        lens = rng.integers(1, 2 + K, len(rows), dtype=np.int32)
        numbers = rng.integers(0, 88, ROWS), rng.integers(0, 1 + K, ROWS)
        for table in tables:
            table.num_computed[:], table.num_places[:] = numbers
            table.num_blocks[:] = numbers[0] // 18
        size, ahead = int(rng.choice([0, 18])), int(rng.integers(0, 3))
        taken = (None, lens, tables[0].num_places[rows] + np.int32(1))[rng.integers(3)]
        native, plain = (table.lacking(rows, taken, size, ahead) for table in tables)
        assert native[:2] == plain[:2]
        assert [each.tolist() for each in native[2:]] == [each.tolist() for each in plain[2:]]
        num_decodes = int(rng.integers(0, len(rows) + 1))
        for table, lacks in zip(tables, (native, plain), strict=True):
            table.extend_blocks(lacks, list(range(1, 1 + len(lacks.cells))))
            table.advance(rows, lens, num_decodes)
        for name in names:
            assert getattr(tables[0], name).tolist() == getattr(tables[1], name).tolist(), name
        assert tables[0].block_table.tolist() == tables[1].block_table.tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(0, 3))
def test_rows_are_assigned_drafts_in_c_as_in_numpy(seed: int, near: int) -> None:
    """All of them, or none if one is `near` its end, whatever they are asked for."""
    rng = np.random.default_rng(seed)
    tables = [table_of(np.random.default_rng(seed)) for _ in range(2)]
    assert tables[0]._assign is not None
    tables[1]._assign = None
    rows = rng.permutation(ROWS)[: rng.integers(0, ROWS + 1)]
    drafts = rng.integers(0, 1 + K, len(rows), dtype=np.int32)
    for table in tables:
        table.limit[:] = table.num_tokens + K + 1
        if near and len(rows):
            table.limit[rows[near % len(rows)]] -= near
    done = [table.assign(rows, drafts, K) for table in tables]
    assert done == [not (near and len(rows))] * 2
    for name in ("num_drafts", "num_places"):
        assert getattr(tables[0], name).tolist() == getattr(tables[1], name).tolist(), name
    if done[0]:
        assert tables[0].num_drafts[rows].tolist() == tables[0].num_places[rows].tolist() == drafts.tolist()


@pytest.mark.parametrize("least", [False, True])
def test_how_many_drafts_are_of_use_is_found_in_c_as_in_numpy(least: bool) -> None:
    """None behind the last token that a request may have but one, and no more than a drafter can place."""
    rng = np.random.default_rng(4)
    tables = [table_of(np.random.default_rng(0)) for _ in range(2)]
    assert tables[0]._useful is not None
    tables[1]._useful, seen = None, set()
    for _ in range(40):
        ends, longest = rng.integers(5, 40, ROWS), int(rng.integers(10, 40))
        rows = rng.permutation(ROWS)[: rng.integers(0, ROWS + 1)]
        for table in tables:
            table.limit[:] = ends
        native, plain = (table.useful(rows, longest, K, least=least) for table in tables)
        assert native.dtype == plain.dtype == np.int32
        assert native.tolist() == plain.tolist()
        for row, found in zip(rows.tolist(), native.tolist(), strict=True):
            known = tables[0].num_tokens[row] - (tables[0].slack[row] - 1 if least else 0)
            assert found == max(0, min(K, ends[row] - 1 - known, longest - known))
        seen |= set(native.tolist())
    assert {0, 1, K} < seen
