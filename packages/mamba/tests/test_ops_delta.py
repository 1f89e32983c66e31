"""The delta rules: every form against the reference, with NaN where nothing may be read.

What an operator makes of a step is compared as a whole: outputs of tokens that are owned, and all that it may write to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import reference_operators as reference
from bateleur.mamba import ops
from bateleur.mamba.ops import delta_rule

NAN = float("nan")
F64 = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
FORMS = [pytest.param(ops, id="ops"), pytest.param(reference, id="reference")]
# of activations and states; and what forms may differ by
DTYPES = [
    pytest.param(F64, F64, 1e-10, id="f64"),
    pytest.param(torch.float32, torch.float32, 2e-5, id="f32"),
    pytest.param(torch.bfloat16, torch.float32, 2e-2, id="bf16"),
    pytest.param(torch.bfloat16, torch.bfloat16, 3e-2, id="bf16-states"),
    pytest.param(torch.float16, torch.float16, 4e-3, id="f16-states"),
]
# key heads, value heads, key and value channels
SHAPES = [
    pytest.param((3, 3, 7, 5), id="odd"),
    pytest.param((2, 4, 16, 8), id="two-to-a-key"),
    pytest.param((1, 3, 6, 9), id="one-key-head"),
]
BY_CHANNEL = pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
STATES = ("state", "conv_state", "ring_k", "ring_u", "ring_g")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Batch:
    """Tokens of rows of some lengths, split out of one projection, and pools that are all NaN but where rows look."""

    def __init__(
        self,
        lens: Sequence[int],
        shape: tuple[int, int, int, int] = (2, 4, 6, 5),
        by_channel: bool = False,
        dtype: torch.dtype = F64,
        state_dtype: torch.dtype = F64,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.groups, self.heads, self.size, self.lanes = groups, heads, size, lanes = shape
        self.lens, self.dtype, self.exact = list(lens), dtype, F64 if dtype == F64 else torch.float32
        self.state_dtype, self.owned, self.by_channel = state_dtype, sum(lens), by_channel
        self.loc = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
        gate = heads * size if by_channel else heads
        wide = self.rand(self.owned + padding, 2 * groups * size + heads * lanes + gate + heads)
        wide[self.owned :] = NAN
        q, k, v, a, b = wide.split([groups * size, groups * size, heads * lanes, gate, heads], 1)
        per_head = (heads, size) if by_channel else (heads,)
        self.tokens = {
            "q": q.unflatten(1, (groups, size)),
            "k": k.unflatten(1, (groups, size)),
            "v": v.unflatten(1, (heads, lanes)),
            "a": a.unflatten(1, per_head),
            "b": b,
        }
        params = {"A": -torch.rand(heads, generator=self.g, dtype=self.exact) * 2 - 0.1}
        self.params = params | {"dt_bias": self.rand(*per_head, dtype=self.exact), "beta_scale": 1.0}

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.g, dtype=F64).to(dtype or self.dtype)

    def states(self, slots: int, used: Sequence[int]) -> Tensor:
        """NaN except in some slots."""
        state = torch.full((slots, self.heads, self.lanes, self.size), NAN, dtype=self.state_dtype)
        for slot in set(used) - {0}:
            state[slot] = self.rand(*state.shape[1:], dtype=self.state_dtype)
        return state

    def rings(self, rows: Sequence[int], starts: Sequence[int], held: Sequence[int]) -> dict[str, Tensor]:
        """Rings of 7 rows and 6 entries, NaN except for valid entries."""
        shapes = (self.groups, self.size), (self.heads, self.lanes), self.params["dt_bias"].shape
        k, u, g = (torch.full((7, 6, *shape), NAN, dtype=self.exact) for shape in shapes)
        for row, start, count in zip(rows, starts, held, strict=True):
            at = [(start + i) % 6 for i in range(count)]
            k[row, at], u[row, at] = (self.rand(count, *x.shape[2:], dtype=self.exact) for x in (k, u))
            g[row, at] = -self.rand(count, *g.shape[2:], dtype=self.exact).abs()
        return {"ring_k": k.to(self.dtype), "ring_u": u, "ring_g": g}

    def scan(self, size: int, read: Sequence[int], write: Sequence[int], phase: int = 0) -> dict[str, Any]:
        """In chunks of `size` counted from `phase` tokens before each row; every second end of one is kept, too."""
        starts, rows, first, kept, spare = [], [], [0], [], 20
        for row, length in enumerate(self.lens):
            begins = [i for i in range(length) if i == 0 or (i + phase) % size == 0]
            starts += [int(self.loc[row]) + i for i in begins]
            rows += [row] * len(begins)
            kept += [spare + i if i % 2 else 0 for i in range(len(begins))]
            spare += len(begins)
            if begins:
                kept[-1] = write[row]
            first.append(len(rows))
        i32 = {"dtype": torch.int32}
        return self.step(self.states(1 + max(40, spare), read)) | {
            "chunk_start_loc": torch.tensor([*starts, self.owned], **i32),
            "chunk_row": torch.tensor(rows, **i32),
            "row_chunk_loc": torch.tensor(first, **i32),
            "max_chunks_per_row": max(b - a for a, b in pairwise(first)),
            "chunk_size": size,
            "read": ints(*read),
            "chunk_write": ints(*kept),
        }

    def step(self, state: Tensor) -> dict[str, Any]:
        return self.tokens | self.params | {"state": state, "query_start_loc": self.loc}

    def update(self, read: Sequence[int], write: Tensor) -> dict[str, Any]:
        rows = {"read": ints(*read), "write": write, "max_query_len": max(self.lens)}
        return self.step(self.states(40, read)) | rows

    def replay(
        self, slot: Sequence[int], row: Sequence[int], start: Sequence[int], held: Sequence[int]
    ) -> dict[str, Any]:
        rows = {"slot": ints(*slot), "ring_row": ints(*row), "ring_start": ints(*start), "ring_len": ints(*held)}
        rows |= self.rings(row, start, held) | {"max_query_len": max(self.lens)}
        return self.step(self.states(10, slot)) | rows

    def fold(self, rows: dict[str, Sequence[int]]) -> dict[str, Any]:
        """Two layers, the second of which has other numbers."""
        at = [ints(*rows[name]) for name in ("ring_row", "ring_start", "count", "src", "dst", "page_offset")]
        names = ("ring_row", "ring_start", "count", "src", "dst", "page_offset")
        layers = []
        for _ in range(2):
            rings = self.rings(*(rows[name] for name in ("ring_row", "ring_start", "count")))
            pages = {"state": self.states(10, rows["src"]), "conv_state": torch.full((10, 3, 4), NAN, dtype=self.dtype)}
            layers.append(pages | rings | {"request_conv": self.rand(7, 5, 4)})
        stacked = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
        return stacked | dict(zip(names, at, strict=True))


def copied(args: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if k in STATES else v for k, v in args.items()}


def agree(name: str, args: dict[str, Any], owned: Sequence[int], tolerance: float = 1e-10) -> dict[str, Any]:
    """Outputs of `owned` tokens and all states, but what is null, are the reference's. Returns what ops made."""
    got, want = copied(args), copied(args)
    got["o"], want["o"] = getattr(ops, name)(**got), getattr(reference, name)(**want)
    bound = {"rtol": tolerance, "atol": tolerance}
    if want["o"] is not None:
        assert got["o"].dtype == args["v"].dtype
        torch.testing.assert_close(got["o"][owned], want["o"][owned], **bound)
    for key in set(STATES) & set(args):
        mine, other = (x[key][:, 1:] if want["o"] is None else x[key][1:] for x in (got, want))
        torch.testing.assert_close(mine, other, equal_nan=True, msg=f"{key}: {{}}".format, **bound)
    return got


