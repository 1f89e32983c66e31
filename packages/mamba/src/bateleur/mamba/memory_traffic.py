"""Bytes moved per step, request and layer: the least that the operators have to read and write.

Counted are the tensors of each request: states, conv windows, rings, inputs and outputs. Shared weights and small index
tensors are not counted. A state counts as read once per step or fold, regardless of the number of tokens. The result
divided by the memory bandwidth is a lower bound of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.spec import CacheLayout, StatePolicy


def window_bytes(spec: Recurrence, entries: int) -> int:
    """Return the bytes of the convolution's inputs for `entries` tokens."""
    return entries * spec.conv_dim * spec.conv_dtype.itemsize


def conv_update_bytes(spec: Recurrence, tokens: int) -> int:
    """Return the bytes of `causal_conv1d_update` for `tokens` tokens: conv window read and written, inputs, outputs."""
    window = spec.conv_width - 1
    return window_bytes(spec, window + (window - 1 + tokens) + 2 * tokens)


def token_bytes(spec: Recurrence) -> int:
    """Return the bytes of a token's inputs and output in a recurrence: channels, gates, y. 0 for pure convolutions."""
    if not spec.state_shape:
        return 0
    size = spec.conv_dim + math.prod(spec.output_shape)
    return size * spec.conv_dtype.itemsize + sum(gate.nbytes for gate in spec.gates)


def state_update_bytes(spec: Recurrence, tokens: int) -> int:
    """Return the bytes of the operator `update`: one state read, and one state written after each token."""
    return (1 + tokens) * spec.state_bytes + tokens * token_bytes(spec)


def replay_bytes(spec: Recurrence, tokens: int, ring_len: float) -> float:
    """Return the bytes of the operator `replay`: state and `ring_len` ring entries read, an entry written per token."""
    entries = (ring_len + tokens) * spec.ring_bytes(1)
    return spec.state_bytes + entries + tokens * token_bytes(spec)


def fold_bytes(spec: Recurrence, count: float) -> float:
    """Return the bytes of adding `count` ring entries to a state: state read and written, one conv window copied."""
    return 2 * spec.state_bytes + count * spec.ring_bytes(1) + 2 * window_bytes(spec, spec.conv_width - 1)


@dataclass(frozen=True, slots=True)
class FoldCycle:
    """The steps of a long decode from one fold (ring entries added to the saved state) to the next, with the same
    number of accepted tokens in every step.

    A step folds the ring if the ring has no room for another step with all drafts. Earlier folds at block boundaries,
    which are hundreds of tokens apart, are ignored.
    """

    steps: int
    """Steps from fold to fold."""
    accepted: int
    """Accepted tokens per step."""

    @classmethod
    def of(cls, layout: CacheLayout, accepted: int) -> FoldCycle:
        """Compute after how many steps with `accepted` tokens each a ring is added to the saved state.

        Raises ValueError for a layout without rings (policy SLOTS), or if `accepted` is not in [1, 1 + drafts].
        """
        width = 1 + layout.num_speculative_tokens
        if layout.policy is not StatePolicy.FOLD:
            raise ValueError(f"layout has the policy {layout.policy.value!r}; only 'fold' has a cycle")
        if not 1 <= accepted <= width:
            raise ValueError(f"accepted is {accepted}; it must be in [1, 1 + num_speculative_tokens = {width}]")
        return cls((layout.ring_capacity - width) // accepted + 1, accepted)

    @property
    def folded(self) -> int:
        """Ring entries that the last step adds to the saved state: all accepted tokens of the cycle."""
        return self.steps * self.accepted

    @property
    def mean_ring_len(self) -> float:
        """Mean number of ring entries at the start of a step."""
        return self.accepted * (self.steps - 1) / 2


def slots_step_bytes(spec: Recurrence, tokens: int) -> int:
    """Return the bytes of a decode step of `tokens` tokens, state policy SLOTS (writes a state per token)."""
    return conv_update_bytes(spec, tokens) + state_update_bytes(spec, tokens)


def fold_step_bytes(spec: Recurrence, tokens: int, cycle: FoldCycle) -> float:
    """Return the mean bytes of a decode step, state policy FOLD: convolution, recurrence, and one fold per cycle."""
    replay = replay_bytes(spec, tokens, cycle.mean_ring_len)
    return conv_update_bytes(spec, tokens) + replay + fold_bytes(spec, cycle.folded) / cycle.steps
