"""What the state of one Mamba-2 layer looks like, and how many of them a request holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch


class MambaCacheMode(Enum):
    """Which states outlive the step that made them.

    `NONE` keeps the running state of each request and nothing else: no prefix is ever reused. The modes `align` (the
    running state and block boundaries that a scheduler aligns) and `all` (every block boundary) share prefixes between
    requests; they add members here when their planners exist.
    """

    NONE = "none"


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Shapes, dtypes and bytes of one Mamba-2 layer's state: a conv window and an SSM matrix per slot.

    Raises ValueError for a size below its minimum, heads that do not divide into groups, or a dtype that is not
    floating point.
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
    ssm_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Check every size once, so that nothing downstream has to."""
        for name in ("num_heads", "head_dim", "state_size", "num_groups"):
            _at_least(name, getattr(self, name), 1)
        _at_least("conv_width", self.conv_width, 2)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_groups = {self.num_groups}"
            )
        for name in ("conv_dtype", "ssm_dtype"):
            dtype = getattr(self, name)
            if not dtype.is_floating_point:
                raise ValueError(f"{name} is {dtype}; it must be a floating point type")

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
        """(W - 1 + K, conv_dim): the conv window of one slot, widened by the drafts that may be rejected."""
        return (self.conv_width - 1 + self.num_speculative_tokens, self.conv_dim)

    @property
    def ssm_shape(self) -> tuple[int, int, int]:
        """(H, P, N): the SSM matrix of one slot."""
        return (self.num_heads, self.head_dim, self.state_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot of this layer: its conv window and its SSM matrix."""
        conv = math.prod(self.conv_shape) * self.conv_dtype.itemsize
        return conv + math.prod(self.ssm_shape) * self.ssm_dtype.itemsize

    @property
    def num_speculative_blocks(self) -> int:
        """K: slots a request holds beside its running one, for the states after each draft token."""
        return self.num_speculative_tokens

    def max_memory_usage_bytes(self, mode: MambaCacheMode) -> int:
        """Bytes of this layer that one request can occupy in `mode`."""
        assert mode is MambaCacheMode.NONE
        return self.page_bytes * (1 + self.num_speculative_blocks)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the state slots of a request are laid out in its block-table row.

    Raises ValueError naming the broken rule. In mode `none` a block never ends before the request does, so `block_size`
    must equal `max_model_len`.
    """

    mode: MambaCacheMode
    block_size: int
    """Tokens that one block covers."""
    num_speculative_tokens: int
    """K, as in MambaSpec."""
    max_model_len: int
    """Tokens of the longest request."""

    def __post_init__(self) -> None:
        """Validate once."""
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.mode is MambaCacheMode.NONE and self.block_size != self.max_model_len:
            raise ValueError(
                f"block_size is {self.block_size}; in cache mode 'none' it must equal max_model_len = "
                f"{self.max_model_len}"
            )

    def columns(self) -> int:
        """Columns of a block-table row: 1 + K."""
        return 1 + self.num_speculative_tokens

    def slots_per_request(self) -> int:
        """Slots that a running request occupies at most: 1 + K."""
        return 1 + self.num_speculative_tokens


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")
