"""What a recurrence is: all that planners, pools, builders, byte counts and engines know of one.

Legend: T tokens, R rows, H heads, P values of a head, W taps of the convolution, K draft tokens, L entries of a ring.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.prompts import Prompts
from bateleur.mamba.spec import CacheLayout, StatePolicy, at_least, one_of
from bateleur.mamba.step_metadata import MambaMetadata

Tensors = tuple[Tensor, ...]


class TensorSpec(NamedTuple):
    """A tensor by name, of one token or of one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sign: int = 0
    """Of its values: 1 where none is negative, -1 where none is positive, so that checks draw what may occur."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def random(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Normal numbers of its sign, float64 on the generator's device; `shape` may have more in front."""
        drawn = torch.empty(tuple(shape), dtype=torch.float64, device=generator.device)
        self.randomize_(drawn, generator)
        return drawn

    def randomize_(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a tensor with normal numbers of its sign, in its own dtype; `generator` is on the tensor's device."""
        tensor.normal_(generator=generator)
        if self.sign:
            tensor.abs_().mul_(self.sign)


class FoldRows(NamedTuple):
    """What each row folds, all (R,) int64. A row with `dst` 0 folds nothing, whatever its other fields hold."""

    ring_row: Tensor
    """Row of its ring and of its live window."""
    ring_start: Tensor
    """Tokens in the checkpoint: entry ring_start % L of the ring is the first one behind it."""
    counts: Tensor
    """Entries to fold."""
    src: Tensor
    """Slot of the checkpoint; 0 for a zero state."""
    dst: Tensor
    """Slot of the new one, which may be `src`."""
    page_offset: Tensor
    """Entry of the live window where the window at the new checkpoint begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence(ABC):
    """A layer's recurrence behind a causal convolution: sizes of what it keeps, and its operators.

    A subclass is a frozen dataclass of its sizes, equal where they are equal: layers of equal recurrences lie in one
    tensor. It says what the tensors of a state, a ring and a layer are, and computes with them; `Mixer` does the
    convolution. A pure convolution has the `state_shape` (), no state tensor (its operators get None) and an empty
    ring.

    The operators are called with flat tokens, one row after the other, and with slots and rows on the device:

    - Slot 0 is null: reading it is reading a zero state, writing it is dropping the write. A row without tokens
      writes nothing, and outputs of tokens that belong to no row are unspecified.
    - They never wait for the device, and tensors may be strided views, as a split of a projection makes them.
    - No row writes a slot that another row reads or writes, and no two rows share a ring, but slot 0 and row 0.

    Raises ValueError for a size that is no whole number or below its minimum, a dtype that is not floating point, or a
    policy that is no `StatePolicy`.
    """

    conv_activation: ClassVar[str] = "silu"
    """What follows the convolution: "silu" or "none"."""

    conv_width: int = 4
    """W: taps of the causal convolution."""
    num_speculative_tokens: int = 0
    """K: draft tokens a step may verify beside the one that is certain."""
    conv_dtype: torch.dtype = torch.bfloat16
    """Of conv windows and of activations."""
    ssm_dtype: torch.dtype = torch.float32
    """Of states."""
    policy: StatePolicy = StatePolicy.SLOTS

    def __post_init__(self) -> None:
        """Check every size once, so that nothing downstream has to."""
        at_least("conv_width", self.conv_width, 2)
        at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        for name in ("conv_dtype", "ssm_dtype"):
            dtype = getattr(self, name)
            if not dtype.is_floating_point:
                raise ValueError(f"{name} is {dtype}; it must be a floating point type")
        one_of("policy", self.policy, StatePolicy)

    # --- what it keeps --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def conv_dim(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The state of one slot: (H, values, keys); () for a pure convolution, which has none."""

    @property
    @abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """What comes out of a token: (H, P)."""

    @property
    @abstractmethod
    def gates(self) -> tuple[TensorSpec, ...]:
        """What a token brings beside the channels of the convolution, as the projection makes it."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Of a layer, in float32 whatever the model's dtype: a recurrence multiplies them over a whole sequence."""

    @property
    @abstractmethod
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """What a ring keeps of a token under FOLD: enough to advance a state by it."""

    # --- its operators --------------------------------------------------------------------------------------

    @abstractmethod
    def scan(
        self,
        params: Tensors,
        channels: Tensor,
        gates: Tensors,
        state: Tensor | None,
        prompts: Prompts,
        chunk_size: int,
        read: Tensor,
    ) -> Tensor:
        """Prompts, each from the state in its slot `read` (Pf,), leaving the states after chunks as `prompts` says.

        params: a tensor for each of `parameters`; channels (T, conv_dim), behind the convolution; gates: (T, *shape)
        for each of `gates`, raw; state (slots, *state_shape). Returns y (T, *output_shape), in the channels' dtype.
        """

    @abstractmethod
    def update(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: Tensor | None, rows: MambaMetadata
    ) -> Tensor:
        """Decode rows of 1 to 1 + K tokens under SLOTS, from `ssm_read` of their plan, which is a `SlotPlan`.

        The state after token i of a row goes to `ssm_write[:, i]`. Otherwise as `scan`.
        """

    @abstractmethod
    def replay(
        self,
        params: Tensors,
        channels: Tensor,
        gates: Tensors,
        state: Tensor | None,
        ring: Tensors,
        rows: MambaMetadata,
    ) -> Tensor:
        """The same rows under FOLD: from a checkpoint and a ring, neither of which they advance.

        The plan is a `ReplayPlan`: the state before a row's tokens is that of `slot` advanced by `ring_len` entries of
        row `request_row` of the rings, entry j of them at (ring_start + j) % L. The entries of the tokens are written
        behind these; the caller counts those that are accepted, and a later step overwrites the others. ring: (rows,
        L, *shape) for each of `ring_entry`.
        """

    @abstractmethod
    def fold(
        self, params: Tensors, conv: Tensor, state: Tensor | None, live: Tensor, ring: Tensors, at: FoldRows
    ) -> None:
        """Advance checkpoints by the first `counts` entries of their rings, in some layers at once.

        All tensors have the layers in front, those of `params` too: conv (layers, slots, W - 1, conv_dim), live
        (layers, rows, W - 1 + K, conv_dim). state[dst] becomes state[src] after the entries, and conv[dst] the W - 1
        inputs of live[ring_row] from `page_offset` on. The rings are not changed.
        """

    # --- what follows ---------------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """What operators compute in, and keep in rings what is not an input: float32, or float64 beside float64."""
        return torch.float64 if self.conv_dtype == torch.float64 else torch.float32

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
    def state_bytes(self) -> int:
        """Bytes of one state; 0 for a pure convolution."""
        return math.prod(self.state_shape) * self.ssm_dtype.itemsize if self.state_shape else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot of this layer: its conv window and its state."""
        return math.prod(self.conv_shape) * self.conv_dtype.itemsize + self.state_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the live conv window of one running request; 0 under SLOTS, whose windows lie in the slots."""
        if self.policy is StatePolicy.SLOTS:
            return 0
        return math.prod(self.live_shape) * self.conv_dtype.itemsize

    def ring_bytes(self, capacity: int) -> int:
        """Bytes of the ring of one running request: an entry for each of `capacity` tokens; 0 under SLOTS."""
        if self.policy is StatePolicy.SLOTS:
            return 0
        return capacity * sum(each.nbytes for each in self.ring_entry)

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
