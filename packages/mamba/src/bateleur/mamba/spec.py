"""What the state of one Mamba-2 layer looks like, and how the states of a request are laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from numbers import Integral

import torch


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


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Shapes, dtypes and bytes of one Mamba-2 layer's state: a conv window and an SSM matrix per slot.

    Raises ValueError for a size that is no whole number or below its minimum, heads that do not divide into groups, a
    dtype that is not floating point, or a policy that is no `StatePolicy`.
    """

    num_heads: int
    """H: heads of the layer."""
    head_dim: int
    """P: channels of a head."""
    state_size: int
    """N: state entries per channel."""
    num_groups: int
    """G: groups that share B and C; head h uses group h // (H / G)."""
    conv_width: int = 4
    """W: taps of the causal convolution."""
    num_speculative_tokens: int = 0
    """K: draft tokens a step may verify beside the one that is certain."""
    conv_dtype: torch.dtype = torch.bfloat16
    """Of conv windows and of the inputs in a ring: the dtype of activations."""
    ssm_dtype: torch.dtype = torch.float32
    policy: StatePolicy = StatePolicy.SLOTS

    def __post_init__(self) -> None:
        """Check every size once, so that nothing downstream has to."""
        for name in ("num_heads", "head_dim", "state_size", "num_groups"):
            at_least(name, getattr(self, name), 1)
        at_least("conv_width", self.conv_width, 2)
        at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_groups = {self.num_groups}"
            )
        for name in ("conv_dtype", "ssm_dtype"):
            dtype = getattr(self, name)
            if not dtype.is_floating_point:
                raise ValueError(f"{name} is {dtype}; it must be a floating point type")
        _one_of("policy", self.policy, StatePolicy)

    @property
    def inner_size(self) -> int:
        """H * P: channels that the scan sees."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """H * P + 2 * G * N: channels of the convolution, in the order x, B, C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The conv window of one slot: (W - 1 + K, conv_dim), or (W - 1, conv_dim) under FOLD.

        K entries more hold the tokens that may be rejected; under FOLD those live in the request's live window.
        """
        return (self.conv_width - 1 + self.num_speculative_blocks, self.conv_dim)

    @property
    def live_shape(self) -> tuple[int, int]:
        """(W - 1 + K, conv_dim): the live conv window of one running request under FOLD."""
        return (self.conv_width - 1 + self.num_speculative_tokens, self.conv_dim)

    @property
    def ssm_shape(self) -> tuple[int, int, int]:
        """(H, P, N): the SSM matrix of one slot."""
        return (self.num_heads, self.head_dim, self.state_size)

    @property
    def state_bytes(self) -> int:
        """Bytes of one SSM matrix."""
        return math.prod(self.ssm_shape) * self.ssm_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot of this layer: its conv window and its SSM matrix."""
        return math.prod(self.conv_shape) * self.conv_dtype.itemsize + self.state_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the live conv window of one running request; 0 under SLOTS, whose windows lie in the slots."""
        if self.policy is StatePolicy.SLOTS:
            return 0
        return math.prod(self.live_shape) * self.conv_dtype.itemsize

    def ring_bytes(self, capacity: int) -> int:
        """Bytes of the ring of one running request: x, B and the step of each token; 0 under SLOTS."""
        if self.policy is StatePolicy.SLOTS:
            return 0
        entry = (self.inner_size + self.num_groups * self.state_size) * self.conv_dtype.itemsize
        return capacity * (entry + self.num_heads * self.step_dtype.itemsize)

    @property
    def step_dtype(self) -> torch.dtype:
        """Of the steps in a ring: float32, and float64 beside float64 inputs."""
        return torch.float64 if self.conv_dtype == torch.float64 else torch.float32

    @property
    def num_speculative_blocks(self) -> int:
        """Slots a request holds beside its running one for the states after each draft token: K, or 0 under FOLD."""
        return self.num_speculative_tokens if self.policy is StatePolicy.SLOTS else 0

    def max_memory_usage_bytes(self, layout: CacheLayout) -> int:
        """Bytes of this layer that a running request can occupy and no other request shares, in any step.

        Pages it has published, or fills in order to publish them, are the prefix cache's, and not counted.

        Raises ValueError for a layout of another policy or of another number of draft tokens.
        """
        for name in ("policy", "num_speculative_tokens"):
            mine, theirs = getattr(self, name), getattr(layout, name)
            if mine != theirs:
                raise ValueError(f"layout.{name} is {theirs}; the spec has {mine}")
        row = self.ring_bytes(layout.ring_capacity) + self.live_bytes
        return layout.slots_per_request() * self.page_bytes + row


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
    """K, as in MambaSpec."""
    max_model_len: int
    """Tokens of the longest request."""
    policy: StatePolicy = StatePolicy.SLOTS
    ring_capacity: int = 16
    """Tokens that a ring holds; only FOLD has rings."""

    def __post_init__(self) -> None:
        """Validate once."""
        at_least("max_model_len", self.max_model_len, 1)
        at_least("block_size", self.block_size, 1)
        at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        at_least("ring_capacity", self.ring_capacity, 1)
        _one_of("mode", self.mode, MambaCacheMode)
        _one_of("policy", self.policy, StatePolicy)
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
        cache's, and so are those of boundaries that a prompt's step fills for others. Under SLOTS a host that plans a
        step before it knows what the last one accepted holds one more, and so does a prompt that goes on behind drafts.
        """
        if self.mode is MambaCacheMode.NONE:
            return 1 + self.num_speculative_blocks
        return min(2 + self.num_speculative_blocks, self.columns())

    def column(self, num_tokens: int) -> int:
        """The column that holds the state after `num_tokens` tokens; -1 for none."""
        return (num_tokens - 1) // self.block_size

    def max_hit_tokens(self, prompt_len: int) -> int:
        """Tokens of the longest prefix that a prompt may skip: whole blocks, and one token left to compute."""
        if self.mode is MambaCacheMode.NONE:
            return 0
        return max(prompt_len - 1, 0) // self.block_size * self.block_size


def _one_of(name: str, value: object, kind: type[Enum]) -> None:
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
