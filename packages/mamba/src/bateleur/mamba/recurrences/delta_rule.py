"""What the delta rules have in common: all but how their states decay."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.ops import delta_fold_ring, delta_replay_update, delta_scan_varlen, delta_state_update
from bateleur.mamba.ops.delta_scan.fla import scan_whole
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.prompts import Prompts
from bateleur.mamba.recurrence import FoldRows, Recurrence, Tensors, TensorSpec
from bateleur.mamba.spec import PromptScan
from bateleur.mamba.step_metadata import MambaMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(Recurrence):
    """S <- exp(g) S, u = beta (v - S k), S <- S + u k^T, o = S q, for each value head.

    k and q have length 1, q times key_dim ** -0.5; g = A softplus(a + dt_bias), beta = sigmoid(b), or twice that. The
    channels of the convolution are q | k | v. A ring keeps k, the corrected value u and g: with u any later state is a
    plain sum over it.
    """

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Key heads, and value heads, which are a multiple of these."""

    @property
    @abstractmethod
    def lanes(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""

    @property
    @abstractmethod
    def decay_shape(self) -> tuple[int, ...]:
        """Of a token's g: (H,), or (H, key channels)."""

    @property
    def beta_scale(self) -> float:
        """What sigmoid(b) is multiplied by."""
        return 1.0

    @property
    def conv_dim(self) -> int:
        """Channels of queries, keys and values."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.lanes
        return 2 * key_heads * key_dim + value_heads * value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(H, Dv, Dk)."""
        (_, value_heads), (key_dim, value_dim) = self.heads, self.lanes
        return (value_heads, value_dim, key_dim)

    @property
    def output_shape(self) -> tuple[int, int]:
        """(H, Dv)."""
        return self.state_shape[:2]

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """Raw a, of the decay, and b, of the writing strength."""
        return (
            TensorSpec("a", self.decay_shape, self.conv_dtype),
            TensorSpec("b", self.state_shape[:1], self.conv_dtype),
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """A, which is negative, and the bias of a."""
        return (
            TensorSpec("A", self.state_shape[:1], torch.float32, -1),
            TensorSpec("dt_bias", self.decay_shape, torch.float32),
        )

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """k as it comes, the corrected value u, and g."""
        return (
            TensorSpec("k", (self.heads[0], self.lanes[0]), self.conv_dtype),
            TensorSpec("u", self.output_shape, self.compute_dtype),
            TensorSpec("g", self.decay_shape, self.compute_dtype, -1),
        )

    def split(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels (T, conv_dim) as views q and k (T, G, Dk), v (T, H, Dv)."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.lanes
        keys = key_heads * key_dim
        q, k, v = channels.split_with_sizes([keys, keys, value_heads * value_dim], -1)
        of_keys = (-1, key_heads, key_dim)
        return q.view(of_keys), k.view(of_keys), v.view(-1, value_heads, value_dim)

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
        """`delta_scan_varlen`, or fla-core's kernels in its place where `prompts` say so."""
        assert state is not None
        (A, dt_bias), (a, b), (q, k, v) = params, gates, self.split(channels)
        if prompts.form is PromptScan.FLA:
            return scan_whole(q, k, v, a, b, A, dt_bias, state, prompts, read, self.beta_scale)
        return delta_scan_varlen(
            q, k, v, a, b, A, dt_bias, state, prompts.query_start_loc, prompts.chunk_start_loc,
            prompts.chunk_row, prompts.row_chunk_loc, prompts.max_chunks_per_row, chunk_size, read,
            prompts.chunk_write, self.beta_scale,
        )  # fmt: skip

    def update(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: Tensor | None, rows: MambaMetadata
    ) -> Tensor:
        """`delta_state_update`."""
        plan = rows.plan
        assert state is not None
        assert isinstance(plan, SlotPlan)
        (A, dt_bias), (a, b), (q, k, v) = params, gates, self.split(channels)
        return delta_state_update(
            state, q, k, v, a, b, A, dt_bias, rows.query_start_loc, rows.max_query_len,
            plan.ssm_read, plan.ssm_write, self.beta_scale,
        )  # fmt: skip

    def replay(
        self,
        params: Tensors,
        channels: Tensor,
        gates: Tensors,
        state: Tensor | None,
        ring: Tensors,
        rows: MambaMetadata,
    ) -> Tensor:
        """`delta_replay_update`."""
        plan, row = rows.plan, rows.request_row
        assert state is not None
        assert row is not None
        assert isinstance(plan, ReplayPlan)
        (A, dt_bias), (a, b), (q, k, v) = params, gates, self.split(channels)
        ring_k, ring_u, ring_g = ring
        return delta_replay_update(
            state, ring_k, ring_u, ring_g, q, k, v, a, b, A, dt_bias, rows.query_start_loc,
            rows.max_query_len, plan.slot, row, plan.ring_start, plan.ring_len, self.beta_scale,
        )  # fmt: skip

    def fold(
        self, params: Tensors, conv: Tensor, state: Tensor | None, live: Tensor, ring: Tensors, at: FoldRows
    ) -> None:
        """`delta_fold_ring`."""
        assert state is not None
        k, u, g = ring
        delta_fold_ring(state, conv, live, k, u, g, *at)