@BY_CHANNEL
@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_match_the_reference(shape, by_channel, dtype, state_dtype, tolerance):
    """Row 0 begins from nothing; some rows write elsewhere; tokens of no row lie behind."""
    for lens, size in (([9, 1, 0, 2, 37], 16), ([9, 1, 0, 2, 37], 5), ([1], 4), ([70, 3], 100), ([5, 0, 0], 1)):
        batch = Batch(lens, shape, by_channel, dtype, state_dtype, padding=2)
        rows = len(lens)
        args = batch.scan(size, [0, *range(1, rows)], [n + 10 if n % 2 else n for n in range(1, rows + 1)])
        agree("delta_scan_varlen", args, range(batch.owned), tolerance)


@BY_CHANNEL
@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_match_the_reference(shape, by_channel, dtype, state_dtype, tolerance):
    """Consecutive slots in place, and others; row 0 writes a slot that row 1 reads."""
    for lens in ([1, 1, 1], [1], [2, 2, 2], [3, 1, 2, 3], [2, 0, 1, 0]):
        batch = Batch(lens, shape, by_channel, dtype, state_dtype)
        own = torch.arange(1, 1 + len(lens))[:, None] + 10 * torch.arange(max(lens))
        onward = torch.arange(2, 2 + own.numel()).view(own.shape)
        for read in (range(1, 1 + len(lens)), [0 if n % 2 else n for n in range(1, 1 + len(lens))]):
            for write in (own, onward):
                agree("delta_state_update", batch.update(read, write), range(batch.owned), tolerance)


