"""Blocks that running requests fill get the keys that each request's own chain has."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.requests.prefix_keys import KEY_BYTES, PrefixKeys, block_keys
from bateleur.runner.requests.row_keys import RowKeys

ROWS = 5


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 28, 29, 60, 61]), st.booleans(), st.booleans())
def test_rows_fill_blocks_under_the_names_that_each_request_gives_them(
    data: st.DataObject, size: int, lookahead: bool, stored: bool
) -> None:
    """Rows change hands, wait, and fill many blocks in a step, as prompts do."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    length = 30 * size + 1
    ids = rng.integers(-(1 << 31), 1 << 31, (ROWS, length), dtype=np.int32)
    table = rng.integers(1, 999, (ROWS, 30), dtype=np.int32) if stored else None
    keys, of = (
        RowKeys(ids, table, size, lookahead=lookahead),
        PrefixKeys.blocks_with_lookahead if lookahead else PrefixKeys.blocks,
    )
    settled = np.zeros(ROWS, np.int32)
    for _ in range(data.draw(st.integers(1, 6))):
        for row in data.draw(st.sets(st.integers(0, ROWS - 1))):
            ids[row] = rng.integers(-(1 << 31), 1 << 31, length, dtype=np.int32)
            hit = data.draw(st.integers(0, 29))
            chain = PrefixKeys(size)
            chain.upto(ids[row], data.draw(st.integers(hit, 30)))  # may know more than was found
            keys.begin(row, chain, hit * size)
            settled[row] = hit * size
        rows = rng.permutation(ROWS)[: data.draw(st.integers(0, ROWS))]
        before, after = (settled[rows], np.minimum(settled[rows] + rng.integers(0, 20 * size, len(rows)), length - 1))
        blocks, names = keys.advance(rows, after.astype(np.int32))
        settled[rows] = after
        spans = [(int(first) // size, int(end) // size) for first, end in zip(before, after, strict=True)]
        chains = [PrefixKeys(size) for _ in rows]
        assert names == [
            name for row, chain, span in zip(rows, chains, spans, strict=True) for name in of(chain, ids[row], *span)
        ]
        assert blocks == [
            0 if table is None else table[row, block]
            for row, span in zip(rows, spans, strict=True)
            for block in range(*span)
        ]
        for i, (row, chain, span) in enumerate(zip(rows, chains, spans, strict=True)):
            for block in range(*span):
                assert keys.of(i, (block + 1) * size) == chain.of(ids[row], (block + 1) * size)


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_row_that_is_no_longer_than_its_tokens_is_named_and_a_longer_one_is_no_row(lookahead: bool) -> None:
    ids = np.arange(8 + lookahead, dtype=np.int32)[None]
    keys = RowKeys(ids, None, 4, lookahead=lookahead)
    with pytest.raises(AssertionError, match="row 0 has tokens that are not in the table"):
        keys.advance(np.zeros(1, np.int64), np.array([12], np.int32))
    blocks, names = keys.advance(np.zeros(1, np.int64), np.array([8], np.int32))
    assert (len(blocks), len(set(names))) == (2, 2)


def test_a_name_is_the_digest_of_the_one_before_and_the_tokens() -> None:
    ids = np.arange(40, dtype=np.int32)
    keys = PrefixKeys(16)
    key = blake2b(ids[:16].tobytes(), digest_size=KEY_BYTES).digest()
    assert keys.of(ids, 16) == key
    key = blake2b(key + ids[16:32].tobytes(), digest_size=KEY_BYTES).digest()
    assert keys.of(ids, 32) == key
    assert block_keys(ids, 1, 2, 16, keys.of(ids, 16)) == [key]
    with pytest.raises(AssertionError, match="blocks are full"):
        keys.of(ids, 48)
