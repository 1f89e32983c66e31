"""Kimi delta attention: one decay per key channel."""

from __future__ import annotations

from dataclasses import dataclass

from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.recurrences.delta_rule import DeltaRule
from bateleur.mamba.spec import at_least


@dataclass(frozen=True, slots=True)
class KimiDelta(DeltaRule):
    """The delta rule with one decay per key channel and head. Source: arXiv 2510.26692.

    Raises ValueError as `Recurrence` does.
    """

    num_heads: int
    """H: heads of queries, keys and values."""
    key_dim: int
    """Dk: channels of a key."""
    value_dim: int
    """Dv: channels of a value."""

    def __post_init__(self) -> None:
        """Validate the fields; raises ValueError."""
        for name in ("num_heads", "key_dim", "value_dim"):
            at_least(name, getattr(self, name), 1)
        Recurrence.__post_init__(self)

    @property
    def heads(self) -> tuple[int, int]:
        """Number of key heads and of value heads, which are equal: (H, H)."""
        return (self.num_heads, self.num_heads)

    @property
    def lanes(self) -> tuple[int, int]:
        """Channels of a key and of a value, (Dk, Dv)."""
        return (self.key_dim, self.value_dim)

    @property
    def decay_shape(self) -> tuple[int, int]:
        """Shape of the log decay of a token, (H, Dk): one decay per head and key channel."""
        return (self.num_heads, self.key_dim)