@BY_CHANNEL
@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_replays_match_the_reference(shape, by_channel, dtype, state_dtype, tolerance):
    """Rings of every length and start; slots in order, out of order, and null."""
    for lens in ([1, 1, 1, 1], [1], [2, 2, 2], [3, 1, 0, 2]):
        batch, n = Batch(lens, shape, by_channel, dtype, state_dtype), len(lens)
        for held in ([0, 0, 0, 0], [3, 1, 0, 2], [2, 2, 2, 2], [0, 4, 0, 3]):
            for slots in ([1, 2, 3, 4], [4, 2, 7, 3], [0, 3, 0, 5]):
                args = batch.replay(slots[:n], [6, 1, 3, 2][:n], [5, 1003, 3, 2][:n], held[:n])
                agree("delta_replay_update", args, range(batch.owned), tolerance)


@BY_CHANNEL
@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_folds_match_the_reference(shape, by_channel, dtype, state_dtype, tolerance):
    """In place, to another slot, to a slot that another row reads, from zeros, empty, and skipped."""
    batch = Batch([1], shape, by_channel, dtype, state_dtype)
    rows = {"ring_row": [6, 1, 3, 2], "ring_start": [5, 1003, 3, 2], "page_offset": [0, 2, 1, 1]}
    for count in ([1, 6, 3, 2], [4, 0, 5, 0]):
        for src in ([1, 2, 3, 4], [4, 2, 7, 3], [0, 3, 0, 5]):
            for dst in (src, [5, 6, 7, 8], [2, 3, 4, 5], [2, 0, 9, 1]):
                agree("delta_fold_ring", batch.fold(rows | {"count": count, "src": src, "dst": dst}), [], tolerance)
    rows |= {"count": [2, 0, 2, 0], "src": [1, 2, 3, 0], "dst": [0, 5, 0, 0], "page_offset": [-9, 0, 99, -1]}
    agree("delta_fold_ring", batch.fold(rows), [], tolerance)


