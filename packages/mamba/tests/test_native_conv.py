"""C forms of convolutions and gated norms: equal to the torch form, with bits that do not depend on the batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bateleur.mamba import ops
from bateleur.metadata import native as compiler

pytestmark = pytest.mark.skipif(compiler.unavailable_reason() is not None, reason=str(compiler.unavailable_reason()))
I32, NAN = torch.int32, float("nan")
FLOATS = (torch.float32, torch.bfloat16)
SLOTS, LIVE, SPARE = 13, 5, 2


class Case:
    """Three prefill rows that start from slot 2, from zeros, and from slot 3."""

    def __init__(self, dtype: torch.dtype, channels: int, taps: int, bias: bool, lens: list[int]) -> None:
        make = torch.Generator().manual_seed(channels + taps)

        def rand(*of: int) -> Tensor:
            return torch.randn(*of, generator=make).to(dtype)

        self.dtype, self.lens, self.keep = dtype, lens, taps - 1
        self.x = rand(sum(lens) + 2, channels + 3)[:, 1 : 1 + channels]  # a view, two tokens of nobody
        self.weight, self.bias = rand(channels, taps), rand(channels) if bias else None
        self.windows = rand(SLOTS, self.keep + SPARE, channels)
        self.windows[0] = NAN
        self.read = torch.tensor([2, 0, 3])
        self.starts = torch.tensor([0, *lens]).cumsum(0).to(I32)

    def prompts(self, chunks: list[list[int]], write: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, windows and request conv windows; `chunks`: lengths of those of each row."""
        windows, request_conv = (
            self.windows.clone(),
            torch.full((LIVE, *self.windows.shape[1:]), NAN, dtype=self.dtype),
        )
        bounds = torch.tensor([0, *(each for row in chunks for each in row)]).cumsum(0).to(I32)
        rows = torch.tensor([i for i, row in enumerate(chunks) for _ in row], dtype=I32)
        y = ops.causal_conv1d_varlen(
            self.x, self.weight, self.bias, windows, request_conv, self.starts, self.read, bounds, rows,
            torch.tensor(write), torch.tensor([4, 0, 1]), "silu",
        )  # fmt: skip
        return y, windows, request_conv

    def one_by_one(self, row: int) -> tuple[Tensor, list[Tensor]]:
        """Outputs of single-token updates, and the window after each."""
        windows, one = self.windows[[0, int(self.read[row])]].nan_to_num(0), torch.ones(1, dtype=torch.int64)
        windows[1] *= int(self.read[row] != 0)
        ys, kept = [], [windows[1, : self.keep].clone()]
        for t in range(int(self.starts[row]), int(self.starts[row + 1])):
            token = self.x[t : t + 1], self.weight, self.bias, windows, torch.tensor([0, 1], dtype=I32)
            ys.append(ops.causal_conv1d_update(*token, 1, one, one * 0, one, "silu"))
            kept.append(windows[1, : self.keep].clone())
        return torch.cat([self.x[:0], *ys]), kept


