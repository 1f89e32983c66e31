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
from bateleur.mamba.prompts import Prompts
from bateleur.mamba.spec import MambaSpec
from bateleur.mamba.state_pool import Rings


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The leading rows of a step that continue a state, as the update operators take them."""

    num_tokens: int
    """Tokens of the decode rows; with no prompt behind them, the padded tail belongs to them as well."""
    query_start_loc: Tensor
    max_query_len: int
    plan: SlotPlan | ReplayPlan
    """Of these rows; its kind chooses the operators."""
    request_row: Tensor | None
    """(D,) rows of the rings; None under SLOTS without drafts."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows that follow, as the varlen operators take them; offsets start at their first token."""

    cut: Prompts
    conv_read: Tensor
    ssm_read: Tensor
    live_write: Tensor | None
    """(Pf,) rows of the live conv windows; None under SLOTS, which has none."""
    chunk_size: int


@dataclass(frozen=True, slots=True)
class MixerRows:
    """The rows of a step, sorted out once for all layers; None stands for no row of a kind."""

    decodes: DecodeRows | None
    prompts: PromptRows | None

    @classmethod
    def of(cls, meta: MambaMetadata) -> MixerRows:
        """Those of the step that `meta` describes."""
        return cls(_decodes(meta), _prompts(meta))


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
        decodes, prompts = rows.decodes, rows.prompts
        if prompts is None:
            assert decodes is not None
            return self._decode(xbc, dt, decodes, states, rings)
        if decodes is None:
            return self._scan(xbc, dt, prompts, states, rings)
        n = decodes.num_tokens
        decoded = self._decode(xbc[:n], dt[:n], decodes, states, rings)
        return torch.cat((decoded, self._scan(xbc[n:], dt[n:], prompts, states, rings)))

    def split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels (T, conv_dim) as views x (T, H, P), B and C (T, G, N)."""
        spec = self.spec
        lanes = spec.num_groups * spec.state_size
        x, B, C = xbc.split([spec.inner_size, lanes, lanes], -1)
        groups = (-1, spec.num_groups, spec.state_size)
        return x.view(-1, spec.num_heads, spec.head_dim), B.view(groups), C.view(groups)

    def _decode(
        self, xbc: Tensor, dt: Tensor, rows: DecodeRows, states: tuple[Tensor, Tensor], rings: Rings | None
    ) -> Tensor:
        (conv, ssm), plan, loc, longest = states, rows.plan, rows.query_start_loc, rows.max_query_len
        taps, limits = (self.weight, self.bias), (self.dt_min, self.dt_max)
        if isinstance(plan, SlotPlan):
            window = (plan.conv_read, plan.conv_offset, plan.conv_write)
            xbc = causal_conv1d_update(xbc, *taps, conv, loc, longest, *window, "silu")
            x, B, C = self.split(xbc)
            inputs = (x, dt, self.A, B, C, self.D, self.dt_bias, loc, longest)
            return selective_state_update(ssm, *inputs, plan.ssm_read, plan.ssm_write, *limits)
        assert rings is not None
        assert rows.request_row is not None
        window = (rows.request_row, plan.conv_offset, rows.request_row)
        xbc = causal_conv1d_update(xbc, *taps, rings.live, loc, longest, *window, "silu")
        x, B, C = self.split(xbc)
        inputs = (x, dt, self.A, B, C, self.D, self.dt_bias, loc, longest)
        ring = (plan.slot, rows.request_row, plan.ring_start, plan.ring_len)
        return replay_update(ssm, rings.x, rings.dt, rings.B, *inputs, *ring, *limits)

    def _scan(
        self, xbc: Tensor, dt: Tensor, rows: PromptRows, states: tuple[Tensor, Tensor], rings: Rings | None
    ) -> Tensor:
        conv, ssm = states
        cut, live = rows.cut, None if rings is None else rings.live
        xbc = causal_conv1d_varlen(
            xbc, self.weight, self.bias, conv, live, cut.query_start_loc, rows.conv_read, cut.chunk_start_loc,
            cut.chunk_row, cut.chunk_write, rows.live_write, "silu",
        )  # fmt: skip
        x, B, C = self.split(xbc)
        return ssd_scan_varlen(
            x, dt, self.A, B, C, self.D, self.dt_bias, ssm, cut.query_start_loc, cut.chunk_start_loc, cut.chunk_row,
            cut.row_chunk_loc, cut.max_chunks_per_row, rows.chunk_size, rows.ssm_read, cut.chunk_write, self.dt_min,
            self.dt_max,
        )  # fmt: skip


def _decodes(meta: MambaMetadata) -> DecodeRows | None:
    rows = meta.num_decodes
    if rows == 0:
        return None
    plan, loc, request_row = meta.plan, meta.query_start_loc, meta.request_row
    if meta.num_prefills:  # else it is the whole batch, padded rows included: nothing needs slicing
        plan, loc = plan.rows(0, rows), loc[: rows + 1]
        request_row = None if request_row is None else request_row[:rows]
    return DecodeRows(meta.num_decode_tokens, loc, meta.max_query_len, plan, request_row)


def _prompts(meta: MambaMetadata) -> PromptRows | None:
    if meta.num_prefills == 0:
        return None
    first, end = meta.num_decodes, meta.num_decodes + meta.num_prefills
    plan = meta.plan.rows(first, end)
    if isinstance(plan, SlotPlan):
        return PromptRows(meta.prompts, plan.conv_read, plan.ssm_read, None, meta.chunk_size)
    assert meta.request_row is not None
    return PromptRows(meta.prompts, plan.slot, plan.slot, meta.request_row[first:end], meta.chunk_size)