@BY_CHANNEL
@pytest.mark.parametrize("form", FORMS)
def test_one_recurrence_by_every_operator(form, by_channel):
    """A prompt by chunks, its tokens one at a time over slots, and over a ring whose folds are exported on the way."""
    batch = Batch([11], by_channel=by_channel)
    scan = batch.scan(4, [1], [1])
    slots, ring = copied(scan), copied(scan)
    o = form.delta_scan_varlen(**scan)
    step = {name: scan[name] for name in (*batch.tokens, *batch.params)}
    one = {"query_start_loc": torch.tensor([0, 1], dtype=torch.int32), "max_query_len": 1}
    rings = batch.rings([], [], [])
    for t in range(11):
        here = {name: x[t : t + 1] if name in batch.tokens else x for name, x in step.items()}
        at = {"read": ints(1), "write": ints(1)[:, None]}
        mine = form.delta_state_update(state=slots["state"], **here, **one, **at)
        torch.testing.assert_close(mine[0], o[t], **TIGHT)
        base = t - t % 4  # a fold after every 4 tokens, which is a boundary
        where = {"slot": ints(1), "ring_row": ints(2), "ring_start": ints(base), "ring_len": ints(t - base)}
        mine = form.delta_replay_update(state=ring["state"], **rings, **here, **one, **where)
        torch.testing.assert_close(mine[0], o[t], **TIGHT)
        if t % 4 == 3:
            layers = {k: v[None] for k, v in (rings | {"state": ring["state"]}).items()}
            pages = {
                "conv_state": torch.zeros(1, 45, 3, 2),
                "request_conv": torch.zeros(1, 7, 4, 2),
                "page_offset": ints(0),
            }
            for dst in (30 + t // 4, 1):  # to another slot, then its own
                to = {"ring_row": ints(2), "ring_start": ints(base), "count": ints(4)}
                form.delta_fold_ring(**layers, **pages, **to, src=ints(1), dst=ints(dst))
    torch.testing.assert_close(slots["state"][1], scan["state"][1], **TIGHT)
    torch.testing.assert_close(ring["state"][31], scan["state"][21], **TIGHT)  # the boundary after 8 tokens


@BY_CHANNEL
@pytest.mark.parametrize("form", FORMS)
def test_rejected_tokens_leave_no_trace(form, by_channel):
    """Rejected tokens are NaN; no result of an accepted token depends on them."""
    batch = Batch([4, 3], by_channel=by_channel)
    clean = batch.replay([1, 2], [3, 1], [4, 0], [1, 3])
    dirty = copied(clean)
    spoilt = torch.tensor([False, False, True, True, False, True, True])
    dirty |= {name: x.masked_fill(spoilt.view(-1, *[1] * (x.dim() - 1)), NAN) for name, x in batch.tokens.items()}
    o, junk = form.delta_replay_update(**clean), form.delta_replay_update(**dirty)
    torch.testing.assert_close(junk[~spoilt], o[~spoilt], **TIGHT)
    for name in ("ring_k", "ring_u", "ring_g"):
        for row, kept in ((3, [4, 5, 0]), (1, [0, 1, 2, 3])):
            torch.testing.assert_close(dirty[name][row, kept], clean[name][row, kept], **TIGHT)


@BY_CHANNEL
@pytest.mark.parametrize("form", FORMS)
def test_padded_rows_and_tokens_are_neutral(form, by_channel):
    """One token per row; padded rows have null slots and NaN tokens. A larger batch runs before."""
    big = Batch([5] * 6, by_channel=by_channel)
    form.delta_replay_update(**big.replay([1] * 6, range(1, 7), [0] * 6, [1] * 6))
    batch = Batch([1, 1], by_channel=by_channel, padding=2)
    wide = batch.update([1, 2, 0, 0], ints(1, 2, 0, 0)[:, None])
    wide["query_start_loc"] = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    narrow = copied(wide) | {k: v[:2] for k, v in batch.tokens.items()}
    narrow |= {"read": ints(1, 2), "write": ints(1, 2)[:, None], "query_start_loc": batch.loc}
    torch.testing.assert_close(form.delta_state_update(**wide)[:2], form.delta_state_update(**narrow), **TIGHT)
    torch.testing.assert_close(wide["state"][1:], narrow["state"][1:], equal_nan=True, **TIGHT)
    wide = batch.replay([1, 2, 0, 0], [3, 1, 0, 0], [5, 0, 0, 0], [2, 1, 0, 0])
    wide["query_start_loc"] = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    narrow = copied(wide) | {k: v[:2] for k, v in batch.tokens.items()} | {"query_start_loc": batch.loc}
    narrow |= {k: wide[k][:2] for k in ("slot", "ring_row", "ring_start", "ring_len")}
    torch.testing.assert_close(form.delta_replay_update(**wide)[:2], form.delta_replay_update(**narrow), **TIGHT)
    for name in ("ring_k", "ring_u", "ring_g"):
        torch.testing.assert_close(wide[name][1:], narrow[name][1:], equal_nan=True, **TIGHT)


@BY_CHANNEL
def test_a_bound_that_no_row_reaches(by_channel):
    """The number of tokens fits full rows, but half of them are padding."""
    batch = Batch([1, 1, 1], by_channel=by_channel, padding=3)
    update = batch.update([1, 2, 3], ints(1, 2, 3)[:, None] + 10 * torch.arange(2)) | {"max_query_len": 2}
    agree("delta_state_update", update, range(3))
    replay = batch.replay([1, 2, 3], [1, 2, 3], [0, 1, 5], [2, 2, 2]) | {"max_query_len": 2}
    agree("delta_replay_update", replay, range(3))


@BY_CHANNEL
@pytest.mark.parametrize("rows", [[0, 3, 0], [2, 0]], ids=str)
def test_rows_without_tokens_write_nothing(rows, by_channel):
    """Even with slots and ring rows of their own."""
    batch = Batch(rows, by_channel=by_channel)
    own = list(range(1, 1 + len(rows)))
    scan = batch.scan(4, own, own)
    update = batch.update(own, ints(*own)[:, None] + 10 * torch.arange(3))
    replay = batch.replay(own, own, [2] * len(own), [1] * len(own))
    for name, args in (("delta_scan_varlen", scan), ("delta_state_update", update), ("delta_replay_update", replay)):
        got = agree(name, args, range(batch.owned))
        for row in (row for row, length in zip(own, rows, strict=True) if not length):
            for key in set(STATES) & set(args):
                torch.testing.assert_close(got[key][row], args[key][row], rtol=0, atol=0, equal_nan=True)


@BY_CHANNEL
@pytest.mark.parametrize("decay", [1e-3, 1.0, 60.0])
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_extreme_decays_and_strengths(by_channel, decay, beta_scale):
    """g down to -60 a token, always and in every third, beta up to 2, and keys that are all but the same.

    Errors of float32 against float64, measured against the largest output.
    """
    single = torch.float32
    long, short = (Batch(lens, by_channel=by_channel, dtype=single, state_dtype=single) for lens in ([150, 3], [4, 3]))
    params = {"A": torch.full((4,), -decay), "dt_bias": torch.zeros_like(long.params["dt_bias"])}
    for batch in (long, short):
        x = batch.tokens
        x["b"], x["k"] = x["b"] + 4, x["k"] * 0.01 + 1
        batch.params |= params | {"beta_scale": beta_scale}
        every_third = torch.where(torch.arange(batch.owned) % 3 == 0, 1.0, -99.0)
        for a in (torch.ones_like(x["a"]), every_third.view(-1, *[1] * (x["a"].dim() - 1)).expand(x["a"].shape)):
            x["a"] = a
            args = batch.replay([1, 2], [3, 1], [4, 0], [2, 3]) if batch is short else batch.scan(64, [0, 2], [1, 2])
            if batch is short:
                args["ring_g"] = args["ring_g"].where(args["ring_g"].isnan(), -decay)
            exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in args.items()}
            name = "delta_replay_update" if batch is short else "delta_scan_varlen"
            o, want = getattr(ops, name)(**args), getattr(reference, name)(**exact)
            torch.testing.assert_close(o.double(), want, rtol=0, atol=5e-5 * float(want.abs().max()))
            for key in set(STATES) & set(args):
                bound = 5e-5 * float(exact[key][1:].nan_to_num().abs().max())
                torch.testing.assert_close(args[key][1:].double(), exact[key][1:], rtol=0, atol=bound, equal_nan=True)


