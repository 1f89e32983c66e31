"""Mamba-2: one scalar decay per head, and an outer product of input and B per token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.ops import fold_ring, replay_update, selective_state_update, ssd_scan_varlen
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.recurrence import FoldBatch, Recurrence, State, Tensors, TensorSpec
from bateleur.mamba.spec import at_least


@dataclass(frozen=True, slots=True)
class Mamba2(Recurrence):
    """Mamba-2: S <- exp(A dt) S + dt x B^T, y = S C + D x, dt = clamp(softplus(raw dt + dt_bias), dt_min, dt_max).

    The channels of the convolution are x | B | C. Source: arXiv 2405.21060.

    Raises ValueError as `Recurrence` does, if num_heads is not a multiple of num_groups, and unless 0 <= dt_min <=
    dt_max.
    """

    num_heads: int
    """H: heads of the layer."""
    head_dim: int
    """P: channels of a head."""
    state_size: int
    """N: state entries per channel."""
    num_groups: int
    """G: groups of heads that share B and C; head h is in group h // (H / G)."""
    dt_min: float = 0.0
    dt_max: float = math.inf

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups"):
            at_least(name, getattr(self, name), 1)
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads is {self.num_heads}; it must be a multiple of num_groups = {self.num_groups}")
        if not 0.0 <= self.dt_min <= self.dt_max:
            raise ValueError(f"dt limits are ({self.dt_min}, {self.dt_max}); they must satisfy 0 <= dt_min <= dt_max")
        Recurrence.__post_init__(self)

    @property
    def inner_size(self) -> int:
        """Channels of x: heads times head channels."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: heads * head channels (x), and twice groups * state entries (B, C)."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of one slot, (H, P, N): heads, head channels, state entries."""
        return (self.num_heads, self.head_dim, self.state_size)

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the output of one token: (heads, head channels)."""
        return (self.num_heads, self.head_dim)

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """Input of one token besides the channels: dt, the raw step size."""
        return (TensorSpec("dt", (self.num_heads,), self.conv_dtype),)

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Parameters of one layer: A (negative), D, and the bias of dt."""
        signs = {"A": -1, "D": 0, "dt_bias": 0}
        return tuple(TensorSpec(name, (self.num_heads,), torch.float32, sign) for name, sign in signs.items())

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """Tensors of a ring entry: x, the step size dt after softplus and clamp, and B."""
        return (
            TensorSpec("x", self.output_shape, self.conv_dtype),
            TensorSpec("dt", (self.num_heads,), self.compute_dtype, 1),
            TensorSpec("B", (self.num_groups, self.state_size), self.conv_dtype),
        )

    def split(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels (T, conv_dim) into views x (T, heads, head_dim), and B and C (T, groups, state_size)."""
        lanes = self.num_groups * self.state_size
        x, B, C = channels.split_with_sizes([self.num_heads * self.head_dim, lanes, lanes], -1)
        groups = (-1, self.num_groups, self.state_size)
        return x.view(-1, self.num_heads, self.head_dim), B.view(groups), C.view(groups)

    def scan(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, chunks: PrefillChunks, chunk_size: int,
        read: Tensor,
    ) -> Tensor:  # fmt: skip
        """`Recurrence.scan` for Mamba-2: prefills, which write the state after each chunk to a state slot."""
        assert state is not None
        (A, D, dt_bias), (x, B, C) = params, self.split(channels)
        return ssd_scan_varlen(
            x, gates[0], A, B, C, D, dt_bias, state, chunks.query_start_loc, chunks.chunk_start_loc,
            chunks.chunk_row, chunks.row_chunk_loc, chunks.max_chunks_per_row, chunk_size, read,
            chunks.chunk_write, self.dt_min, self.dt_max,
        )  # fmt: skip

    def update(self, params: Tensors, channels: Tensor, gates: Tensors, state: State, rows: MambaMetadata) -> Tensor:
        """`Recurrence.update` for Mamba-2: decodes that write the state after each token to a state slot."""
        plan = rows.plan
        assert state is not None
        assert isinstance(plan, SlotPlan)
        (A, D, dt_bias), (x, B, C) = params, self.split(channels)
        return selective_state_update(
            state, x, gates[0], A, B, C, D, dt_bias, rows.query_start_loc, rows.max_query_len,
            plan.ssm_read, plan.ssm_write, self.dt_min, self.dt_max,
        )  # fmt: skip

    def replay(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, ring: Tensors, rows: MambaMetadata
    ) -> Tensor:
        """`Recurrence.replay` for Mamba-2: decodes from saved states and rings; appends the new tokens."""
        plan, row = rows.plan, rows.request_row
        assert state is not None
        assert row is not None
        assert isinstance(plan, ReplayPlan)
        (A, D, dt_bias), (x, B, C), (ring_x, ring_dt, ring_B) = params, self.split(channels), ring
        return replay_update(
            state, ring_x, ring_dt, ring_B, x, gates[0], A, B, C, D, dt_bias, rows.query_start_loc, rows.max_query_len,
            plan.slot, row, plan.ring_start, plan.ring_len, self.dt_min, self.dt_max,
        )  # fmt: skip

    def fold(
        self, params: Tensors, conv: Tensor, state: State, request_conv: Tensor, ring: Tensors, batch: FoldBatch
    ) -> None:
        """`Recurrence.fold` for Mamba-2: adds ring entries to saved states, and copies conv windows."""
        assert state is not None
        x, dt, B = ring
        fold_ring(state, conv, request_conv, x, dt, B, params[0], *batch)
