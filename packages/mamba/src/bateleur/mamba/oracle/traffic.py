"""Random requests, and what each does in its next step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from bateleur.mamba.oracle.pages import Bools, Ints
from bateleur.mamba.oracle.planner import Planner
from bateleur.mamba.retention import Retention
from bateleur.mamba.spec import CacheLayout, StatePolicy


@dataclass(frozen=True)
class Case:
    """One configuration: requests with the same layout share a simulation."""

    layout: CacheLayout
    retention: Retention
    chunk_size: int
    """Tokens of a scan chunk at most."""

    def __str__(self) -> str:
        layout, kept = self.layout, self.retention
        return (
            f"{layout.policy.value} {layout.mode.value} block {layout.block_size} "
            f"drafts {layout.num_speculative_tokens} ring {layout.ring_capacity} max {layout.max_model_len} "
            f"keeps every={kept.every} last={kept.last} prompt_end={kept.prompt_end}"
        )


class Lanes:
    """Requests side by side, one each lane; all arrays are (lanes,) unless said otherwise.

    Lane i's tokens are the first `target[i]` of `truth[i]`; a lane ends when it has computed them. Its columns lie in
    slots of its own, a bank of them for each life of the lane; a hit reads the state it starts from in `shared_slot`.
    """

    def __init__(self, layout: CacheLayout, truth: Ints, first_slot: int, rng: Generator) -> None:
        size, most = truth.shape
        self.layout = layout
        self.truth = truth
        self.first_slot = first_slot
        self.computed = np.zeros(size, np.int64)
        block = min(layout.block_size, 16)
        self.prompt = rng.integers(1, np.minimum(3 * block, most) + 1, size)
        self.target = rng.integers(self.prompt, np.minimum(self.prompt + 2 * block, most) + 1)
        self.fresh = np.ones(size, np.bool_)
        self.bank = np.zeros(size, np.int64)
        self.shared_column = np.full(size, -1)
        self.shared_slot = np.zeros(size, np.int64)
        self.allocated = np.zeros((size, layout.columns()), np.bool_)
        self.cached = np.zeros((size, layout.columns()), np.bool_)

    def __len__(self) -> int:
        return len(self.truth)

    def slots(self) -> Ints:
        """(lanes, columns): each lane's own slot of every column."""
        size, columns = self.allocated.shape
        lane = (self.bank * size + np.arange(size))[:, None]
        return self.first_slot + lane * columns + np.arange(columns)

    def table(self) -> Ints:
        """(lanes, columns) block table: own slots where there are any, the shared one, and 0 elsewhere."""
        table = np.where(self.allocated, self.slots(), 0)
        hit = np.flatnonzero(self.shared_column >= 0)
        table[hit, self.shared_column[hit]] = self.shared_slot[hit]
        return table

    def restart(self, lanes: Ints, column: Ints, slot: Ints) -> None:
        """Begin again with a hit on the state that `slot` holds at the end of `column`; -1 for no hit."""
        self.computed[lanes] = (column + 1) * self.layout.block_size * (column >= 0)
        self.fresh[lanes] = True
        self.shared_column[lanes] = column
        self.shared_slot[lanes] = slot
        self.allocated[lanes] = self.cached[lanes] = False


@dataclass
class Batch:
    """One step of all lanes, in the order of the batch; a lane that sits out is a padded row. (R,) unless said."""

    lanes: Ints
    request_row: Ints
    """Row of the lane in tensors kept by request; 0 where it sits out."""
    computed: Ints
    tokens: Ints
    """Tokens of the step."""
    certain: Ints
    """Tokens that are no drafts."""
    accepted: Ints
    """Tokens that survive."""
    scanned: Bools
    goes_on: Bools
    """The prompt does not end in this step."""


def next_batch(case: Case, planner: Planner, lanes: Lanes, rng: Generator) -> Batch:
    """What every lane does next: a part of its prompt, drafts behind the prompt's end, or a decode."""
    layout, size = case.layout, len(lanes)
    order = rng.permutation(size)
    n, prompt, target = lanes.computed[order], lanes.prompt[order], lanes.target[order]
    width = 1 + layout.num_speculative_tokens
    runs = (n < target) & (rng.random(size) > 0.05)
    in_prompt = n < prompt
    # Decodes: mostly all drafts, sometimes none, sometimes some.
    drafted = np.where(rng.random(size) < 0.6, width, rng.integers(1, width + 1, size))
    tokens = np.minimum(drafted, target - n)
    certain = np.ones(size, np.int64)
    # Ends of prompts that take drafts along, token by token.
    rest = prompt - n
    tail = in_prompt & (n > 0) & ~lanes.fresh[order] & (rest <= width) & (rng.random(size) < 0.3)
    tokens = np.where(tail, np.minimum(width, target - n), tokens)
    certain[tail] = rest[tail]
    # Parts of prompts: single tokens, short ones, and several blocks at once.
    block = min(layout.block_size, 16)
    reach = rng.choice((1, block, 3 * block), size)
    want = rng.integers(1, reach + 1)
    for i in np.flatnonzero(runs & in_prompt & ~tail).tolist():
        part = planner.cut(
            layout, int(n[i]), int(want[i]), int(prompt[i]), drop_last_block=bool(order[i] % 4 == 0)
        )
        runs[i] = part > 0
        tokens[i] = certain[i] = part
    tokens[~runs] = 0
    starts = lanes.fresh[order] if layout.policy is StatePolicy.FOLD else n == 0
    scanned = runs & in_prompt & ~tail & ((tokens > 1) | starts)
    accepted = rng.integers(certain, np.maximum(tokens, certain) + 1)
    goes_on = n + certain < prompt
    return Batch(
        order, np.where(runs, order + 1, 0), n, tokens, certain, accepted * runs, scanned, goes_on & runs
    )
