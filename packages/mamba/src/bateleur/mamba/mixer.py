"""A Mamba-2 layer between its projections: which rows of a step take which operators, and the operators themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.builder import MambaMetadata
from bateleur.mamba.ops import (
    causal_conv1d_update,
    causal_conv1d_varlen,
    replay_update,
    selective_state_update,
    ssd_scan_varlen,
)
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.spec import MambaSpec
from bateleur.mamba.state_pool import Rings


@dataclass(frozen=True, slots=True)
class MixerRows:
    """The rows of a step, sorted out once for all layers."""

    step: MambaMetadata
    decodes: MambaMetadata | None
    """The same of the decode rows alone; None if there are none."""
    prompts: SlotPlan | ReplayPlan | None
    """Plan of the prompt rows; None if there are none."""
    live_write: Tensor | None
    """(Pf,) the prompts' `request_row`, if requests have one."""

    @classmethod
    def of(cls, meta: MambaMetadata) -> MixerRows:
        """Those of the step that `meta` describes."""
        first, end = meta.num_decodes, meta.num_decodes + meta.num_prefills
        if first == end:  # the whole batch, padded rows included: nothing needs slicing
            return cls(meta, meta if first else None, None, None)
        live_write = None if meta.request_row is None else meta.request_row[first:end]
        return cls(meta, meta.decodes() if first else None, meta.plan.rows(first, end), live_write)


@dataclass(frozen=True, slots=True)
class Mixer:
    """One Mamba-2 layer between its projections: sizes, and parameters."""

    spec: MambaSpec
    weight: Tensor
    """(conv_dim, W), of the convolution."""
    A: Tensor
    """(H,) float32, negative."""
    D: Tensor
    """(H,)"""
    dt_bias: Tensor
    """(H,)"""
    bias: Tensor | None = None
    """(conv_dim,), of the convolution."""
    dt_min: float = 0.0
    dt_max: float = float("inf")

    def mix(
        self, xbc: Tensor, dt: Tensor, rows: MixerRows, states: tuple[Tensor, Tensor], rings: Rings | None
    ) -> Tensor:
        """Convolution and recurrence over the tokens of a step, advancing the states of its rows.

        xbc (T, conv_dim) and raw dt (T, H), decode rows first; states and rings are the layer's of a `StatePool`.
        Returns y (T, H, P).
        """
        decodes = rows.decodes
        if decodes is None:
            return self._scan(xbc, dt, rows, states, rings)
        if rows.prompts is None:
            return self._decode(xbc, dt, decodes, states, rings)
        n = decodes.num_decode_tokens
        decoded = self._decode(xbc[:n], dt[:n], decodes, states, rings)
        return torch.cat((decoded, self._scan(xbc[n:], dt[n:], rows, states, rings)))

    def split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels (T, conv_dim) as views x (T, H, P), B and C (T, G, N)."""
        spec = self.spec
        lanes = spec.num_groups * spec.state_size
        x, B, C = xbc.split([spec.inner_size, lanes, lanes], -1)
        groups = (-1, spec.num_groups, spec.state_size)
        return x.view(-1, spec.num_heads, spec.head_dim), B.view(groups), C.view(groups)

    def _decode(
        self, xbc: Tensor, dt: Tensor, rows: MambaMetadata, states: tuple[Tensor, Tensor], rings: Rings | None
    ) -> Tensor:
        (conv, ssm), plan, row = states, rows.plan, rows.request_row
        step, limits = (rows.query_start_loc, rows.max_query_len), (self.dt_min, self.dt_max)
        if isinstance(plan, SlotPlan):
            windows, window = conv, (plan.conv_read, plan.conv_offset, plan.conv_write)
        else:
            assert rings is not None
            assert row is not None
            windows, window = rings.live, (row, plan.conv_offset, row)
        xbc = causal_conv1d_update(xbc, self.weight, self.bias, windows, *step, *window, "silu")
        x, B, C = self.split(xbc)
        inputs = (x, dt, self.A, B, C, self.D, self.dt_bias, *step)
        if isinstance(plan, SlotPlan):
            return selective_state_update(ssm, *inputs, plan.ssm_read, plan.ssm_write, *limits)
        assert rings is not None
        assert row is not None
        ring = (plan.slot, row, plan.ring_start, plan.ring_len)
        return replay_update(ssm, rings.x, rings.dt, rings.B, *inputs, *ring, *limits)

    def _scan(
        self, xbc: Tensor, dt: Tensor, rows: MixerRows, states: tuple[Tensor, Tensor], rings: Rings | None
    ) -> Tensor:
        (conv, ssm), plan, cut = states, rows.prompts, rows.step.prompts
        assert plan is not None
        live, live_write = (None, None) if rings is None else (rings.live, rows.live_write)
        conv_read, ssm_read = (
            (plan.conv_read, plan.ssm_read) if isinstance(plan, SlotPlan) else (plan.slot, plan.slot)
        )
        xbc = causal_conv1d_varlen(
            xbc, self.weight, self.bias, conv, live, cut.query_start_loc, conv_read, cut.chunk_start_loc,
            cut.chunk_row, cut.chunk_write, live_write, "silu",
        )  # fmt: skip
        x, B, C = self.split(xbc)
        return ssd_scan_varlen(
            x, dt, self.A, B, C, self.D, self.dt_bias, ssm, cut.query_start_loc, cut.chunk_start_loc, cut.chunk_row,
            cut.row_chunk_loc, cut.max_chunks_per_row, rows.step.chunk_size, ssm_read, cut.chunk_write, self.dt_min,
            self.dt_max,
        )  # fmt: skip
