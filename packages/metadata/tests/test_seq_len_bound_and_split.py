"""Host length bounds, and the split of rows into decodes and prefills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bateleur.metadata import (
    InexactBound,
    RowSplit,
    SeqLenBound,
    decode_like,
    split_decodes_and_prefills,
    uniform_query_len,
)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def flags(*values: int) -> Any:
    return np.array(values, np.bool_)


def test_bound_maximum_is_always_allowed_and_rows_only_where_exact() -> None:
    bound = SeqLenBound(i32(7, 9, 3, 0), flags(1, 0, 1, 1))
    assert bound.max() == 9
    assert len(bound) == 4
    assert bound.per_row(0) == 7
    assert bound.per_row(slice(2, None)).tolist() == [3, 0]
    for rows in (1, slice(0, 2), slice(None)):
        with pytest.raises(InexactBound, match="row 1 has only an upper bound of 9"):
            bound.per_row(rows)
    assert SeqLenBound(i32(), flags()).max() == 0


def test_bound_advances_to_the_cap_and_never_in_padded_rows() -> None:
    bound = SeqLenBound(i32(7, 9, 0), flags(1, 0, 1))
    later = bound.advanced(3, 11)
    assert later.upper.tolist() == [10, 11, 0]
    assert later.upper.dtype == np.int32
    assert later.exact.tolist() == [True, False, True]
    assert bound.upper.tolist() == [7, 9, 0]
    assert bound.advanced(5, 11).exact.tolist() == [False, False, True]
    assert bound.advanced(2**31 - 1, 11).upper.tolist() == [11, 11, 0]
    with pytest.raises(ValueError, match="k: -1"):
        bound.advanced(-1, 11)


def test_T_G2_a_short_or_mismatched_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exact: has shape \(1,\), but upper has \(2,\)"):
        SeqLenBound(i32(1, 2), flags(1))


def test_T_F1_state_decides_not_shape() -> None:
    # a decode; a one-token prompt without state; the last token of a prompt over context; a verifying row; a chunk
    query_lens, computed = i32(1, 1, 1, 3, 3), i32(9, 0, 5, 9, 5)
    prefilling = flags(0, 1, 1, 0, 1)
    assert decode_like(query_lens, prefilling, computed).tolist() == [True, False, True, True, False]


def test_T_F1_uniform_query_len_needs_the_state_of_every_row() -> None:
    past = flags(0, 0, 0)
    assert uniform_query_len(i32(4, 4, 4), past, i32(8, 9, 7)) == 4
    assert uniform_query_len(i32(4, 4, 0), past, i32(8, 9, 0)) == 4
    assert uniform_query_len(i32(4, 3, 4), past, i32(8, 9, 7)) is None
    assert uniform_query_len(i32(4, 4, 4), flags(0, 0, 1), i32(8, 9, 7)) is None
    assert uniform_query_len(i32(1, 1, 1), flags(0, 1, 1), i32(8, 9, 7)) == 1
    assert uniform_query_len(i32(1, 1, 1), flags(0, 1, 1), i32(8, 9, 0)) is None
    assert uniform_query_len(i32(0, 0), flags(0, 0), i32(0, 0)) is None


@pytest.mark.parametrize(
    ("query_lens", "prefilling", "computed", "options", "expected"),
    [
        ((1, 1, 5), (0, 0, 1), (9, 9, 0), {}, (2, 1, 2, 5)),
        ((1, 1, 5), (0, 1, 1), (9, 0, 0), {}, (1, 2, 1, 6)),
        ((1, 1, 5), (0, 1, 1), (9, 3, 0), {}, (2, 1, 2, 5)),
        ((1, 3, 3), (0, 0, 1), (9, 9, 9), {"threshold": 3}, (2, 1, 4, 3)),
        ((1, 3, 5), (0, 0, 0), (9, 9, 9), {"threshold": 3}, (2, 1, 4, 5)),
        ((3, 3, 1), (0, 0, 0), (9, 9, 9), {"threshold": 3, "uniform": True}, (2, 1, 6, 1)),
        ((3, 3, 0, 0), (0, 0, 0, 0), (9, 9, 0, 0), {"threshold": 3, "uniform": True}, (4, 0, 6, 0)),
        ((3, 3, 0, 0), (0, 0, 0, 0), (9, 9, 0, 0), {"threshold": 3}, (2, 0, 6, 0)),
        ((1, 4, 0), (0, 1, 0), (9, 0, 0), {"uniform": True}, (1, 1, 1, 4)),
        ((2, 1), (1, 0), (0, 9), {}, (0, 2, 0, 3)),
        ((), (), (), {"uniform": True}, (0, 0, 0, 0)),
    ],
)
def test_split(query_lens: Any, prefilling: Any, computed: Any, options: Any, expected: Any) -> None:
    split = split_decodes_and_prefills(i32(*query_lens), flags(*prefilling), i32(*computed), **options)
    assert split == RowSplit(*expected)


def test_T_F3_split_is_pure_and_refuses_mismatched_state() -> None:
    query_lens, prefilling, computed = i32(1, 4), flags(0, 1), i32(9, 0)
    copies = query_lens.copy(), prefilling.copy(), computed.copy()
    split_decodes_and_prefills(query_lens, prefilling, computed, uniform=True)
    assert all(map(np.array_equal, copies, (query_lens, prefilling, computed)))
    with pytest.raises(ValueError, match=r"num_computed_tokens: has shape \(1,\), but query_lens has \(2,\)"):
        split_decodes_and_prefills(query_lens, prefilling, i32(1))
    with pytest.raises(ValueError, match="threshold: 0"):
        split_decodes_and_prefills(query_lens, prefilling, computed, threshold=0)
