"""Random requests, and what each does in its next step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.random import Generator

from bateleur.mamba.prefix_retention import PrefixRetention
from bateleur.mamba.spec import CacheLayout
from oracle.memory import Bools, Ints


class Kind(Enum):
    """What a recurrence keeps, as far as planning could go wrong about it."""

    INPUTS = "inputs"
    """A ring of inputs: an entry is right if its token was fed through the right window."""
    CORRECTED = "corrected"
    """A ring of values that depend on the state they were made over, too."""
    WINDOW = "window"
    """Windows alone: neither states nor rings."""


@dataclass(frozen=True)
class Case:
    """One configuration: requests with the same layout share a simulation."""

    layout: CacheLayout
    retention: PrefixRetention
    chunk_size: int
    """Tokens of a scan chunk at most."""
    kind: Kind = Kind.INPUTS

    def __str__(self) -> str:
        layout, kept = self.layout, self.retention
        return (
            f"{self.kind.value} {layout.policy.value} {layout.mode.value} block {layout.block_size} "
            f"drafts {layout.num_speculative_tokens} ring {layout.ring_capacity} max {layout.max_model_len} "
            f"chunk {self.chunk_size} keeps every={kept.every} last={kept.last} prompt_end={kept.prompt_end} "
            f"doubling={kept.doubling}"
        )


class Lanes:
    """Requests side by side, one each lane; all arrays are (lanes,) unless said otherwise.

    Lane i's tokens are the first `target[i]` of `truth[i]`; a lane ends when it has computed them.
    """

    def __init__(self, layout: CacheLayout, truth: Ints, start: Ints, rng: Generator) -> None:
        """`truth` (lanes, max_model_len); requests begin with `start` tokens of a hit each."""
        most, block = truth.shape[1], min(layout.block_size, 16)
        self.truth = truth
        self.computed = start
        self.prompt = rng.integers(start + 1, np.minimum(start + 3 * block, most) + 1)
        self.target = rng.integers(self.prompt, np.minimum(self.prompt + 2 * block, most) + 1)

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def running(self) -> Bools:
        """Those that have not ended."""
        return self.computed < self.target


@dataclass
class Batch:
    """One step of all lanes, in the order of the batch; a lane that sits out is a padded row. (R,) unless said."""

    lanes: Ints
    request_row: Ints
    """Row of the lane in tensors kept by request; 0 where it sits out."""
    computed: Ints
    tokens: Ints
    """Tokens of the step."""
    prompt: Ints
    """Tokens of the prompt; those before the step where it is past its prompt, or takes drafts along with its end."""
    accepted: Ints
    """Tokens that survive."""
    scanned: Bools


def next_batch(layout: CacheLayout, lanes: Lanes, rng: Generator) -> Batch:
    """What every lane does next: a part of its prompt, drafts behind the prompt's end, or a decode."""
    size = len(lanes)
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
    tail = in_prompt & (n > 0) & (rest <= width) & (rng.random(size) < 0.3)
    tokens = np.where(tail, np.minimum(width, target - n), tokens)
    certain[tail] = rest[tail]
    # Parts of prompts: single tokens, short ones, and several blocks at once.
    part = in_prompt & ~tail
    block = min(layout.block_size, 16)
    wanted = rng.integers(1, rng.choice((1, block, 3 * block), size) + 1)
    tokens = np.where(part, np.minimum(wanted, rest), tokens) * runs
    certain = np.where(part, tokens, certain)
    scanned = runs & part & ((tokens > 1) | (n == 0))
    accepted = rng.integers(certain, np.maximum(tokens, certain) + 1) * runs
    return Batch(order, np.where(runs, order + 1, 0), n, tokens, np.where(part, prompt, n), accepted, scanned)
