"""The Triton forms of the planners against the torch ones, bit for bit, over random batches of every layout.

Triton decides whether to interpret when a kernel is defined, so its forms run on CPU in a process of their own, which
the last test starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.mamba import (
    CacheLayout,
    CopyPlan,
    FoldPlan,
    MambaCacheMode,
    ReplayPlan,
    SlotPlan,
    StatePolicy,
    plan_copy,
    plan_fold,
    plan_replay,
    plan_step,
)
from bateleur.mamba.planners import FORMS
from bateleur.metadata.dispatch import Implementations, load

LAYOUTS = [
    (mode, block, drafts)
    for mode in MambaCacheMode
    for block in (4, 8, 16)
    for drafts in range(8)
    if mode is MambaCacheMode.NONE or block >= 1 + drafts
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MOST_ROWS = 20
POISON = -(1 << 62)


class Random:
    """Rows of a random batch, some of them padded and full of garbage, in random dtypes and strides."""

    def __init__(self, layout: CacheLayout, rng: np.random.Generator) -> None:
        self.layout, self.rng, self.rows = layout, rng, int(rng.integers(0, MOST_ROWS))
        drafts, size, most = layout.num_speculative_tokens, self.rows, layout.max_model_len
        self.live = rng.random(size) < 0.8
        stepped = rng.integers(1, 2 + drafts, size)
        lens = np.where(rng.random(size) < 0.7, stepped, rng.integers(1, most, size)) * self.live
        held = most - lens  # a third of the rows start or end on a boundary, or begin
        computed = rng.integers(0, held + 1)
        edge = (computed // layout.block_size * layout.block_size - lens * (rng.random(size) < 0.5)).clip(0)
        computed = np.where(rng.random(size) < 0.3, edge, computed) * (rng.random(size) < 0.9)
        self.n, self.count = computed, lens
        self.table, wide = self._table(), int(rng.integers(1, 1 << 30))
        self.computed = self._ints(np.where(self.live, computed, rng.integers(-wide, wide, size)))
        self.query_lens = self._ints(lens)
        self.accepted = self._ints(self._counts(stepped))
        self.kept = self._ints(self._counts(stepped))
        self.drafts = self._ints(np.where(self.live, np.where(lens == stepped, lens - 1, 0), self._junk()))

    def _junk(self) -> Any:
        return self.rng.integers(-(1 << 20), 1 << 20, self.rows)

    def _counts(self, stepped: Any) -> Any:
        """Right ones mostly; what is out of range must be held to it, and garbage in padded rows ignored."""
        wild = (self.rng.random(self.rows) < 0.1) | ~self.live
        return np.where(wild, self._junk(), self.rng.integers(1, stepped + 1))

    def _ints(self, values: Any) -> Tensor:
        """As int32 or int64, dense or each second entry of something longer."""
        dtype = (torch.int32, torch.int64)[self.rng.integers(2)]
        dense = torch.from_numpy(np.asarray(values)).to(dtype)
        return dense if self.rng.random() < 0.6 else torch.stack((dense, dense - 5), 1)[:, 0]

    def _table(self) -> Tensor:
        """A view of a wider table; every slot in it shows its place."""
        width, extra = self.layout.columns(), int(self.rng.integers(0, 3))
        whole = 1 + torch.arange(self.rows * 3 * (width + extra)).view(self.rows, 3 * (width + extra))
        step = int(self.rng.integers(1, 3))
        whole = whole.to((torch.int32, torch.int64)[self.rng.integers(2)])
        return whole[:, : step * (width + extra) : step]

    def prev_col(self) -> Tensor | None:
        if self.rng.random() < 0.3:
            return None
        last = np.where(self.n > 0, (self.n - 1) // self.layout.block_size, -1)
        prev = np.where(self.rng.random(self.rows) < 0.3, -1, last)
        return self._ints(np.where(self.live, prev, self._junk()))

    def base(self) -> Tensor:
        ring = self.rng.integers(0, self.layout.ring_capacity - self.layout.num_speculative_tokens, self.rows)
        base = (self.n - ring).clip(self.n // self.layout.block_size * self.layout.block_size)
        return self._ints(np.where(self.live, base, self._junk()))

    def flags(self) -> Tensor | None:
        flags = torch.from_numpy(self.rng.random((self.rows, 2)) < 0.4)
        return None if self.rng.random() < 0.3 else flags[:, 0]

    def maybe(self, value: Tensor) -> Tensor | None:
        return None if self.rng.random() < 0.2 else value


def poisoned(plan: Any) -> Any:
    for field in fields(plan):
        getattr(plan, field.name).fill_(POISON)
    return plan


class Forms:
    """The planners of one form; the others are compared with torch's, the default."""

    def __init__(self, form: str = "torch", device: str = "cpu") -> None:
        self.device, self.form = torch.device(device), form

    def __call__(self, planner: Callable[..., Any], layout: CacheLayout, *args: Any, out: Any, **kwargs: Any) -> Any:
        """What the planner makes in poisoned buffers, some of them views of longer ones."""
        moved = [self._moved(arg) for arg in args]
        named = {name: self._moved(value) for name, value in kwargs.items()}
        form = getattr(FORMS[planner.__name__], self.form)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FORMS, planner.__name__, Implementations(load(form) if isinstance(form, str) else form))
            assert planner(layout, *moved, out=poisoned(out), **named) is out
        return out

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):  # as strided as it was
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device).copy_(value)
        if isinstance(value, SlotPlan | ReplayPlan):
            return type(value)(*(self._moved(getattr(value, field.name)) for field in fields(value)))
        return value

    def slots(self, layout: CacheLayout, rng: np.random.Generator) -> None:
        """Compare `plan_step` and `plan_copy` on one batch."""
        batch = Random(layout, rng)
        args = (layout, batch.table, batch.computed, batch.query_lens)
        options = {"accepted": batch.maybe(batch.accepted), "prev_col": batch.prev_col()}
        plan, _ = self._both(plan_step, *args, make=partial(SlotPlan.allocate, layout, batch.rows), **options)
        self._both(plan_copy, *args, batch.drafts, batch.kept, plan, make=partial(CopyPlan.allocate, batch.rows))

    def fold(self, layout: CacheLayout, rng: np.random.Generator) -> None:
        """Compare `plan_replay` and `plan_fold` on one batch."""
        batch = Random(layout, rng)
        rows = (batch.computed, batch.query_lens)
        args = (plan_replay, layout, batch.table, *rows, batch.base(), batch.accepted)
        plan, _ = self._both(*args, make=partial(ReplayPlan.allocate, batch.rows))
        options = {"flush": batch.flags(), "scanned": batch.flags()}
        make = partial(FoldPlan.allocate, batch.rows)
        self._both(plan_fold, layout, plan, *rows, batch.kept, make=make, **options)

    def _both(self, planner: Any, *args: Any, make: Any, **kwargs: Any) -> tuple[Any, Any]:
        want = Forms()(planner, *args, out=make("cpu"), **kwargs)
        got = self(planner, *args, out=make(self.device), **kwargs)
        for field in fields(want):
            mine, right = getattr(got, field.name).cpu(), getattr(want, field.name)
            assert torch.equal(mine, right), (planner.__name__, field.name, mine, right)
        return want, got

    def rounds(self, mode: MambaCacheMode, block: int, drafts: int, rounds: int) -> None:
        rng = np.random.default_rng((block, drafts, [*MambaCacheMode].index(mode)))
        for _ in range(rounds):
            most = int(block * rng.integers(2, 6) + rng.integers(block))
            size = most if mode is MambaCacheMode.NONE else block
            self.slots(CacheLayout(mode, size, drafts, most), rng)
            ring = int(rng.choice((1 + 2 * drafts, 16)))
            self.fold(CacheLayout(mode, size, drafts, most, StatePolicy.FOLD, ring), rng)


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run."""
    pytest.importorskip("triton", reason="triton is not installed")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.mark.parametrize(("mode", "block", "drafts"), LAYOUTS[::3])
def test_triton_plans_what_torch_plans(device: str, mode: MambaCacheMode, block: int, drafts: int) -> None:
    Forms("triton", device).rounds(mode, block, drafts, 6)


def test_triton_plans_more_rows_than_a_tile(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MOST_ROWS", 600)
    for mode in MambaCacheMode:
        Forms("triton", device).rounds(mode, 16, 3, 2)


def test_triton_refuses_buffers_with_strides(device: str) -> None:
    layout = CacheLayout(MambaCacheMode.ALL, 4, 0, 8, StatePolicy.FOLD)
    two = torch.ones(2, dtype=torch.int64, device=device)
    out = ReplayPlan(*torch.zeros(5, 2, 2, dtype=torch.int64, device=device)[:, :, 0])
    form = load(FORMS["plan_replay"].triton or "")
    with pytest.raises(ValueError, match=r"out.slot has strides \(2,\); a kernel needs it contiguous"):
        form(layout, out, torch.ones(2, 2, device=device).int(), two, two, two, two)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert in_interpreter(__file__)
