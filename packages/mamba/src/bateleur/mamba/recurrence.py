"""The interface of a recurrence: sizes of its states and its four operators. No other module depends on the kind of
recurrence.

Legend: T tokens, R rows (requests), H heads, P values of a head, W taps of the convolution, K draft tokens, L entries
of a ring.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.ops import fold_window
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.spec import CacheLayout, StatePolicy, at_least, one_of

Tensors = tuple[Tensor, ...]
State = Tensor | None
"""State of a layer; None for a pure convolution."""


class TensorSpec(NamedTuple):
    """Describes a tensor of one token or one layer: name, shape, dtype, and sign of its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sign: int = 0
    """Sign of all values: 1 for non-negative, -1 for non-positive, 0 for any. Random test values follow it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def random(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return normal random numbers, float64; `sign` 1 or -1 makes all of them positive or negative."""
        drawn = torch.empty(tuple(shape), dtype=torch.float64, device=generator.device)
        return self.randomize_(drawn, generator)

    def randomize_(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Fill `tensor` with normal random numbers, made all positive or all negative if `sign` is 1 or -1."""
        tensor.normal_(generator=generator)
        return tensor.abs_().mul_(self.sign) if self.sign else tensor


class FoldBatch(NamedTuple):
    """Entries of rings (later inputs) to add to saved states, all (requests,) int64; see `Recurrence.fold`.

    The saved state is read from slot `src`, and the new one written to slot `dst`; `dst` 0 skips a request.
    """

    ring_row: Tensor
    """Request row of the ring and of the request conv window."""
    ring_start: Tensor
    """Tokens in the saved state. The first ring entry after the saved state is ring_start % L."""
    counts: Tensor
    """Number of ring entries to fold."""
    src: Tensor
    """Slot of the saved state; 0 for a zero state."""
    dst: Tensor
    """Slot of the new saved state, which may be `src`."""
    page_offset: Tensor
    """First entry of the request conv window that belongs to the new saved state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence(ABC):
    """Describes a recurrence after a causal convolution: tensors of its state, ring and parameters, and its operators.

    It has no tensors itself: a subclass is a frozen dataclass of sizes. Layers with equal recurrences share one state
    tensor. `Mixer` runs the convolution. The defaults are those of a pure convolution: the operators return `channels`
    unchanged, `fold` copies conv windows, and the state is None.

    Operators follow the conventions of `bateleur.mamba.ops`. No two rows share a ring, except row 0.

    Raises ValueError for a size that is not a whole number or is below its minimum, a dtype that is not floating point,
    and a policy that is not a `StatePolicy`.
    """

    conv_activation: ClassVar[str] = "silu"
    """Activation after the convolution: "silu" or "none"."""

    conv_width: int = 4
    """W: taps of the causal convolution."""
    num_speculative_tokens: int = 0
    """K: maximum number of draft tokens of a step."""
    conv_dtype: torch.dtype = torch.bfloat16
    """Dtype of conv windows and activations."""
    ssm_dtype: torch.dtype = torch.float32
    """Dtype of states."""
    policy: StatePolicy = StatePolicy.SLOTS

    def __post_init__(self) -> None:
        at_least("conv_width", self.conv_width, 2)
        at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        for name, dtype in {"conv_dtype": self.conv_dtype, "ssm_dtype": self.ssm_dtype}.items():
            if not dtype.is_floating_point:
                raise ValueError(f"{name} is {dtype}; it must be a floating point type")
        one_of("policy", self.policy, StatePolicy)

    @property
    @abstractmethod
    def conv_dim(self) -> int:
        """Channels of the convolution."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one slot: (heads, values, keys); () for a pure convolution, the default."""
        return ()

    @property
    @abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output of one token: (heads, values of a head)."""

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """Inputs of one token besides the convolved channels, as the projection returns them; by default none."""
        return ()

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Parameters of one layer, float32 for any model dtype, because rounding would accumulate over a sequence."""
        return ()

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """Tensors that a ring stores for each token (state policy FOLD); a fold updates the saved state from them."""
        return ()

    def scan(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, chunks: PrefillChunks, chunk_size: int,
        read: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run the recurrence over prefills.

        Args:
            params: a tensor for each entry of `parameters`.
            channels: (T, conv_dim), after the convolution.
            gates: (T, *shape) for each of `gates`, raw.
            state: (slots, *state_shape), updated in place; None for a pure convolution.
            chunks: chunks of the prefills; the state after chunk c is written to slot `chunks.chunk_write[c]`.
            chunk_size: maximum number of tokens of a chunk.
            read: (prefills,) state slot of the initial state of each request.

        Returns y (T, *output_shape), in the dtype of `channels`.
        """
        return self._unless_state(channels, state)

    def update(self, params: Tensors, channels: Tensor, gates: Tensors, state: State, rows: MambaMetadata) -> Tensor:
        """Run decodes of 1 to 1 + K tokens (K drafts), state policy SLOTS (a state per token). `rows.plan`: `SlotPlan`.

        A request starts from slot `ssm_read`, and the state after its token i is written to slot `ssm_write[:, i]`.
        Other arguments and result as in `scan`.
        """
        return self._unless_state(channels, state)

    def replay(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, ring: Tensors, rows: MambaMetadata
    ) -> Tensor:
        """Run decodes of 1 to 1 + K tokens (K drafts), state policy FOLD (writes no state). `rows.plan`: `ReplayPlan`.

        The state before a request's tokens is the saved state in `slot` updated with `ring_len` of the L entries of
        ring `request_row`. Entry j is at (ring_start + j) % L. The tokens are appended to the ring. The caller counts
        the accepted ones, and a later step overwrites the others.

        ring: (rows, L, *shape) for each of `ring_entry`. Other arguments and result as in `scan`.
        """
        return self._unless_state(channels, state)

    def fold(
        self, params: Tensors, conv: Tensor, state: State, request_conv: Tensor, ring: Tensors, batch: FoldBatch
    ) -> None:
        """Update saved states with the first `counts` entries of the rings of later inputs, in several layers at once.

        Writes state[dst] = state[src] updated with the entries, and conv[dst] = the W - 1 inputs (W taps) of
        request_conv[ring_row] from `page_offset` on. The rings are not changed.

        Args:
            params, state, ring: as in `replay`, with a leading dimension of layers.
            conv: (layers, slots, W - 1, conv_dim).
            request_conv: (layers, rows, W - 1 + drafts, conv_dim).
            batch: requests to fold, with their slots and rings.
        """
        fold_window(self._unless_state(conv, state), request_conv, batch.ring_row, batch.dst, batch.page_offset)

    def _unless_state(self, result: Tensor, state: State) -> Tensor:
        if state is not None:
            raise NotImplementedError(f"{type(self).__name__} has a state: define scan, update, replay and fold")
        return result

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of operators' arithmetic and of computed ring entries: float32, or float64 for float64 inputs."""
        return torch.float64 if self.conv_dtype == torch.float64 else torch.float32

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the conv window (last inputs) of one state slot: (W - 1, conv_dim).

        With the state policy SLOTS it has K more entries, for draft tokens that may be rejected.
        """
        return (self.conv_width - 1 + self.num_speculative_blocks, self.conv_dim)

    @property
    def request_conv_shape(self) -> tuple[int, int]:
        """Shape of a request's conv window with drafts, state policy FOLD: (taps - 1 + drafts, conv_dim)."""
        return (self.conv_width - 1 + self.num_speculative_tokens, self.conv_dim)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state; 0 for a pure convolution."""
        return math.prod(self.state_shape) * self.ssm_dtype.itemsize if self.state_shape else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of the conv window and the state of one state slot of this layer."""
        return math.prod(self.conv_shape) * self.conv_dtype.itemsize + self.state_bytes

    @property
    def request_conv_bytes(self) -> int:
        """Bytes of a running request's own conv window; 0 for the state policy SLOTS (window in the state slot)."""
        folds = self.policy is StatePolicy.FOLD
        return math.prod(self.request_conv_shape) * self.conv_dtype.itemsize if folds else 0

    def ring_bytes(self, capacity: int) -> int:
        """Bytes of the ring of one running request, with `capacity` entries; 0 for state policy SLOTS (no rings)."""
        return capacity * sum(each.nbytes for each in self.ring_entry) if self.policy is StatePolicy.FOLD else 0

    @property
    def num_speculative_blocks(self) -> int:
        """State slots per request for states after draft tokens: one per draft; 0 for the state policy FOLD."""
        return self.num_speculative_tokens if self.policy is StatePolicy.SLOTS else 0

    def max_memory_usage_bytes(self, layout: CacheLayout) -> int:
        """Maximum bytes of this layer that a running request uses and does not share; shared slots are not counted.

        Raises ValueError if `layout` has another policy or another number of draft tokens.
        """
        for name in ("policy", "num_speculative_tokens"):
            mine, theirs = getattr(self, name), getattr(layout, name)
            if mine != theirs:
                raise ValueError(f"layout.{name} is {theirs}; the spec has {mine}")
        row = self.ring_bytes(layout.ring_capacity) + self.request_conv_bytes
        return layout.slots_per_request() * self.page_bytes + row
