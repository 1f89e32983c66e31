"""The gated delta rule (Qwen3-Next, Qwen3.5) and Kimi delta attention."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.ops import delta_fold_ring, delta_replay_update, delta_scan_varlen, delta_state_update
from bateleur.mamba.ops.fla import delta_scan_fla
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.recurrence import FoldBatch, Recurrence, State, Tensors, TensorSpec
from bateleur.mamba.spec import PromptScan, at_least


class DeltaRule(Recurrence):
    """Base class of the delta rules: S <- exp(g) S, u = beta (v - S k), S <- S + u k^T, o = S q, for each value head.

    k and q are normalized to length 1, and q is scaled by key_dim ** -0.5. g = A softplus(a + dt_bias), and beta =
    beta_scale * sigmoid(b). The channels of the convolution are q | k | v. A ring entry is k, the corrected value u,
    and g. Because u is stored, a later state is a plain sum over the ring.
    """

    __slots__ = ()

    decays_by_channel: ClassVar[bool]
    """Whether each key channel has its own decay."""
    key_dim: int  # fields of the subclasses
    value_dim: int

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Number of key heads G and of value heads H, a multiple of G: (G, H)."""

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key and of a value, (Dk, Dv)."""
        return (self.key_dim, self.value_dim)

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Shape of the log decay g of a token: (H,) or (H, key channels)."""
        return (self.heads[1], self.key_dim) if self.decays_by_channel else self.heads[1:]

    @property
    def beta_scale(self) -> float:
        """Factor of the writing strength: beta = beta_scale * sigmoid(b)."""
        return 1.0

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.head_dims
        return 2 * key_heads * key_dim + value_heads * value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of one slot, (H, Dv, Dk): value heads, value and key channels."""
        (_, value_heads), (key_dim, value_dim) = self.heads, self.head_dims
        return (value_heads, value_dim, key_dim)

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the output of one token, (H, Dv): value heads, value channels."""
        return self.state_shape[:2]

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """Inputs of one token besides the channels: a, the raw decay, and b, the raw writing strength."""
        return (
            TensorSpec("a", self.decay_shape, self.conv_dtype),
            TensorSpec("b", self.state_shape[:1], self.conv_dtype),
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Parameters of one layer: A (negative), and the bias of a."""
        return (
            TensorSpec("A", self.state_shape[:1], torch.float32, -1),
            TensorSpec("dt_bias", self.decay_shape, torch.float32),
        )

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """Tensors of a ring entry: k before normalization, the corrected value u, and the log decay g."""
        return (
            TensorSpec("k", (self.heads[0], self.head_dims[0]), self.conv_dtype),
            TensorSpec("u", self.output_shape, self.compute_dtype),
            TensorSpec("g", self.decay_shape, self.compute_dtype, -1),
        )

    def split(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels (T, conv_dim) into views q and k (T, key heads, Dk), and v (T, value heads, Dv)."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.head_dims
        keys = key_heads * key_dim
        q, k, v = channels.split_with_sizes([keys, keys, value_heads * value_dim], -1)
        of_keys = (-1, key_heads, key_dim)
        return q.view(of_keys), k.view(of_keys), v.view(-1, value_heads, value_dim)

    def scan(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, chunks: PrefillChunks, chunk_size: int,
        read: Tensor,
    ) -> Tensor:  # fmt: skip
        """`Recurrence.scan` for the delta rule, with the kernels of fla-core if `chunks.fla_tiles` is set."""
        assert state is not None
        (A, dt_bias), (a, b), (q, k, v) = params, gates, self.split(channels)
        if chunks.prompt_scan is PromptScan.FLA:
            return delta_scan_fla(q, k, v, a, b, A, dt_bias, state, chunks, read, self.beta_scale)
        return delta_scan_varlen(
            q, k, v, a, b, A, dt_bias, state, chunks.query_start_loc, chunks.chunk_start_loc, chunks.chunk_row,
            chunks.row_chunk_loc, chunks.max_chunks_per_row, chunk_size, read, chunks.chunk_write, self.beta_scale,
        )  # fmt: skip

    def update(self, params: Tensors, channels: Tensor, gates: Tensors, state: State, rows: MambaMetadata) -> Tensor:
        """`Recurrence.update` for the delta rule: decodes that write the state after each token to a state slot."""
        plan = rows.plan
        assert state is not None
        assert isinstance(plan, SlotPlan)
        (A, dt_bias), (a, b), (q, k, v) = params, gates, self.split(channels)
        return delta_state_update(
            state, q, k, v, a, b, A, dt_bias, rows.query_start_loc, rows.max_query_len, plan.ssm_read, plan.ssm_write,
            self.beta_scale,
        )  # fmt: skip

    def replay(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, ring: Tensors, rows: MambaMetadata
    ) -> Tensor:
        """`Recurrence.replay` for the delta rule: decodes from saved states and rings; appends the new tokens."""
        plan, row = rows.plan, rows.request_row
        assert state is not None
        assert row is not None
        assert isinstance(plan, ReplayPlan)
        (A, dt_bias), (a, b), (q, k, v), (ring_k, ring_u, ring_g) = params, gates, self.split(channels), ring
        return delta_replay_update(
            state, ring_k, ring_u, ring_g, q, k, v, a, b, A, dt_bias, rows.query_start_loc, rows.max_query_len,
            plan.slot, row, plan.ring_start, plan.ring_len, self.beta_scale,
        )  # fmt: skip

    def fold(
        self, params: Tensors, conv: Tensor, state: State, request_conv: Tensor, ring: Tensors, batch: FoldBatch
    ) -> None:
        """`Recurrence.fold` for the delta rule: adds ring entries to saved states, and copies conv windows."""
        assert state is not None
        k, u, g = ring
        delta_fold_ring(state, conv, request_conv, k, u, g, *batch)


@dataclass(frozen=True, slots=True)
class GatedDelta(DeltaRule):
    """The delta rule with one decay per value head. Source: arXiv 2412.06464.

    Raises ValueError as `Recurrence` does, and if num_value_heads is not a multiple of num_key_heads.
    """

    decays_by_channel: ClassVar[bool] = False

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
        """Number of key heads G and of value heads H: (G, H)."""
        return (self.num_key_heads, self.num_value_heads)

    @property
    def beta_scale(self) -> float:
        """Factor of the writing strength beta = beta_scale * sigmoid(b): 1, or 2 with `allow_neg_eigval`."""
        return 2.0 if self.allow_neg_eigval else 1.0


@dataclass(frozen=True, slots=True)
class KimiDelta(DeltaRule):
    """The delta rule with one decay per key channel and head. Source: arXiv 2510.26692.

    Raises ValueError as `Recurrence` does.
    """

    decays_by_channel: ClassVar[bool] = True

    num_heads: int
    """H: heads of queries, keys and values."""
    key_dim: int
    """Dk: channels of a key."""
    value_dim: int
    """Dv: channels of a value."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "key_dim", "value_dim"):
            at_least(name, getattr(self, name), 1)
        Recurrence.__post_init__(self)

    @property
    def heads(self) -> tuple[int, int]:
        """Number of key heads and of value heads, which are equal: (H, H)."""
        return (self.num_heads, self.num_heads)
