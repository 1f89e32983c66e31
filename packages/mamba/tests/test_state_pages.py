"""Which pages rows hold, over a pool that has just what they need. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import CacheLayout, MambaCacheMode, Retention, StatePages, StatePolicy
from oracle.pool import Pool

RULES = ["none", "all", "last+prompt_end", "doubling", "every=16"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_m38_rows_hold_no_more_than_the_layout_says(data):
    """A page too many finds the pool empty. The steps are those of an engine: decodes follow the prompt's parts."""
    drafts, rows = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 3))
    policy, mode = (
        data.draw(st.sampled_from(StatePolicy)),
        data.draw(st.sampled_from(list(MambaCacheMode)[1:])),
    )
    layout = CacheLayout(mode, 8, drafts, 96, policy)
    most, retention = layout.slots_per_request(), Retention.parse(data.draw(st.sampled_from(RULES)), 8)
    pages = StatePages(Pool(1 + rows * most), rows, layout, retention)
    computed = np.zeros(rows, np.int32)
    prompt = np.array([data.draw(st.integers(1, 60)) for _ in range(rows)], np.int32)
    for _ in range(data.draw(st.integers(1, 25))):
        going = np.flatnonzero(computed + 1 + drafts < 96)
        decodes = computed[going] >= prompt[going]
        order = np.concatenate((going[decodes], going[~decodes]))
        n, size = computed[order], int(decodes.sum())
        ends = [1 + drafts] * size + (prompt - computed)[order[size:]].tolist()
        lens = np.array([data.draw(st.integers(1, int(end))) for end in ends], np.int32)
        pages.cover(order, n, lens, size, prompt[order])
        kept = lens.copy()
        kept[:size] = [data.draw(st.integers(1, int(length))) for length in lens[:size]]
        pages.commit(order, n, n + kept, prompt[order], lambda i, t, of=order: b"%d.%d" % (of[i], t))
        computed[order] += kept
        assert np.count_nonzero(pages.table, axis=1).max() <= most
    for row in range(rows):
        pages.release(row)
    assert pages.pool.num_free == pages.pool.capacity


def test_a_pool_too_small_is_refused():
    layout = CacheLayout(MambaCacheMode.ALL, 8, 2, 96)
    with pytest.raises(ValueError, match="pool has 11 pages; 3 rows need 12"):
        StatePages(Pool(12), 3, layout, Retention.of(layout))
