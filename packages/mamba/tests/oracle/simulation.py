"""Steps concurrent requests through the planners and symbolic operators, and compares them with the truth."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.mamba.state_manager import MambaStateManager
from oracle.lanes import Batch, Case, Kind, Lanes, next_batch
from oracle.memory import GARBAGE, Bools, Ints, Pages, Rows, States, slid, window_of
from oracle.planner import Planner

SPOILED = 1 << 40
"""Added to tokens that were fed through a wrong conv window."""
TOKEN_BYTES = 8
"""Bytes of a token in a prefix key."""


def as_batch(values: Ints | Bools | NDArray[np.int32], dtype: torch.dtype = torch.int32) -> Tensor:
    """Convert an array to a tensor with the dtype of batches."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


class Buffers:
    """Persistent plans of batches of `num_reqs` rows."""

    def __init__(self, layout: CacheLayout, num_reqs: int) -> None:
        self.slots = SlotPlan.allocate(layout, num_reqs, "cpu")
        self.copy = CopyPlan.allocate(num_reqs, "cpu")
        self.replay = ReplayPlan.allocate(num_reqs, "cpu")
        self.fold = FoldPlan.allocate(num_reqs, "cpu")


class Simulation:
    """Simulation of `case` over one pool and one set of request rows.

    What was looked at is counted in `seen`; differences from the truth in `found`, by kind: "state" and "window" that
    a step started from, and which make its outputs; "boundary", a published page with a wrong state or window;
    "chunks" of prompts that the scan could not take; "neutral", a padded row with a slot; "slots", a request that
    held more of them between two steps than the layout says. A prefix is named by its tokens.

    Args:
        case: the configuration.
        num_lanes: requests side by side.
        planner: the functions under test.
        rng: of everything random.
    """

    def __init__(self, case: Case, num_lanes: int, planner: Planner, rng: Generator) -> None:
        layout = case.layout
        self.case, self.planner, self.rng = case, planner, rng
        self.seen: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.folds = layout.policy is StatePolicy.FOLD
        self.drafts = layout.num_speculative_tokens
        self.max_len = layout.max_model_len
        columns = layout.columns()
        num_pages = 1 + num_lanes * columns
        self.table = np.arange(1, num_pages, dtype=np.int32).reshape(num_lanes, columns)
        self.held: MambaStateManager | None = None
        if layout.mode is not MambaCacheMode.NONE:
            spare = num_lanes * columns * int(rng.integers(0, 4))  # none, or room for what is published
            num_pages = 1 + num_lanes * layout.slots_per_request() + spare
            self.pool = planner.pool(num_pages)
            self.held = planner.pages(self.pool, num_lanes, layout, case.retention)
            self.table = self.held.table
        self.published: set[bytes] = set()
        """Return the keys of all cached prefixes."""
        width, has_states = 0 if self.folds else self.drafts, case.kind is not Kind.WINDOW
        self.pages = Pages(num_pages, self.max_len, width, has_states=has_states)
        self.chunker = planner.chunker(layout, case.chunk_size)
        self.rows = Rows(1 + num_lanes, layout.ring_capacity, self.drafts)
        self.states = RequestStates(1 + num_lanes, "cpu")
        self._buffers: dict[int, Buffers] = {}

    def admit(self, lanes: Ints, names: list[bytes]) -> None:
        """Start requests in these lanes, each from the cached prefix with that key, or from zeros."""
        n = np.array([len(name) // TOKEN_BYTES for name in names])
        page = np.zeros(len(names), np.int64)
        if self.held is not None:
            for i, name in enumerate(names):
                page[i] = self.pool.find(name) if name else 0
                self.held.admit(int(lanes[i]), int(n[i]), int(page[i]))
        self.states.admit((1 + lanes).tolist(), n.tolist())
        self.rows.put_windows(1 + lanes, self.pages.windows(page))

    def release(self, lanes: Ints) -> None:
        """End the requests of these lanes."""
        if self.held is not None:
            for lane in lanes.tolist():
                self.held.release(lane)

    def step(self, lanes: Lanes) -> None:
        """Run one step of all lanes."""
        batch = next_batch(self.case.layout, lanes, self.rng)
        table = self._cover(batch)
        truth = lanes.truth[batch.lanes]
        row, spots = np.arange(len(lanes))[:, None], np.arange(max(1 + self.drafts, int(batch.tokens.max())))
        at = np.minimum(batch.computed[:, None] + spots, self.max_len - 1)
        right = (spots < batch.accepted[:, None]) | batch.scanned[:, None]
        fed = np.where(right, truth[row, at], GARBAGE - 1 - spots - 100 * row)
        if len(lanes) not in self._buffers:
            self._buffers[len(lanes)] = Buffers(self.case.layout, len(lanes))
        move = self._fold if self.folds else self._slots
        move(batch, table, truth, fed, self._buffers[len(lanes)])
        lanes.computed[batch.lanes] += batch.accepted
        self._insert(batch, truth)

    def _cover(self, batch: Batch) -> NDArray[np.int32]:
        """Allocate slots for the step, filled with garbage. Return the block table, with garbage in padded rows."""
        if self.held is not None:
            active = np.flatnonzero(batch.tokens)
            in_prompt = batch.prompt[active] > batch.computed[active]
            order = np.concatenate((active[~in_prompt], active[in_prompt]))
            n, tokens, prompt = (x[order].astype(np.int32) for x in (batch.computed, batch.tokens, batch.prompt))
            before = self.table.copy()
            self.held.allocate_blocks(batch.lanes[order], n, tokens, int((~in_prompt).sum()), prompt)
            self.pages.poison(self.table[self.table != before])
        table = self.table[batch.lanes]
        idle = batch.tokens == 0
        table[idle] = self.rng.integers(0, len(self.pages.length), table.shape)[idle]
        return table

    def _insert(self, batch: Batch, truth: Ints) -> None:
        """Publish the passed boundaries, and check their states."""
        if self.held is None:
            return
        active = np.flatnonzero(batch.tokens)
        n, new, prompt = (x[active].astype(np.int32) for x in (batch.computed, batch.accepted, batch.prompt))
        names = []

        def key(index: int, num_tokens: int) -> bytes:
            names.append(truth[active[index], :num_tokens].tobytes())
            return names[-1]

        self.held.commit(batch.lanes[active], n, n + new, prompt, key)
        there = [name for name in names if self.pool.find(name)]
        self.seen["published"] += len(there)
        self.published.update(there)
        self.compare(there)
        most = self.case.layout.slots_per_request()
        self.found["slots"] += int((np.count_nonzero(self.table, axis=1) > most).sum())

    def compare(self, names: list[bytes]) -> None:
        """Check the states of the slots with these keys."""
        names = [name for name in names if self.pool.find(name)]
        if not names:
            return
        truth = np.zeros((len(names), self.max_len), np.int64)
        for row, name in zip(truth, names, strict=True):
            row[: len(name) // TOKEN_BYTES] = np.frombuffer(name, np.int64)
        length = np.array([len(name) // TOKEN_BYTES for name in names])
        slots = np.array([self.pool.find(name) for name in names])
        good = (self.pages.windows(slots) == window_of(truth, length)).all(1)
        if self.pages.has_states:
            good &= self.pages.states(slots).equals(truth, length)
        self.found["boundary"] += int((~good).sum())

    def _look(self, batch: Batch, truth: Ints, states: States, windows: Ints, fed: Ints) -> Ints:
        """Check the initial states and windows of rows; return their tokens, corrupted after a wrong window."""
        active = batch.tokens > 0
        n = np.where(active, batch.computed, 0)
        good = (windows == window_of(truth, n)).all(1)
        self.seen["rows"] += int(active.sum())
        self.found["window"] += int((active & ~good).sum())
        if self.pages.has_states:
            right = states.equals(truth, n)
            self.found["state"] += int((active & ~right).sum())
            if self.case.kind is Kind.CORRECTED:
                good &= right
        spoiled: Ints = fed + SPOILED * ~good[:, None]
        return spoiled

    def _inputs(self, batch: Batch, table: NDArray[np.int32]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return block table, computed tokens, query lengths and accepted counts, with garbage in ignored entries."""
        free = (batch.tokens == 0) | batch.scanned
        garbage = self.rng.integers(-3, 2 * self.max_len, (2, len(free)))
        computed = np.where(batch.tokens == 0, garbage[0], batch.computed)
        accepted = np.where(free, garbage[1], batch.accepted * (batch.tokens != 1))
        return as_batch(table), as_batch(computed), as_batch(batch.tokens), as_batch(accepted, torch.int64)

    def _slots(self, batch: Batch, table: NDArray[np.int32], truth: Ints, fed: Ints, out: Buffers) -> None:
        """Run a step under SLOTS: plan, operators, commit, copies."""
        layout, pages = self.case.layout, self.pages
        args = (layout, *self._inputs(batch, table))
        request_row = torch.from_numpy(batch.request_row)
        states = self.states.gather(request_row)
        plan = self.planner.step(*args[:4], states.accepted, out.slots, prev_col=states.prev_col)
        read, write = plan.ssm_read.numpy(), plan.ssm_write.numpy()
        self._expect_neutral(batch, read, *write.T, plan.conv_read.numpy(), plan.conv_write.numpy())
        before = pages.states(read)
        windows = pages.windows(plan.conv_read.numpy(), plan.conv_offset.numpy())
        fed = self._look(batch, truth, before, windows, fed)
        after = before.extended(fed, batch.tokens)
        self._scan(batch, args[1], before, windows, after, fed)
        stepped = (batch.tokens > 0) & ~batch.scanned
        for i in range(1 + self.drafts):
            slots = write[:, i] * (stepped & (i < batch.tokens))
            pages.put_states(slots, States(after.tokens, before.length + i + 1))
        pages.put_windows(plan.conv_write.numpy() * stepped, slid(windows, fed, batch.tokens, self.drafts))
        drafts = as_batch(np.where(stepped, batch.tokens - 1, 0))
        copy = self.planner.copy(*args[:4], drafts, args[4], plan, out.copy)
        copies = [x.numpy() for x in (copy.conv_src, copy.conv_bias, copy.ssm_src, copy.dst)]
        self._expect_neutral(batch, *copies)
        pages.copy(*copies)
        self.states.scatter(request_row, copy.accepted, prev_col=copy.prev_col)

    def _fold(self, batch: Batch, table: NDArray[np.int32], truth: Ints, fed: Ints, out: Buffers) -> None:
        """Run a step under FOLD: plan, operators, fold."""
        layout, pages, rows = self.case.layout, self.pages, self.rows
        on_device, computed, tokens, accepted = self._inputs(batch, table)
        request_row = torch.from_numpy(batch.request_row)
        states = self.states.gather(request_row)
        plan = self.planner.replay(layout, on_device, computed, tokens, states.base, states.accepted, out.replay)
        slot, start, length = (x.numpy() for x in (plan.slot, plan.ring_start, plan.ring_len))
        self._expect_neutral(batch, slot, length)
        checkpoint = pages.states(slot)
        before = checkpoint.extended(rows.entries(batch.request_row, start), length)
        live = rows.windows(batch.request_row, plan.conv_offset.numpy())
        windows = np.where(batch.scanned[:, None], pages.windows(slot), live)
        fed = self._look(batch, truth, before, windows, fed)
        self._scan(batch, on_device, before, windows, before.extended(fed, batch.tokens), fed)
        stepped = (batch.tokens > 0) & ~batch.scanned
        ring_row = batch.request_row * stepped
        self.found["overflow"] += int((ring_row * (length + batch.tokens > layout.ring_capacity) > 0).sum())
        if pages.has_states:
            rows.append(ring_row, start + length, fed, batch.tokens)
        rows.put_windows(ring_row, slid(windows, fed, batch.tokens, self.drafts))
        flush = as_batch(stepped & (batch.prompt > batch.computed), torch.bool)
        scanned = as_batch(batch.scanned, torch.bool)
        fold = self.planner.fold(layout, plan, computed, tokens, accepted, flush=flush, scanned=scanned, out=out.fold)
        dst, count, offset = (x.numpy() for x in (fold.dst, fold.count, fold.page_offset))
        self._expect_neutral(batch, dst, count, offset)
        pages.put_states(dst, checkpoint.extended(rows.entries(batch.request_row, start), count))
        pages.put_windows(dst, rows.windows(batch.request_row, offset))
        self.states.scatter(request_row, fold.accepted, base=fold.base)

    def _scan(self, batch: Batch, table: Tensor, before: States, windows: Ints, after: States, fed: Ints) -> None:
        """Write the states after each prefill chunk, and under FOLD the request conv windows."""
        rows = np.flatnonzero(batch.scanned)
        if not len(rows):
            return
        lens, computed = batch.tokens[rows], batch.computed[rows]
        starts = np.append(0, np.cumsum(lens)).astype(np.int32)
        cut = self.chunker.split(starts, computed.astype(np.int32), table[torch.from_numpy(rows)])
        if not self._fits(cut, starts):
            return
        of, slots = cut.chunk_row.numpy(), cut.chunk_write.numpy()
        row, done = rows[of], cut.chunk_start_loc.numpy()[1:] - starts[of]
        line = np.concatenate((windows, fed), 1)[row]
        shown = np.take_along_axis(line, done[:, None] + np.arange(windows.shape[1]), 1)
        self.pages.put_states(slots, States(after.tokens[row], before.length[row] + done))
        self.pages.put_windows(slots, shown)
        if self.folds:
            last = cut.row_chunk_loc.numpy()[1:] - 1
            self.rows.put_windows(batch.request_row[rows], shown[last])

    def _fits(self, cut: PrefillChunks, starts: NDArray[np.int32]) -> bool:
        """Return whether the chunks are valid: at most chunk_size tokens, and inside of their rows."""
        loc, first = cut.chunk_start_loc.numpy(), cut.row_chunk_loc.numpy()
        lens, counts = np.diff(loc), np.diff(first)
        fits = (
            np.array_equal(cut.query_start_loc, starts)
            and np.array_equal(loc[first], starts)
            and np.array_equal(cut.chunk_row, np.arange(len(counts)).repeat(counts))
            and bool((lens > 0).all() and (lens <= self.chunker.chunk_size).all())
            and cut.max_chunks_per_row == int(counts.max())
        )
        self.found["chunks"] += not fits
        return fits

    def _expect_neutral(self, batch: Batch, *fields: Ints) -> None:
        idle = batch.tokens == 0
        self.found["neutral"] += sum(int(field[idle].any()) for field in fields)
