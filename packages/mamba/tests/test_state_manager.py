"""`MambaStateManager` over the smallest possible pool. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import CacheLayout, MambaCacheMode, MambaStateManager, PrefixRetention, StatePolicy
from oracle.pool import Pool

RULES = ["none", "all", "last+prompt_end", "doubling", "every=16"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_m38_rows_hold_no_more_than_the_layout_says(data):
    """One allocation too many fails, because the pool is as small as possible."""
    drafts, rows = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 3))
    policy, mode = (data.draw(st.sampled_from(StatePolicy)), data.draw(st.sampled_from(list(MambaCacheMode)[1:])))
    layout = CacheLayout(mode, 8, drafts, 96, policy)
    most, retention = layout.slots_per_request(), PrefixRetention.parse(data.draw(st.sampled_from(RULES)), 8)
    pages = MambaStateManager(Pool(1 + rows * most), rows, layout, retention)
    computed = np.zeros(rows, np.int32)
    prompt = np.array([data.draw(st.integers(1, 60)) for _ in range(rows)], np.int32)
    for _ in range(data.draw(st.integers(1, 25))):
        going = np.flatnonzero(computed + 1 + drafts < 96)
        decodes = computed[going] >= prompt[going]
        order = np.concatenate((going[decodes], going[~decodes]))
        n, size = computed[order], int(decodes.sum())
        ends = [1 + drafts] * size + (prompt - computed)[order[size:]].tolist()
        lens = np.array([data.draw(st.integers(1, int(end))) for end in ends], np.int32)
        kept = lens.copy()
        kept[:size] = [data.draw(st.integers(1, int(length))) for length in lens[:size]]
        pages.allocate_blocks(order, n, lens, size, prompt[order])
        pages.commit(order, n, n + kept, prompt[order], lambda i, t, of=order: b"%d.%d" % (of[i], t))
        computed[order] += kept
        assert np.count_nonzero(pages.table, axis=1).max() <= most
    for row in range(rows):
        pages.release(row)
    assert pages.pool.num_free == pages.pool.capacity


def test_a_pool_too_small_is_refused():
    layout = CacheLayout(MambaCacheMode.ALL, 8, 2, 96)
    with pytest.raises(ValueError, match="pool has 11 pages; 3 rows need 12"):
        MambaStateManager(Pool(12), 3, layout, PrefixRetention.of(layout))


@pytest.mark.parametrize("policy", list(StatePolicy))
def test_rows_in_flight_get_pages_for_whatever_they_may_write(policy):
    """`computed` is an upper bound, with `uncertain_R` as its error."""
    rng, layout = np.random.default_rng(0), CacheLayout(MambaCacheMode.ALL, 8, 3, 96, policy)
    pages = MambaStateManager(Pool(99), 6, layout, PrefixRetention.of(layout))
    width = pages.table.shape[1]
    for _ in range(60):
        rows = rng.permutation(6)[: rng.integers(1, 7)]
        computed, lens = (rng.integers(*span, len(rows), dtype=np.int32) for span in ((9, 90), (1, 5)))
        slack = rng.integers(0, 4, len(rows), dtype=np.int32)
        pages._allocated_tokens[:] = 0  # so that all rows are examined
        pages.table[:] = rng.integers(0, 2, pages.table.shape)
        written = computed if policy is StatePolicy.FOLD else computed + lens - 1
        expected = [
            row * width + column
            for row, most, few, length in zip(rows, written, slack, lens, strict=True)
            for column in range(
                (most - few) // 8, min(most // 8 + min(length, 1 + layout.num_speculative_blocks), width)
            )
            if not pages.table[row, column]
        ]
        assert pages._missing_cells(rows, computed, lens, slack).tolist() == expected
        assert not len(pages._missing_cells(rows, computed, lens, slack)), "allocated by the first call"


@pytest.mark.parametrize("spare", range(12))
@pytest.mark.parametrize("policy", list(StatePolicy))
def test_boundaries_in_prompts_leave_the_next_step_its_pages(policy, spare):
    """With async scheduling, the second step is planned before the first one is committed."""
    layout = CacheLayout(MambaCacheMode.ALL, 8, 3, 96, policy, steps_ahead=1)
    pages = MambaStateManager(Pool(1 + 4 * layout.slots_per_request() + spare), 4, layout, PrefixRetention.of(layout))
    rows, prompt = np.arange(4), np.array([32, 32, 32, 90], np.int32)
    first, second = (np.array(lens, np.int32) for lens in ([32, 32, 32, 40], [4, 4, 4, 50]))
    pages.allocate_blocks(rows, np.zeros(4, np.int32), first, 0, prompt)
    pages.allocate_blocks(rows, first, second, 3, prompt, np.zeros(4, np.int32))
    assert pages.table[:3, 4 : 5 + layout.num_speculative_blocks].all()
    assert pages.table[3, 11]
    for row in range(4):
        pages.release(row)
    assert pages.pool.num_free == pages.pool.capacity
