"""How the states of a request are laid out, in every mode and policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Integral


class MambaCacheMode(Enum):
    """Which states outlive the step that made them, so that other requests may start from them."""

    NONE = "none"
    """The running state of each request and nothing else: no prefix is ever reused."""
    ALIGN = "align"
    """The states at the ends of prompts and at the newest block boundary."""
    ALL = "all"
    """The state at every block boundary."""


class StatePolicy(Enum):
    """How a step with draft tokens keeps the states it may have to return to."""

    SLOTS = "slots"
    """A state after every token of the step: 1 + K slots."""
    FOLD = "fold"
    """One state, and a ring of the inputs since: accepted tokens are folded into the state, rejected ones never are."""


class PromptScan(Enum):
    """Which kernels scan prompts, where a recurrence has several."""

    OWN = "own"
    """Those of `bateleur.mamba.ops`, in the form for the device."""
    FLA = "fla"
    """On CUDA those of fla-core (the extra `fla`), in steps where no state inside a row is kept; else `OWN`."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Which column of a request's block-table row holds which state.

    The state after t tokens lies in column (t - 1) // block_size, for reading, for writing and for prefix hits; after
    0 tokens it is zero and lies nowhere. A column may be published to other requests when it holds the state, and the
    conv window, after exactly (column + 1) * block_size tokens, and is never written again.

    Under SLOTS a step that verifies drafts begins at the column of its last token and leaves the state after each of
    its tokens in the columns from there on, so K columns follow the last block; `plan_copy` then copies what belongs
    to a boundary. In mode NONE the columns are 0 to K. Under FOLD nothing follows: see `plan_fold`.

    Raises ValueError naming the broken rule: in mode NONE a block never ends before the request does, so `block_size`
    equals `max_model_len`; in the others a step crosses one boundary at most, so `block_size` is at least 1 + K; and a
    ring holds what a fold may leave and a whole step behind it, 1 + 2 K tokens. Also for a mode or a policy that is no
    member of its enumeration, and for a number that is not whole.
    """

    mode: MambaCacheMode
    block_size: int
    """Tokens that one block covers."""
    num_speculative_tokens: int
    """K, as in `Recurrence`."""
    max_model_len: int
    """Tokens of the longest request."""
    policy: StatePolicy = StatePolicy.SLOTS
    ring_capacity: int = 16
    """Tokens that a ring holds; only FOLD has rings."""
    steps_ahead: int = 0
    """Steps that a host plans before it knows what came of those before them: 0 or 1."""

    def __post_init__(self) -> None:
        """Validate once."""
        at_least("max_model_len", self.max_model_len, 1)
        at_least("block_size", self.block_size, 1)
        at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        at_least("ring_capacity", self.ring_capacity, 1)
        at_least("steps_ahead", self.steps_ahead, 0)
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
                f"{1 + 2 * drafts}: what a fold may leave, and a whole step"
            )

    def columns(self) -> int:
        """Columns of a block-table row: a block each, and K more under SLOTS; 1 + K and 1 in mode NONE."""
        return -(-self.max_model_len // self.block_size) + self.num_speculative_blocks

    @property
    def num_speculative_blocks(self) -> int:
        """Columns that a step with drafts may write behind that of its last token: K, or 0 under FOLD."""
        return self.num_speculative_tokens if self.policy is StatePolicy.SLOTS else 0

    def slots_per_request(self) -> int:
        """Slots that a running request holds at most and shares with nobody.

        The one it reads and those a step may write: 2 + K under SLOTS, 2 under FOLD. In mode NONE, where no slot is
        ever left for the next, the one it reads is among those it writes. Slots that it has published are the prefix
        cache's, and so are those of boundaries that a prompt's step fills for others. A host that plans a step before
        it knows what the last one accepted holds one more, and under SLOTS so does a prompt that goes on behind drafts.
        """
        if self.mode is MambaCacheMode.NONE:
            return 1 + self.num_speculative_blocks
        return min(2 + self.num_speculative_blocks + self.steps_ahead, self.columns())

    def column(self, num_tokens: int) -> int:
        """The column that holds the state after `num_tokens` tokens; -1 for none."""
        return (num_tokens - 1) // self.block_size

    def max_hit_tokens(self, prompt_len: int) -> int:
        """Tokens of the longest prefix that a prompt may skip: whole blocks, and one token left to compute."""
        if self.mode is MambaCacheMode.NONE:
            return 0
        return max(prompt_len - 1, 0) // self.block_size * self.block_size


def one_of(name: str, value: object, kind: type[Enum]) -> None:
    """Raise ValueError for what is no member of `kind`."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(f'{kind.__name__}.{each.name}' for each in kind)}"
        )


def at_least(name: str, value: int, minimum: int) -> None:
    """Raise ValueError for a number that is not whole, or too small."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")
