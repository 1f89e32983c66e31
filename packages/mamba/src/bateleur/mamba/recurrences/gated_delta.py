"""The gated delta rule (Qwen3-Next, Qwen3.5): one decay per value head."""

from __future__ import annotations

from dataclasses import dataclass

from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.recurrences.delta_rule import DeltaRule
from bateleur.mamba.spec import at_least


@dataclass(frozen=True, slots=True)
class GatedDelta(DeltaRule):
    """The delta rule with one decay per value head. Source: arXiv 2412.06464.

    Raises ValueError as `Recurrence` does, and if num_value_heads is not a multiple of num_key_heads.
    """

    num_key_heads: int
    """G: heads of queries and keys."""
    num_value_heads: int
    """H: heads of values and of the state; value head h uses key head h // (H / G)."""
    key_dim: int
    """Dk: channels of a key."""
    value_dim: int
    """Dv: channels of a value."""
    allow_neg_eigval: bool = False
    """Use beta = 2 sigmoid(b), so that a state can change its sign along a key. Source: arXiv 2411.12537."""

    def __post_init__(self) -> None:
        """Validate the fields; raises ValueError."""
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim"):
            at_least(name, getattr(self, name), 1)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads is {self.num_value_heads}; it must be a multiple of num_key_heads = "
                f"{self.num_key_heads}"
            )
        Recurrence.__post_init__(self)

    @property
    def heads(self) -> tuple[int, int]:
        """Number of key heads and of value heads, (G, H)."""
        return (self.num_key_heads, self.num_value_heads)

    @property
    def lanes(self) -> tuple[int, int]:
        """Channels of a key and of a value, (Dk, Dv)."""
        return (self.key_dim, self.value_dim)

    @property
    def decay_shape(self) -> tuple[int]:
        """Shape of the log decay of a token, (H,): one decay per value head."""
        return (self.num_value_heads,)

    @property
    def beta_scale(self) -> float:
        """Factor of sigmoid(b): 1, or 2 with `allow_neg_eigval`."""
        return 2.0 if self.allow_neg_eigval else 1.0