def test_pieces_of_any_size_are_the_same(monkeypatch):
    """The tile size does not change results."""
    for by_channel in (False, True):
        args = Batch([45, 7, 20], by_channel=by_channel).scan(24, [1, 2, 3], [1, 2, 3], phase=5)
        for piece in (4, 8, 16, 64):
            monkeypatch.setattr(delta_rule, "_TILE", piece)
            agree("delta_scan_varlen", args, range(72))


@BY_CHANNEL
def test_pages_of_a_wider_tensor(by_channel):
    """Strided slots, as in a pool where window and state alternate."""
    batch = Batch([1, 1, 1], by_channel=by_channel)
    replay = batch.replay([1, 2, 3], [1, 2, 3], [4, 0, 1], [2, 1, 4])
    update = batch.update([1, 2, 3], ints(1, 2, 3)[:, None])
    for name, args in (("delta_replay_update", replay), ("delta_state_update", update)):
        state = args["state"]
        apart = torch.full((len(state), state[0].numel() + 3), NAN, dtype=F64)
        apart[:, 1:-2] = state.flatten(1)
        got, want = copied(args) | {"state": apart[:, 1:-2].view(state.shape)}, copied(args)
        o, o_ref = getattr(ops, name)(**got), getattr(reference, name)(**want)
        torch.testing.assert_close(o, o_ref, **TIGHT)
        torch.testing.assert_close(got["state"][1:], want["state"][1:], equal_nan=True, **TIGHT)
        assert apart[1:, 0].isnan().all()
        assert apart[1:, -2:].isnan().all()


def test_no_tokens_and_no_rows():
    batch = Batch([0, 0])
    empty = batch.scan(4, [1, 2], [1, 2])
    assert ops.delta_scan_varlen(**empty).shape == (0, 4, 5)
    assert ops.delta_state_update(**batch.update([1, 2], ints(1, 2)[:, None])).shape == (0, 4, 5)
    assert ops.delta_replay_update(**batch.replay([1, 2], [1, 2], [0, 0], [0, 0])).shape == (0, 4, 5)
    nothing = {name: [] for name in ("ring_row", "ring_start", "count", "src", "dst", "page_offset")}
    ops.delta_fold_ring(**batch.fold(nothing))
