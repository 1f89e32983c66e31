"""Cache modes, state policies, and the block-table layout of state slots."""

from dataclasses import dataclass
from enum import Enum
from numbers import Integral


class MambaCacheMode(Enum):
    """States that are kept for the prefix cache. The values are those of vLLM's `mamba_cache_mode`."""

    NONE = "none"
    """Only the running state of each request; no prefix caching."""
    ALIGN = "align"
    """The states at the ends of prompts and at the newest block boundary."""
    ALL = "all"
    """The state at every block boundary."""


class StatePolicy(Enum):
    """How a recurrent state is recovered if a step's draft tokens are rejected.

    SLOTS keeps the state after every token of the step. FOLD keeps one saved state and the inputs of later tokens,
    which takes less memory with drafts. Without drafts, SLOTS is usually faster.
    """

    SLOTS = "slots"
    """Keep the state after every token of the step, in 1 + K slots for K drafts."""
    FOLD = "fold"
    """Keep one saved state and a ring of later inputs. Only accepted inputs are folded into the state."""


class PromptScan(Enum):
    """Which kernels run a recurrence over prefills, if there are several: those of this package or of fla-core."""

    OWN = "own"
    """Kernels of `bateleur.mamba.ops`."""
    FLA = "fla"
    """Kernels of fla-core (the extra `fla`) on CUDA, in steps that keep only the last state of each row; else `OWN`."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Maps the number of tokens of a state to a column of the request's block table.

    The state after t > 0 tokens is in column (t - 1) // block_size. The state after 0 tokens is zero and has no column.
    A column holds SSM state and conv window. When it holds those after exactly (column + 1) * block_size tokens, it is
    full: it is never written again, and it may be added to the prefix cache.

    State policy SLOTS: a step with K drafts writes the state after its token i to column c + i, where c is the column
    of its last token. The table therefore has K columns after the last block. `plan_copy` then copies the state of a
    crossed boundary to its own column. In mode NONE the columns are 0 to K. FOLD has no additional columns.

    `ring_capacity`: maximum number of inputs kept after a saved state, FOLD only.
    `steps_ahead`: steps that the scheduler plans before the results of earlier steps are known.

    Raises:
        ValueError: `block_size` differs from `max_model_len` in mode NONE, or is below 1 + K in the other modes (a step
            must cross at most one boundary); `ring_capacity` is below 1 + 2 K under FOLD; a mode or policy is not a
            member of its enumeration; a number is not whole or below its minimum.
    """

    mode: MambaCacheMode
    block_size: int
    """Tokens of a block."""
    num_speculative_tokens: int
    """K, as in `Recurrence`."""
    max_model_len: int
    """Maximum number of tokens of a request."""
    policy: StatePolicy = StatePolicy.SLOTS
    ring_capacity: int = 16
    """Entries (tokens) of a ring; used only by the state policy FOLD."""
    steps_ahead: int = 0
    """Steps that the scheduler plans before the results of earlier steps are known: 0, or 1 for async scheduling."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "ring_capacity"):
            at_least(name, getattr(self, name), 1)
        for name in ("num_speculative_tokens", "steps_ahead"):
            at_least(name, getattr(self, name), 0)
        one_of("mode", self.mode, MambaCacheMode)
        one_of("policy", self.policy, StatePolicy)
        drafts = self.num_speculative_tokens
        if self.mode is MambaCacheMode.NONE:
            if self.block_size != self.max_model_len:
                raise ValueError(
                    f"block_size is {self.block_size}; in cache mode 'none' it must equal max_model_len = "
                    f"{self.max_model_len}"
                )
        elif self.block_size < 1 + drafts:
            raise ValueError(
                f"block_size is {self.block_size}; in cache mode {self.mode.value!r} it must be at least 1 + "
                f"num_speculative_tokens = {1 + drafts}, so that a step crosses one boundary at most"
            )
        if self.policy is StatePolicy.FOLD and self.ring_capacity < 1 + 2 * drafts:
            raise ValueError(
                f"ring_capacity is {self.ring_capacity}; it must be at least 1 + 2 * num_speculative_tokens = "
                f"{1 + 2 * drafts}, the entries that a fold may leave and one full step"
            )

    def columns(self) -> int:
        """Return the number of columns of a block table: one per block, plus (state policy SLOTS) one per draft."""
        return -(-self.max_model_len // self.block_size) + self.num_speculative_blocks

    @property
    def num_speculative_blocks(self) -> int:
        """Columns that a step may write after its last token's column: one per draft; 0 for the state policy FOLD."""
        return self.num_speculative_tokens if self.policy is StatePolicy.SLOTS else 0

    def slots_per_request(self) -> int:
        """Return the maximum number of slots that a running request holds and does not share.

        These are the state slot that it reads and the slots that a step may write: 2 + K (drafts) for the state policy
        SLOTS, 2 for FOLD, plus `steps_ahead`. In mode NONE a step also writes the slot that it reads. State slots in
        the prefix cache, or that a prefill fills for it, are not counted.
        """
        if self.mode is MambaCacheMode.NONE:
            return 1 + self.num_speculative_blocks
        return min(2 + self.num_speculative_blocks + self.steps_ahead, self.columns())

    def column(self, num_tokens: int) -> int:
        """Return the block-table column of the state after `num_tokens` tokens; -1 for 0 tokens."""
        return (num_tokens - 1) // self.block_size

    def max_hit_tokens(self, prompt_len: int) -> int:
        """Return the maximum prefix-cache hit in tokens: whole blocks, and less than the whole prompt."""
        if self.mode is MambaCacheMode.NONE:
            return 0
        return max(prompt_len - 1, 0) // self.block_size * self.block_size


def one_of(name: str, value: object, kind: type[Enum]) -> None:
    """Raise ValueError if `value` is not a member of `kind`."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(f'{kind.__name__}.{each.name}' for each in kind)}"
        )


def at_least(name: str, value: int, minimum: int) -> None:
    """Raise ValueError if `value` is not a whole number, or is below `minimum`."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")
