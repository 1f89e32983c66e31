"""What running requests fill is called what each calls its own, in C and by hashlib."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.metadata.native import missing
from bateleur.runner.requests.prefix_keys import KEY_BYTES, PrefixKeys, name_blocks, name_blocks_plain
from bateleur.runner.requests.row_keys import RowKeys

ROWS = 5
FORMS = [False, *([True] if missing() is None else [])]
"""Whether in C."""


def row_keys(native: bool, *args: object, ahead: bool) -> RowKeys:
    keys = RowKeys(*args, ahead=ahead)  # type: ignore[arg-type]
    if not native:
        keys._kernel = None
    return keys


# Tokens behind a name: up to 128 bytes, just these, and more.
@pytest.mark.parametrize("native", FORMS)
@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 28, 29, 60, 61]), st.booleans(), st.booleans())
def test_rows_fill_blocks_under_the_names_that_each_request_gives_them(
    native: bool, data: st.DataObject, size: int, ahead: bool, stored: bool
) -> None:
    """Rows change hands, wait, and fill many blocks in a step, as prompts do."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    length = 30 * size + 1
    ids = rng.integers(-(1 << 31), 1 << 31, (ROWS, length), dtype=np.int32)
    table = rng.integers(1, 999, (ROWS, 30), dtype=np.int32) if stored else None
    keys, of = (
        row_keys(native, ids, table, size, ahead=ahead),
        PrefixKeys.blocks_ahead if ahead else PrefixKeys.blocks,
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
        before, after = (
            settled[rows],
            np.minimum(settled[rows] + rng.integers(0, 20 * size, len(rows)), length - 1),
        )
        blocks, names = keys.advance(rows, after.astype(np.int32))
        settled[rows] = after
        spans = [(int(first) // size, int(end) // size) for first, end in zip(before, after, strict=True)]
        chains = [PrefixKeys(size) for _ in rows]
        assert names == [
            name
            for row, chain, span in zip(rows, chains, spans, strict=True)
            for name in of(chain, ids[row], *span)
        ]
        assert blocks == [
            0 if table is None else table[row, block]
            for row, span in zip(rows, spans, strict=True)
            for block in range(*span)
        ]
        for i, (row, chain, span) in enumerate(zip(rows, chains, spans, strict=True)):
            for block in range(*span):
                assert keys.of(i, (block + 1) * size) == chain.of(ids[row], (block + 1) * size)


@pytest.mark.parametrize("native", FORMS)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_is_no_longer_than_its_tokens_is_named_and_a_longer_one_is_no_row(
    native: bool, ahead: bool
) -> None:
    ids = np.arange(8 + ahead, dtype=np.int32)[None]
    keys = row_keys(native, ids, None, 4, ahead=ahead)
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
    assert name_blocks(ids, 1, 2, 16, keys.of(ids, 16)) == [key]
    with pytest.raises(AssertionError, match="blocks are full"):
        keys.of(ids, 48)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), st.integers(0, 4), st.integers(1, 5), st.integers(0, 99))
def test_blocks_are_named_in_c_as_by_hashlib(size: int, first: int, count: int, seed: int) -> None:
    """Without a compiler this is one form, compared with itself."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-(1 << 31), 1 << 31, (first + count) * size, dtype=np.int32)
    before = rng.bytes(KEY_BYTES) if first else b""
    args = (ids, first, first + count, size, before)
    assert name_blocks(*args) == name_blocks_plain(*args)
