"""Bytes that a step moves through memory, per row and layer: what a kernel that wastes nothing reads and writes.

Counted is every byte that an operator has to read or write of its arguments that differ from row to row: states,
windows, rings, and the tokens in and out. Weights, which all rows share, and integers, which are few, are not. A state
is counted once for reading and once for writing, however many tokens pass over it, so the figures are bounds: time
beside bytes over bandwidth says how far from it a kernel is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.spec import CacheLayout, StatePolicy


def window_bytes(spec: Recurrence, entries: int) -> int:
    """`entries` inputs of the convolution."""
    return entries * spec.conv_dim * spec.conv_dtype.itemsize


def conv_update_bytes(spec: Recurrence, tokens: int) -> int:
    """`causal_conv1d_update`: W - 1 entries read and W - 2 + tokens written, tokens in and out. Either policy's."""
    kept = spec.conv_width - 1
    return window_bytes(spec, kept + (kept - 1 + tokens) + 2 * tokens)


def token_bytes(spec: Recurrence) -> int:
    """One token of `update` or `replay`: its channels and gates in, y out. A pure convolution has nothing to do."""
    if not spec.state_shape:
        return 0
    lanes = spec.conv_dim + math.prod(spec.output_shape)
    return lanes * spec.conv_dtype.itemsize + sum(gate.nbytes for gate in spec.gates)


def state_update_bytes(spec: Recurrence, tokens: int) -> int:
    """`update` with a slot for the state after each token: one state read, and one written each."""
    return (1 + tokens) * spec.state_bytes + tokens * token_bytes(spec)


def replay_bytes(spec: Recurrence, tokens: int, ring_len: float) -> float:
    """`replay` under FOLD: one state and `ring_len` entries read, and an entry written for each token."""
    entries = (ring_len + tokens) * spec.ring_bytes(1)
    return spec.state_bytes + entries + tokens * token_bytes(spec)


def fold_bytes(spec: Recurrence, count: float) -> float:
    """`fold` of a row of `count` entries: a state read and one written, and a window moved."""
    return 2 * spec.state_bytes + count * spec.ring_bytes(1) + 2 * window_bytes(spec, spec.conv_width - 1)


def copy_bytes(spec: Recurrence, bias: int = 0) -> int:
    """`copy_states` of one page whose window loses its first `bias` entries: read and written."""
    return 2 * (spec.state_bytes + window_bytes(spec, spec.conv_shape[0] - bias))


@dataclass(frozen=True, slots=True)
class FoldCycle:
    """What a long decode under FOLD does again and again, if every step has the same number of accepted tokens.

    Its steps fill a ring until it could not take another step's tokens, and the last of them folds it. Boundaries,
    where a ring is folded early, are left out: they are hundreds of tokens apart.
    """

    steps: int
    """Steps from fold to fold."""
    accepted: int
    """Tokens that survive of each."""

    @classmethod
    def of(cls, layout: CacheLayout, accepted: int) -> FoldCycle:
        """Of a layout's rule.

        Raises ValueError for a layout of SLOTS, or a count that no step of it accepts.
        """
        width = 1 + layout.num_speculative_tokens
        if layout.policy is not StatePolicy.FOLD:
            raise ValueError(f"layout has the policy {layout.policy.value!r}; only 'fold' has a cycle")
        if not 1 <= accepted <= width:
            raise ValueError(
                f"accepted is {accepted}; it must be in [1, 1 + num_speculative_tokens = {width}]"
            )
        return cls((layout.ring_capacity - width) // accepted + 1, accepted)

    @property
    def folded(self) -> int:
        """Entries that the last step folds: all that were accepted."""
        return self.steps * self.accepted

    @property
    def mean_ring_len(self) -> float:
        """Entries in the ring as a step begins."""
        return self.accepted * (self.steps - 1) / 2


def slots_step_bytes(spec: Recurrence, tokens: int) -> int:
    """A decode step of `tokens` tokens under SLOTS: convolution and state update."""
    return conv_update_bytes(spec, tokens) + state_update_bytes(spec, tokens)


def fold_step_bytes(spec: Recurrence, tokens: int, cycle: FoldCycle) -> float:
    """The same step under FOLD, on average over a cycle: convolution, replay, and a fold in one step of it."""
    replay = replay_bytes(spec, tokens, cycle.mean_ring_len)
    return conv_update_bytes(spec, tokens) + replay + fold_bytes(spec, cycle.folded) / cycle.steps
