"""Where prompts are cut. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import CacheLayout, MambaCacheMode, StatePolicy, cut_chunk

ALIGN = CacheLayout(MambaCacheMode.ALIGN, 8, 2, 200)


@settings(max_examples=300, deadline=None)
@given(
    prompt_len=st.integers(1, 200),
    hit=st.integers(0, 20),
    block_size=st.sampled_from([4, 8, 16]),
    wants=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    drop_last_block=st.booleans(),
)
def test_m11_interior_ends_are_boundaries(prompt_len, hit, block_size, wants, drop_last_block):
    # vllm #45477, #47861, #51113, #43559, #53912: a chunk that ended inside a block, also one cut back for a drafter.
    layout = CacheLayout(MambaCacheMode.ALIGN, block_size, 2, 200)
    start = min(hit * block_size, layout.max_hit_tokens(prompt_len))
    last = layout.max_hit_tokens(prompt_len) - drop_last_block * block_size
    ends = []
    for want in [*wants, *[block_size] * 100]:
        size = cut_chunk(layout, start, want, prompt_len, drop_last_block=drop_last_block)
        assert 0 <= size <= want
        assert size > 0 or want < block_size
        start += size
        ends.append(start)
        if start == prompt_len:
            break
    assert ends[-1] == prompt_len
    assert all(end % block_size == 0 for end in ends[:-1])
    assert last <= min(hit * block_size, layout.max_hit_tokens(prompt_len)) or last in ends


def test_m13_a_prompt_of_whole_blocks_is_cut_before_its_last():
    # vllm #50409, #50235: the state at the prompt's very end cannot be hit by the same prompt; that of a block before
    # can.
    assert cut_chunk(ALIGN, 0, 200, 24) == 16
    assert cut_chunk(ALIGN, 16, 200, 24) == 8
    assert cut_chunk(ALIGN, 0, 200, 25) == 24
    assert cut_chunk(ALIGN, 0, 200, 25, drop_last_block=True) == 16
    assert cut_chunk(ALIGN, 0, 200, 7) == 7


@pytest.mark.parametrize(
    "layout",
    [
        CacheLayout(MambaCacheMode.NONE, 200, 2, 200),
        CacheLayout(MambaCacheMode.ALL, 8, 2, 200),
        CacheLayout(MambaCacheMode.ALIGN, 8, 2, 200, StatePolicy.FOLD),
    ],
)
def test_other_layouts_may_be_cut_anywhere(layout):
    assert cut_chunk(layout, 3, 10, 100) == 10
    assert cut_chunk(layout, 95, 10, 100) == 5


def test_bad_cuts_are_refused():
    with pytest.raises(ValueError, match=r"start is 9; it must be in \[0, prompt_len = 9\)"):
        cut_chunk(ALIGN, 9, 1, 9)
    with pytest.raises(ValueError, match="want is -1"):
        cut_chunk(ALIGN, 0, -1, 9)
