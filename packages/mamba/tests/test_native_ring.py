"""C forms of replay and fold: the bits of single-token updates, wherever a ring starts and a fold ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.mamba import ops
from bateleur.mamba.ops.native import conv, mamba2, ring
from bateleur.metadata import native as compiler
from bateleur.metadata.dispatch import UNSUPPORTED

pytestmark = pytest.mark.skipif(compiler.unavailable_reason() is not None, reason=str(compiler.unavailable_reason()))
I32, NAN = torch.int32, float("nan")
FLOATS = (torch.float32, torch.bfloat16)
LIMITS = (0.01, 2.0)
SHAPES = [(8, 64, 64, 1), (4, 16, 128, 2), (2, 5, 7, 1), (3, 20, 40, 3), (1, 33, 100, 1), (2, 1, 1, 2)]
"""Heads, channels, entries of a state's row, groups."""


class Layer:
    """Parameters, and tokens as strided views of a projection."""

    def __init__(self, shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype = torch.float32) -> None:
        heads, channels, size, groups = self.shape = shape
        self.dtype = dtype
        make = torch.Generator().manual_seed(heads + size)

        def rand(*of: int) -> Tensor:
            return torch.randn(*of, generator=make)

        widths = [heads * channels, groups * size, groups * size]
        x, B, C = rand(tokens, sum(widths)).to(dtype).split(widths, 1)
        self.x, self.B, self.C = (
            x.view(tokens, heads, channels),
            B.view(tokens, groups, size),
            C.view(tokens, groups, size),
        )
        self.dt = rand(tokens, heads).to(dtype)
        self.A, self.D, self.bias = -rand(heads).exp(), rand(heads), rand(heads)

    def states(self, slots: int) -> Tensor:
        heads, channels, size, _ = self.shape
        states = torch.randn(slots, heads, channels, size, generator=torch.Generator().manual_seed(1))
        states[0] = NAN
        return states

    def rings(self, rows: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, channels, size, groups = self.shape
        shapes = (heads, channels), (heads,), (groups, size)
        x, dt, B = (torch.full((rows, capacity, *shape), NAN) for shape in shapes)
        return x.to(self.dtype), dt, B.to(self.dtype)

    def some(self, at: list[int]) -> tuple[Tensor, ...]:
        return (self.x[at], self.dt[at], self.A, self.B[at], self.C[at], self.D, self.bias)

    def one_by_one(self, state: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Outputs and states by single updates, (n, H, P) and (n, H, P, N)."""
        pool, ys, states = torch.stack([torch.full_like(state, NAN), state]), [], []
        for t in range(first, end):
            start, one = torch.tensor([0, 1], dtype=I32), torch.tensor([1])
            ys.append(ops.selective_state_update(pool, *self.some([t]), start, 1, one, one[:, None], *LIMITS))
            states.append(pool[1].clone())
        return torch.cat(ys), torch.stack(states)


def replay(layer: Layer, states: Tensor, rings: Any, lens: list[int], at: list[int], **rows: list[int]) -> Tensor:
    x, dt, A, B, C, D, bias = layer.some(at)
    starts = torch.tensor([0, *lens]).cumsum(0).to(I32)
    where = (torch.tensor(rows[name]) for name in ("slot", "ring_row", "ring_start", "ring_len"))
    return ops.replay_update(
        states, *rings, x, dt, A, B, C, D, bias, starts, max(lens), *where, *LIMITS
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("capacity", [6, 16, 64])
@pytest.mark.parametrize("dtype", FLOATS)
def test_replays_and_folds_are_updates_of_single_tokens(
    shape: tuple[int, int, int, int], capacity: int, dtype: torch.dtype
) -> None:
    """With rejected tokens, any ring start, zero states, and in-place folds."""
    layer = Layer(shape, 40, dtype)
    states, rings = layer.states(6), layer.rings(4, capacity)
    begin = {1: states[2].clone(), 3: torch.zeros_like(states[0])}
    want = {1: layer.one_by_one(begin[1], 0, 20), 3: layer.one_by_one(begin[3], 20, 40)}
    first, slot, base, done = {1: 0, 3: 20}, {1: 2, 3: 0}, {1: 5, 3: 0}, {1: 5, 3: 0}
    for count, kept in ((1, 1), (3, 2), (3, 1), (2, 2), (1, 1), (3, 3)):
        held = {row: done[row] - base[row] for row in first}
        at = [first[row] + done[row] - (5 if row == 1 else 0) + i for row in first for i in range(count)]
        y = replay(
            layer, states, rings, [count, count, 0], [*at, 39],
            slot=[slot[1], slot[3], 0], ring_row=[1, 3, 0], ring_start=[base[1], base[3], 0],
            ring_len=[held[1], held[3], 0],
        )  # fmt: skip
        for i, row in enumerate(first):
            begun = done[row] - (5 if row == 1 else 0)
            assert torch.equal(y[i * count : i * count + kept], want[row][0][begun : begun + kept])
            done[row] += kept
        assert not y[2 * count :].any(), "padding"
        if max(done[row] - base[row] for row in first) + 3 > capacity or count == 2:
            counts = torch.tensor([done[1] - base[1], 0, done[3] - base[3]])
            pages = torch.zeros(1, 6, 3, 2, dtype=dtype), torch.zeros(1, 4, 5, 2, dtype=dtype)
            layers = (each[None] for each in (states, *(page[0] for page in pages), *rings, layer.A))
            before = states.clone()
            ops.fold_ring(
                *layers, torch.tensor([1, 2, 3]), torch.tensor([base[1], 9, base[3]]), counts,
                torch.tensor([slot[1], 9, slot[3]]), torch.tensor([slot[1], 0, 5]), torch.tensor([0, 9, 0]),
            )  # fmt: skip
            slot[3], base[1], base[3] = 5, done[1], done[3]
            assert torch.equal(states[2], want[1][1][done[1] - 5 - 1])
            assert torch.equal(states[5], want[3][1][done[3] - 1])
            assert torch.equal(states[[1, 3, 4]], before[[1, 3, 4]])
    assert states[0].isnan().all()
    assert all(ring[[0, 2]].isnan().all() for ring in rings), "rows of nobody"


@pytest.mark.parametrize("dtype", FLOATS)
def test_several_tokens_of_an_update_are_single_ones(dtype: torch.dtype) -> None:
    """The state after each token is in its slot."""
    for shape in SHAPES:
        layer = Layer(shape, 12, dtype)
        states, starts = layer.states(9), torch.tensor([0, 5, 8, 8], dtype=I32)
        want = [layer.one_by_one(states[3], 0, 5), layer.one_by_one(torch.zeros_like(states[0]), 5, 8)]
        write = torch.tensor([[3, 4, 0, 5, 6], [7, 1, 8, 0, 0], [0, 0, 0, 0, 0]])
        y = ops.selective_state_update(
            states, *layer.some(list(range(9))), starts, 5, torch.tensor([3, 0, 0]), write, *LIMITS
        )
        assert torch.equal(y[:8], torch.cat([each[0] for each in want]))
        assert not y[8:].any()
        assert torch.equal(states[[3, 4, 5, 6]], want[0][1][[0, 1, 3, 4]])
        assert torch.equal(states[[7, 1, 8]], want[1][1])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    layer, before = Layer((8, 64, 64, 2), 12), torch.get_num_threads()
    rings = layer.rings(4, 16)
    rows: dict[str, list[int]] = {"slot": [1, 2, 3], "ring_row": [3, 1, 2], "ring_start": [0, 7, 15]}
    torch.set_num_threads(threads)
    try:
        replay(layer, layer.states(5), rings, [4, 4, 4], list(range(12)), **rows, ring_len=[0, 0, 0])
        y = replay(layer, layer.states(5), rings, [1, 1, 1], [3, 7, 11], **rows, ring_len=[3, 3, 3])
    finally:
        torch.set_num_threads(before)
    for i, slot in enumerate((1, 2, 3)):
        want, _ = layer.one_by_one(layer.states(5)[slot], 4 * i, 4 * i + 4)
        assert torch.equal(y[i], want[3])


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, -1) for name in ("slot", "ring_row", "ring_start", "ring_len")]
    + [("slot", 6), ("ring_row", 4), ("ring_len", 7)],
)
def test_what_is_outside_is_refused(field: str, value: int) -> None:
    """Nothing was written, not even by earlier rows."""
    layer = Layer((2, 4, 8, 1), 6)
    states, rings = layer.states(6), layer.rings(4, 6)
    rows = {"slot": [1, 2], "ring_row": [1, 2], "ring_start": [0, 0], "ring_len": [0, 0]}
    rows[field][1] = value
    with pytest.raises(IndexError, match=r"^slot, ring_row, ring_start, ring_len, .*: row 1 has"):
        replay(layer, states, rings, [2, 2], [0, 1, 2, 3], **rows)
    assert all(ring.isnan().all() for ring in rings)
    pages = torch.zeros(1, 6, 3, 2), torch.zeros(1, 4, 5, 2)
    layers = (each[None] for each in (states, *(page[0] for page in pages), *rings, layer.A))
    before = states.clone()
    with pytest.raises(IndexError, match="row 1 has"):
        ops.fold_ring(
            *layers, torch.tensor(rows["ring_row"]), torch.tensor(rows["ring_start"]),
            torch.tensor(rows["ring_len"]), torch.tensor(rows["slot"]), torch.tensor([0, 3]), torch.tensor([0, 0]),
        )  # fmt: skip
    assert torch.equal(states.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_as_torch_has_it(shape: tuple[int, int, int, int], monkeypatch: Any) -> None:
    """Single-token updates, the reference of the other tests."""
    layer = Layer(shape, 9, torch.bfloat16)
    y, states = layer.one_by_one(layer.states(3)[2], 0, 9)
    assert y.dtype == torch.bfloat16
    monkeypatch.setattr(compiler, "unavailable_reason", lambda: "none is wanted")
    plain_y, plain_states = layer.one_by_one(layer.states(3)[2], 0, 9)
    torch.testing.assert_close(y, plain_y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(states, plain_states, rtol=1e-4, atol=1e-4)


def test_other_forms_are_torchs(monkeypatch: Any) -> None:
    """Rings of other dtypes."""
    layer = Layer((2, 4, 8, 1), 6)
    rows = {"slot": [1, 2], "ring_row": [1, 2], "ring_start": [0, 3], "ring_len": [0, 0]}
    want = replay(layer, layer.states(6), layer.rings(4, 6), [2, 2], [0, 1, 2, 3], **rows)

    x, dt, B = layer.rings(4, 6)
    monkeypatch.setattr(ring, "_kernels", lambda: {})
    y = replay(layer, layer.states(6), (x, dt, B.double()), [2, 2], [0, 1, 2, 3], **rows)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("read", "write", "ok"),
    [
        ([1, 1], [3, 1], False),
        ([1, 2], [2, 1], False),
        ([1, 2], [1, 2], True),
        ([1, 2], [3, 0], True),
        ([0, 1], [2, 3], True),
    ],
)
def test_a_slot_that_another_row_reads_is_not_written_before(read: list[int], write: list[int], ok: bool) -> None:
    """C computes rows in any order, so the torch form, which reads all slots first, is used."""
    layer, reads = Layer((2, 4, 8, 1), 4), torch.tensor(read)
    states, starts = layer.states(5), torch.tensor([0, 2, 4], dtype=I32)
    writes = torch.tensor([[0, write[0]], [0, write[1]]])
    args = (*layer.some([0, 1, 2, 3]), starts, 2, reads, writes, *LIMITS)
    assert (mamba2.selective_state_update(states.clone(), *args) is not UNSUPPORTED) == ok
    x, windows = torch.randn(4, 6), torch.randn(5, 4, 6)
    rows = (starts, 2, reads, torch.zeros(2, dtype=torch.int64), writes[:, 1])
    taken = conv.causal_conv1d_update(x, torch.randn(6, 4), None, windows, *rows, "silu")
    assert (taken is not UNSUPPORTED) == ok
    want = torch.stack([layer.one_by_one(states[s].nan_to_num(0), 2 * i, 2 * i + 2)[1][1] for i, s in enumerate(read)])
    ops.selective_state_update(states, *layer.some([0, 1, 2, 3]), starts, 2, reads, writes, *LIMITS)
    for i, slot in enumerate(write):
        if slot:
            torch.testing.assert_close(states[slot], want[i], rtol=1e-4, atol=1e-4)
