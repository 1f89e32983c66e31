"""Where prompts are cut. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import CacheLayout, MambaCacheMode, StatePolicy, cut_chunk, plan_chunks

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


def test_pages_inside_a_prompt():
    # Row 0 computes tokens 6 to 21 in chunks of 4, row 1 tokens 0 to 8; row 0 has no slot for its second boundary.
    layout = CacheLayout(MambaCacheMode.ALL, 8, 2, 32)
    table = torch.tensor([[11, 12, 0, 14, 15, 16], [21, 22, 23, 24, 25, 26]], dtype=torch.int32)
    table[0, 1], table[0, 2] = 0, 13
    rows, ends = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]), torch.tensor([8, 12, 16, 20, 21, 4, 8, 9])
    last = torch.tensor([False] * 4 + [True] + [False] * 2 + [True])
    slots = plan_chunks(layout, table, rows.int(), ends.int(), last)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [11, 0, 0, 0, 13, 0, 21, 22]


def test_mode_none_keeps_the_last_page_alone():
    layout = CacheLayout(MambaCacheMode.NONE, 32, 2, 32)
    table = torch.tensor([[7, 8, 9]], dtype=torch.int32)
    last = torch.tensor([False, False, True])
    slots = plan_chunks(layout, table, torch.tensor([0, 0, 0]), torch.tensor([8, 16, 20]), last)
    assert slots.tolist() == [0, 0, 7]
