"""C form of the prefill scan: the bits of single-token updates, for all chunkings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.mamba import ops
from bateleur.mamba.ops import native
from bateleur.metadata import native as compiler

compiles = pytest.mark.skipif(compiler.unavailable_reason() is not None, reason=str(compiler.unavailable_reason()))
I32 = torch.int32


def layer(
    heads: int, channels: int, size: int, groups: int, tokens: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(heads)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    wide = rand(tokens, 2 * heads * channels).to(dtype)  # x is a part of what a projection returns
    by_group = {name: rand(tokens, groups, size).to(dtype) for name in "BC"}
    by_head = {"A": -rand(heads).exp(), "D": rand(heads), "dt_bias": rand(heads)}
    x = wide[:, : heads * channels].view(tokens, heads, channels)
    return {"x": x, "dt": rand(tokens, heads).to(dtype), **by_group, **by_head}


def scanned(
    inputs: dict[str, Tensor], state: Tensor, rows: list[list[int]], read: list[int], write: list[int]
) -> Tensor:
    """rows: lengths of the chunks of each row."""
    lengths = [length for row in rows for length in row]
    counts, chunks = torch.tensor([0, *map(sum, rows)]), torch.tensor([0, *lengths])
    return ops.ssd_scan_varlen(
        **inputs,
        ssm_state=state,
        query_start_loc=counts.cumsum(0).to(I32),
        chunk_start_loc=chunks.cumsum(0).to(I32),
        chunk_row=torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=I32),
        row_chunk_loc=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).to(I32),
        max_chunks_per_row=max(map(len, rows)),
        chunk_size=max(lengths),
        read=torch.tensor(read),
        chunk_write=torch.tensor(write),
        dt_min=0.01,
        dt_max=2.0,
    )


SHAPES = [(4, 16, 32, 2), (2, 5, 7, 1), (3, 20, 40, 3)]


@compiles
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_updates_of_single_tokens(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: Any
) -> None:
    inputs = layer(*shape, tokens=23, dtype=dtype)
    states = torch.randn(9, *shape[:3])
    states[0] = 0
    rows, read, write = [[4, 6], [9], [3]], [1, 0, 2], [3, 4, 5, 6]
    one, cut, plain = states.clone(), states.clone(), states.clone()
    y = scanned(inputs, one, rows, read, write)
    assert not y[22].any(), "padding"
    again = scanned(inputs, cut, [[1, 3, 5, 1], [2, 7], [3]], read, [0, 3, 0, 4, 0, 5, 6])
    assert torch.equal(y, again)
    assert torch.equal(one, cut)
    for first, count, source, target in ((0, 4, 1, 3), (0, 10, 1, 4), (10, 9, 0, 5), (19, 3, 2, 6)):
        state = torch.stack([states[0], states[source]])
        start = torch.tensor([0, count], dtype=I32)
        part = {name: each[first : first + count] if name in "xdtBC" else each for name, each in inputs.items()}
        slots = torch.ones(1, count, dtype=torch.int64)
        took = ops.selective_state_update(
            state, *(part[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias")),
            start, count, torch.tensor([1]), slots, 0.01, 2.0,
        )  # fmt: skip
        assert torch.equal(took, y[first : first + count])
        assert torch.equal(state[1], one[target])
    assert torch.equal(one[[1, 2, 7, 8]], states[[1, 2, 7, 8]])
    monkeypatch.setattr(compiler, "unavailable_reason", lambda: "none is wanted")
    near = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(scanned(inputs, plain, rows, read, write), y, rtol=near, atol=near)
    torch.testing.assert_close(plain, one, rtol=1e-4, atol=1e-4)


@compiles
def test_slots_outside_the_cache_are_refused() -> None:
    inputs, states = layer(2, 4, 8, 1, tokens=5), torch.zeros(4, 2, 4, 8)
    for read, write in ((4, 1), (1, 4), (-1, 1)):
        with pytest.raises(IndexError, match=r"must be in \[0, 3\]$"):
            scanned(inputs, states, [[5]], [read], [write])
    assert not states.any()


@compiles
@pytest.mark.parametrize(("read", "write", "count"), [(4, 1, 2), (1, 4, 2), (-1, 1, 2), (1, -1, 2), (1, 1, 6)])
def test_updates_outside_the_cache_are_refused(read: int, write: int, count: int) -> None:
    """Also with more tokens than the batch has."""
    inputs, states = layer(2, 4, 8, 1, tokens=5), torch.zeros(4, 2, 4, 8)
    numbers = [inputs[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias")]
    starts, windows = torch.tensor([0, count], dtype=I32), torch.zeros(4, 9, 6)
    reads, writes, text = (torch.tensor([read]), torch.full((1, 6), write), "^read, write, query_start_loc: row 0 has")
    with pytest.raises(IndexError, match=text):
        ops.selective_state_update(states, *numbers, starts, 6, reads, writes, 0.0, 1.0)
    with pytest.raises(IndexError, match=text):
        ops.causal_conv1d_update(
            torch.ones(5, 6), torch.ones(6, 4), None, windows, starts, 6, reads, torch.tensor([0]), writes[:, 0],
            "silu",
        )  # fmt: skip
    assert not states.any()
    assert not windows.any()


@compiles
def test_a_slot_that_another_row_reads_is_read_before_it_is_written() -> None:
    """C computes rows in any order, so the torch form, which reads all slots first, is used."""
    read, write, rows = (torch.tensor([1, 2, 0]), torch.tensor([3, 0, 2, 1]), torch.tensor([0, 0, 1, 2], dtype=I32))
    assert not native.chunks_are_independent(4, read, write, rows)
    assert native.chunks_are_independent(4, read, torch.tensor([1, 0, 2, 3]), rows), "each writes what it reads itself"
    assert not native.chunks_are_independent(4, torch.tensor([1, 1, 0]), torch.tensor([0, 1, 0, 0]), rows)
    inputs, states = layer(2, 4, 8, 1, tokens=6), torch.randn(4, 2, 4, 8)
    states[0] = 0
    apart, together = states.clone(), states.clone()
    y = scanned(inputs, together, [[3], [3]], [1, 2], [2, 3])
    want = scanned(inputs, apart, [[3], [3]], [1, 2], [0, 3])
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[3], apart[3], rtol=1e-4, atol=1e-4)
