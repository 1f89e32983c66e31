"""Where prompts are cut into chunks, and which pages are kept. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import CacheLayout, Mamba2, MambaCacheMode, MambaMetadataBuilder, PrefillChunks
from bateleur.mamba.prefill_chunks import PrefillChunker

NONE, ALIGN, ALL = MambaCacheMode


def cut(layout: CacheLayout, chunk: int, spans: list[tuple[int, int]], table: torch.Tensor) -> PrefillChunks:
    before, after = (np.array(tokens, np.int32) for tokens in zip(*spans, strict=True))
    starts = np.append(0, np.add.accumulate(after - before)).astype(np.int32)
    return PrefillChunker(layout, chunk).split(starts, before, table)


def of_layout(layout: CacheLayout, rows: int) -> torch.Tensor:
    """Row r owns slots 100 (r + 1) + column."""
    return (100 * torch.arange(1, rows + 1)[:, None] + torch.arange(layout.columns())).int()


@settings(max_examples=200, deadline=None)
@given(
    block=st.integers(1, 40),
    chunk=st.integers(1, 50),
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=1, max_size=4),
    boundaries=st.booleans(),
)
def test_m30_every_boundary_ends_a_chunk_of_any_size(block, chunk, spans, boundaries):
    # vllm #57266: a block smaller than a chunk. A loop over tokens says where chunks end, and what they keep.
    block = block if boundaries else 200
    layout = CacheLayout(ALL if boundaries else NONE, block, 0, 200)
    spans = [(n, n + q) for n, q in spans]
    starts, rows, slots, first = [0], [], [], [0]
    for row, (before, after) in enumerate(spans):
        for t in range(before + 1, after + 1):
            boundary = t % block == 0
            if boundary or t % block % chunk == 0 or t == after:
                starts.append(starts[0] + sum(b - a for a, b in spans[:row]) + t - before)
                rows.append(row)
                slots.append((100 * (row + 1) + (t - 1) // block) * (boundary or t == after))
        first.append(len(rows))
    got = cut(layout, chunk, spans, of_layout(layout, len(spans)))
    assert got.chunk_start_loc.tolist() == starts
    assert got.chunk_row.tolist() == rows
    assert got.chunk_write.tolist() == slots
    assert got.row_chunk_loc.tolist() == first
    assert got.max_chunks_per_row == max(np.diff(first))
    assert max(np.diff(starts)) <= PrefillChunker(layout, chunk).chunk_size == min(chunk, block)
    assert got.query_start_loc.tolist() == [0, *np.cumsum([b - a for a, b in spans])]
    assert got.chunk_write.dtype == torch.int64


@pytest.mark.parametrize("block", [256, 255, 250, 257, 1000, 97, 16])
def test_odd_blocks_cost_no_more_chunks_than_even_ones(block):
    """A scan allocates one state per chunk: 4.3 GB for 2,048 chunks of one token of Nemotron-3-Nano."""
    layout = CacheLayout(ALL, block, 0, 4096)
    found = cut(layout, 128, [(0, 2048)], of_layout(layout, 1))
    spec = Mamba2(64, 64, 128, 8)
    held = len(found.chunk_row) * spec.inner_size * spec.state_size * 4
    assert held <= (2048 / 128 + 2048 / block + 1) * 2**21


def test_m11_pages_inside_a_prompt_that_ends_anywhere():
    # vllm #45477, #47861, #51113, #43559, #53912: a part that ended inside a block.
    # Row 0 computes tokens 6 to 21 in chunks of 4, row 1 tokens 0 to 8; row 0 has no slot for its second boundary.
    layout = CacheLayout(ALL, 8, 2, 32)
    table = torch.tensor([[11, 0, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]], dtype=torch.int32)
    found = cut(layout, 4, [(6, 21), (0, 9)], table)
    assert found.chunk_start_loc.tolist() == [0, 2, 6, 10, 14, 15, 19, 23, 24]
    assert found.chunk_write.tolist() == [11, 0, 0, 0, 13, 0, 21, 22]


@pytest.mark.parametrize("size", [0, -4, 2.5])
def test_bad_chunks_are_refused(size):
    with pytest.raises(ValueError, match=f"chunk_size is {size}; it must be"):
        MambaMetadataBuilder(CacheLayout(ALL, 16, 0, 64), size, 4, "cpu")
