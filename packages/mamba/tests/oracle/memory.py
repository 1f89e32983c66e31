"""Memory and operators of the simulator. A state is the sequence of its tokens.

Every operator does to token sequences what its namesake in `bateleur.mamba.ops` does to states. Tokens are integers,
above 0 where they are real; a conv window shows 0 before the first token. Garbage is negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

KEPT = 3
"""W - 1: inputs in a conv window."""
GARBAGE = -5


@dataclass
class States:
    """R states outside of slots."""

    tokens: Ints
    """(R, M) tokens of each state, first token first; undefined after its length."""
    length: Ints
    """(R,)"""

    def extended(self, more: Ints, count: Ints) -> States:
        """Return the states after `count` further tokens of `more` (R, T)."""
        tokens = self.tokens.copy()
        rows, steps = np.nonzero(np.arange(more.shape[1]) < count[:, None])
        at = self.length[rows] + steps
        fits = (at >= 0) & (at < tokens.shape[1])  # garbage may have any length
        tokens[rows[fits], at[fits]] = more[rows, steps][fits]
        return States(tokens, self.length + count)

    def equals(self, truth: Ints, length: Ints) -> Bools:
        """Return (R,) whether each state is that of the first `length` tokens of `truth`."""
        behind = np.arange(truth.shape[1]) >= length[:, None]
        same: Bools = ((self.tokens == truth) | behind).all(1)
        same &= self.length == length
        return same


def window_of(truth: Ints, length: Ints) -> Ints:
    """Return (R, W - 1), the last inputs of the first `length` tokens of each row."""
    at = length[:, None] + np.arange(-KEPT, 0)
    return np.where(at >= 0, truth[np.arange(len(truth))[:, None], at], 0)


class Pages:
    """State slots: states of up to `max_len` tokens, and conv windows of W - 1 + `drafts` entries.

    Without `has_states` windows are all there is, and states remain garbage.
    """

    def __init__(self, num_slots: int, max_len: int, drafts: int, *, has_states: bool = True) -> None:
        self.has_states = has_states
        self.tokens = np.full((num_slots, max_len), GARBAGE, np.int64)
        self.length = np.full(num_slots, GARBAGE, np.int64)
        self.conv = np.full((num_slots, KEPT + drafts), GARBAGE, np.int64)

    def poison(self, slots: Ints) -> None:
        """Fill newly allocated slots with garbage."""
        self.tokens[slots] = self.conv[slots] = self.length[slots] = GARBAGE

    def states(self, slots: Ints) -> States:
        """Return copies of the states in `slots`; slot 0 is a zero state."""
        return States(self.tokens[slots], np.where(slots > 0, self.length[slots], 0))

    def windows(self, slots: Ints, offset: Ints | int = 0) -> Ints:
        """(R, W - 1) copies of the windows in `slots` from entry `offset` on; those of slot 0 are zero."""
        at = np.zeros_like(slots) + offset
        found = self.conv[slots[:, None], at[:, None] + np.arange(KEPT)]
        return np.where(slots[:, None] > 0, found, 0)

    def put_states(self, slots: Ints, states: States) -> None:
        """Write states; slot 0 drops them."""
        live = (slots > 0) & self.has_states
        self.tokens[slots[live]] = states.tokens[live]
        self.length[slots[live]] = states.length[live]

    def put_windows(self, slots: Ints, windows: Ints) -> None:
        """Write windows of up to W - 1 + drafts entries; later entries become garbage."""
        live = slots[slots > 0]
        self.conv[live] = GARBAGE
        self.conv[live, : windows.shape[1]] = windows[slots > 0]

    def copy(self, conv_src: Ints, conv_bias: Ints, ssm_src: Ints, dst: Ints) -> None:
        """Simulate `copy_states`."""
        width = self.conv.shape[1]
        at = np.arange(width) + conv_bias[:, None]
        windows = np.where(at < width, self.conv[conv_src[:, None], np.minimum(at, width - 1)], GARBAGE)
        states = self.states(ssm_src)
        self.put_states(dst, states)
        self.put_windows(dst, windows)


class Rows:
    """Rings and request conv windows of `num_rows` request rows under FOLD; row 0 is null."""

    def __init__(self, num_rows: int, capacity: int, drafts: int) -> None:
        self.ring = np.full((num_rows, capacity), GARBAGE, np.int64)
        self.live = np.full((num_rows, KEPT + drafts), GARBAGE, np.int64)

    def entries(self, rows: Ints, start: Ints) -> Ints:
        """(R, L) copies of the rings, from entry `start` on."""
        capacity = self.ring.shape[1]
        found: Ints = self.ring[rows[:, None], (start[:, None] + np.arange(capacity)) % capacity]
        return found

    def append(self, rows: Ints, first: Ints, tokens: Ints, count: Ints) -> None:
        """Write `count` of `tokens` (R, T) from entry `first` on; row 0 drops them."""
        which, steps = np.nonzero((np.arange(tokens.shape[1]) < count[:, None]) & (rows > 0)[:, None])
        self.ring[rows[which], (first[which] + steps) % self.ring.shape[1]] = tokens[which, steps]

    def put_windows(self, rows: Ints, windows: Ints) -> None:
        """Write request conv windows as `Pages.put_windows` does; row 0 drops them."""
        live = rows[rows > 0]
        self.live[live] = GARBAGE
        self.live[live, : windows.shape[1]] = windows[rows > 0]

    def windows(self, rows: Ints, offset: Ints) -> Ints:
        """(R, W - 1) copies of the request conv windows from entry `offset` on."""
        found: Ints = self.live[rows[:, None], offset[:, None] + np.arange(KEPT)]
        return found


def slid(windows: Ints, tokens: Ints, count: Ints, drafts: int) -> Ints:
    """Return (R, W - 1 + drafts), window and tokens without the oldest entry, as `causal_conv1d_update` writes them."""
    line: Ints = np.concatenate((windows, tokens), 1)[:, 1 : 1 + KEPT + drafts]
    return np.where(np.arange(line.shape[1]) < KEPT - 1 + count[:, None], line, GARBAGE)
