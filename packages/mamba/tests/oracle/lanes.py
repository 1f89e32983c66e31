"""Random requests and their next steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.random import Generator

from bateleur.mamba.prefix_retention import PrefixRetention
from bateleur.mamba.spec import CacheLayout
from oracle.memory import Bools, Ints


class Kind(Enum):
    """Kinds of recurrent states."""

    INPUTS = "inputs"
    """Ring entries are inputs, which depend only on the conv window."""
    CORRECTED = "corrected"
    """Ring entries also depend on the state."""
    WINDOW = "window"
    """Only conv windows."""


@dataclass(frozen=True)
class Case:
    """One configuration: requests with the same layout share a simulation."""

    layout: CacheLayout
    retention: PrefixRetention
    chunk_size: int
    """Maximum number of tokens of a prefill chunk."""
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
    """Concurrent requests, one per lane; arrays are (lanes,) unless stated otherwise.

    Lane i's tokens are the first `target[i]` of `truth[i]`; a lane ends when it has computed them.
    """

    def __init__(self, layout: CacheLayout, truth: Ints, start: Ints, rng: Generator) -> None:
        """truth (lanes, max_model_len): tokens of the requests; start: tokens of their prefix-cache hits."""
        most, block = truth.shape[1], min(layout.block_size, 16)
        self.truth = truth
        self.computed = start
        self.prompt = rng.integers(start + 1, np.minimum(start + 3 * block, most) + 1)
        self.target = rng.integers(self.prompt, np.minimum(self.prompt + 2 * block, most) + 1)

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def running(self) -> Bools:
        """Lanes whose request has not ended."""
        return self.computed < self.target


@dataclass
class Batch:
    """One step of all lanes in batch order; idle lanes are padded rows. Arrays are (R,) unless stated otherwise."""

    lanes: Ints
    request_row: Ints
    """Request row of the lane; 0 if it is idle."""
    computed: Ints
    tokens: Ints
    """Tokens of the step."""
    prompt: Ints
    """Tokens of the prompt; the tokens before the step if the lane decodes, or has drafts at the end of its prompt."""
    accepted: Ints
    """Accepted tokens."""
    scanned: Bools


def next_batch(layout: CacheLayout, lanes: Lanes, rng: Generator) -> Batch:
    """Draw the next step of every lane: a prefill, the end of a prompt with drafts, or a decode."""
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
