"""A recurrent layer between its projections: which rows of a step take which operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.ops import causal_conv1d_update, causal_conv1d_varlen
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.recurrence import Recurrence, Tensors
from bateleur.mamba.state_pool import Rings
from bateleur.mamba.step_metadata import MambaMetadata

States = tuple[Tensor, Tensor | None]
"""Conv windows and states of a layer; a pure convolution has no states."""


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
    """One recurrent layer between its projections: what it is, and its parameters.

    Raises ValueError for a tensor that has not the shape that the recurrence says, or too many or too few of them.
    """

    spec: Recurrence
    conv_weight: Tensor
    """(conv_dim, W)"""
    conv_bias: Tensor | None
    """(conv_dim,)"""
    params: Tensors
    """One for each of the recurrence's `parameters`, in their order."""

    def __post_init__(self) -> None:
        """Check every shape once."""
        spec = self.spec
        names = [each.name for each in spec.parameters]
        if len(self.params) != len(names):
            raise ValueError(f"params has {len(self.params)} tensors; it must be ({', '.join(names)})")
        _require_shape("conv_weight", self.conv_weight, (spec.conv_dim, spec.conv_width))
        if self.conv_bias is not None:
            _require_shape("conv_bias", self.conv_bias, (spec.conv_dim,))
        for given, each in zip(self.params, spec.parameters, strict=True):
            _require_shape(each.name, given, each.shape)

    def mix(
        self, channels: Tensor, gates: Tensors, rows: MixerRows, states: States, rings: Rings | None
    ) -> Tensor:
        """Convolution and recurrence over the tokens of a step, advancing the states of its rows.

        channels (T, conv_dim) and what the recurrence calls `gates`, decode rows first; states and rings are the
        layer's of a `StatePool`. Returns y (T, *output_shape).
        """
        decodes = rows.decodes
        if decodes is None:
            return self._scan(channels, gates, rows, states, rings)
        if rows.prompts is None:
            return self.decode(channels, gates, decodes, states, rings)
        n = decodes.num_decode_tokens
        first, rest = tuple(gate[:n] for gate in gates), tuple(gate[n:] for gate in gates)
        decoded = self.decode(channels[:n], first, decodes, states, rings)
        return torch.cat((decoded, self._scan(channels[n:], rest, rows, states, rings)))

    def decode(
        self, channels: Tensor, gates: Tensors, rows: MambaMetadata, states: States, rings: Rings | None
    ) -> Tensor:
        """`mix` of decode rows alone, as `MambaMetadata.decodes` or `pieces` has them: fit for capture.

        Returns y (T, *output_shape), a tensor of its own, in which tokens of no row have no meaning.
        """
        spec, plan, (conv, state) = self.spec, rows.plan, states
        if isinstance(plan, SlotPlan):
            channels = causal_conv1d_update(
                channels, self.conv_weight, self.conv_bias, conv, rows.query_start_loc, rows.max_query_len,
                plan.conv_read, plan.conv_offset, plan.conv_write, spec.conv_activation,
            )  # fmt: skip
            return spec.update(self.params, channels, gates, state, rows)
        row = rows.request_row
        assert rings is not None
        assert row is not None
        channels = causal_conv1d_update(
            channels, self.conv_weight, self.conv_bias, rings.live, rows.query_start_loc, rows.max_query_len,
            row, plan.conv_offset, row, spec.conv_activation,
        )  # fmt: skip
        return spec.replay(self.params, channels, gates, state, rings.entries, rows)

    def scan_into(
        self,
        y: Tensor,
        channels: Tensor,
        gates: Tensors,
        rows: MixerRows,
        states: States,
        rings: Rings | None,
    ) -> Tensor:
        """What `decode` of a step's `pieces` leaves to do: `mix` of the prompts, written into `y`, which is returned.

        Without prompts it launches nothing.
        """
        if rows.prompts is not None:
            n = rows.step.num_decode_tokens
            rest = tuple(gate[n:] for gate in gates)
            y[n:].copy_(self._scan(channels[n:], rest, rows, states, rings))
        return y

    def _scan(
        self, channels: Tensor, gates: Tensors, rows: MixerRows, states: States, rings: Rings | None
    ) -> Tensor:
        (conv, state), plan, cut, spec = states, rows.prompts, rows.step.prompts, self.spec
        assert plan is not None
        live, live_write = (None, None) if rings is None else (rings.live, rows.live_write)
        conv_read, read = (
            (plan.conv_read, plan.ssm_read) if isinstance(plan, SlotPlan) else (plan.slot, plan.slot)
        )
        channels = causal_conv1d_varlen(
            channels, self.conv_weight, self.conv_bias, conv, live, cut.query_start_loc, conv_read,
            cut.chunk_start_loc, cut.chunk_row, cut.chunk_write, live_write, spec.conv_activation,
        )  # fmt: skip
        return spec.scan(self.params, channels, gates, state, cut, rows.step.chunk_size, read)


def _require_shape(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    if given.shape != shape:
        raise ValueError(f"{name} has the shape {tuple(given.shape)}; it must be {shape}")