@given(
    dtype=st.sampled_from(FLOATS),
    channels=st.sampled_from([1, 6, 16, 67, 130]),
    taps=st.integers(2, 8),
    bias=st.booleans(),
    lens=st.lists(st.sampled_from([0, 1, 2, 7, 16, 33]), min_size=3, max_size=3).filter(any),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_prompts_cut_anywhere_are_single_tokens(
    dtype: torch.dtype, channels: int, taps: int, bias: bool, lens: list[int], data: Any
) -> None:
    """Outputs and windows are equal to the bit, and other memory is unchanged."""
    case = Case(dtype, channels, taps, bias, lens)
    chunks, write, want = [], [], case.windows.clone()
    singles = [case.one_by_one(row) for row in range(3)]
    for row, length in enumerate(lens):
        cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=2))) if length > 1 else []
        ends = [*cuts, length] if length else []
        chunks.append([end - begin for begin, end in pairwise([0, *ends])])
        for i, end in enumerate(ends):
            slot = data.draw(st.sampled_from([0, 4 + 3 * row + i]))
            write.append(slot)
            if slot:
                want[slot, : case.keep] = singles[row][1][end]
    y, windows, request_conv = case.prompts(chunks, write)
    assert torch.equal(y[: sum(lens)], torch.cat([each[0] for each in singles]))
    assert not y[sum(lens) :].any(), "padding"
    assert torch.equal(windows[1:], want[1:])
    for row, slot in ((0, 4), (2, 1)):
        if lens[row]:
            assert torch.equal(request_conv[slot, : case.keep], singles[row][1][-1])
            request_conv[slot, : case.keep] = NAN
    assert request_conv.isnan().all(), "rows of nobody"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_prompts_are_as_torch_has_them(dtype: torch.dtype, bias: bool, monkeypatch: Any) -> None:
    case = Case(dtype, 21, 4, bias, [5, 1, 40])
    chunks, write = [[5], [1], [3, 37]], [4, 5, 6, 3]
    y, windows, request_conv = case.prompts(chunks, write)
    monkeypatch.setattr(compiler, "unavailable_reason", lambda: "none is wanted")
    plain_y, plain_windows, plain_live = case.prompts(chunks, write)
    places = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, plain_y, **places)
    assert torch.equal(windows[1:], plain_windows[1:])
    assert torch.equal(request_conv[[1, 4], :3], plain_live[[1, 4], :3])


def test_a_window_that_another_row_reads_is_read_before_it_is_written() -> None:
    """The C form rejects prefill rows that share a slot; the torch form is used."""
    case = Case(torch.float32, 21, 4, True, [5, 0, 6])
    y, windows, _ = case.prompts([[5], [], [6]], [3, 2])
    apart, want, _ = case.prompts([[5], [], [6]], [5, 6])
    torch.testing.assert_close(y, apart)
    torch.testing.assert_close(windows[[3, 2], :3], want[[5, 6], :3])


@pytest.mark.parametrize(("read", "write"), [(SLOTS, 4), (2, SLOTS), (-1, 4), (2, -1)])
def test_windows_outside_the_cache_are_refused(read: int, write: int) -> None:
    case = Case(torch.float32, 21, 4, True, [5, 0, 6])
    case.read[0] = read
    with pytest.raises(IndexError, match=r"must be in \[0, 12\]$"):
        case.prompts([[5], [], [6]], [write, 6])


def test_chunks_of_other_tokens_are_refused() -> None:
    case = Case(torch.float32, 21, 4, True, [5, 0, 6])
    with pytest.raises(IndexError, match=r"^chunk_start_loc: chunk 1 has tokens outside of \[0, 12\]$"):
        case.prompts([[5], [], [9]], [4, 6])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(("groups", "size", "shared"), [(2, 24, False), (3, 16, True), (1, 67, False), (1, 1, False)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norms_are_as_torch_has_them(
    dtype: torch.dtype, norm_first: bool, groups: int, size: int, shared: bool, activation: str, monkeypatch: Any
) -> None:
    """A token alone has the same bits."""
    make = torch.Generator().manual_seed(size)
    x, z = torch.randn(2, 9, 2 * groups * size, generator=make).to(dtype).tensor_split(2, 2)[1]
    weight = torch.randn(size if shared else groups * size, generator=make).to(dtype)
    options = (weight, groups, 1e-5, norm_first, activation)
    y = ops.gated_rms_norm(x, z, *options)
    assert torch.equal(torch.cat([ops.gated_rms_norm(x[i : i + 1], z[i : i + 1], *options) for i in range(9)]), y)
    monkeypatch.setattr(compiler, "unavailable_reason", lambda: "none is wanted")
    plain = ops.gated_rms_norm(x, z, *options)
    places = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, plain, **places)
