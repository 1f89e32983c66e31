"""Convolution and recurrence of one layer, for the decode and prefill rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.ops import causal_conv1d_update, causal_conv1d_varlen
from bateleur.mamba.planners import ReplayPlan, SlotPlan
from bateleur.mamba.recurrence import Recurrence, Tensors
from bateleur.mamba.state_pool import Rings

States = tuple[Tensor, Tensor | None]
"""Conv state and SSM state of a layer; a pure convolution has no SSM state."""


@dataclass(frozen=True, slots=True)
class MixerBatch:
    """The rows (requests) of a step, split into decodes and prefills once for all layers.

    `decodes` is None without decode rows, `prefill_plan` without prefill rows. `request_conv_write` is the part of
    `MambaMetadata.request_row` for the prefill rows.
    """

    metadata: MambaMetadata
    decodes: MambaMetadata | None
    """Metadata of the decode rows; None if there are none."""
    prefill_plan: SlotPlan | ReplayPlan | None
    """Plan of the prefill rows; None if there are none."""
    request_conv_write: Tensor | None
    """(Pf,) int64 request rows of the prefills; None if requests carry nothing between steps."""

    @classmethod
    def of(cls, meta: MambaMetadata) -> MixerBatch:
        """Split the rows of a step into decodes and prefills."""
        first, end = meta.num_decodes, meta.num_decodes + meta.num_prefills
        if first == end:  # the whole batch, including padded rows
            return cls(meta, meta if first else None, None, None)
        rows = None if meta.request_row is None else meta.request_row[first:end]
        return cls(meta, meta.decodes() if first else None, meta.plan.rows(first, end), rows)


@dataclass(frozen=True, slots=True)
class Mixer:
    """Convolution and recurrence of one layer, with its parameters.

    Raises ValueError for a wrong number of parameters, or a tensor of another shape than the recurrence declares.
    """

    spec: Recurrence
    conv_weight: Tensor
    """(conv_dim, W)"""
    conv_bias: Tensor | None
    """(conv_dim,)"""
    params: Tensors
    """One tensor for each of the recurrence's `parameters`, in their order."""

    def __post_init__(self) -> None:
        spec = self.spec
        names = [each.name for each in spec.parameters]
        if len(self.params) != len(names):
            raise ValueError(f"params has {len(self.params)} tensors; it must be ({', '.join(names)})")
        shapes: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
            ("conv_weight", self.conv_weight, (spec.conv_dim, spec.conv_width)),
            ("conv_bias", self.conv_bias, (spec.conv_dim,)),
            *((each.name, given, each.shape) for given, each in zip(self.params, spec.parameters, strict=True)),
        ]
        for name, given, shape in shapes:
            if given is not None and given.shape != shape:
                raise ValueError(f"{name} has the shape {tuple(given.shape)}; it must be {shape}")

    def mix(self, channels: Tensor, gates: Tensors, batch: MixerBatch, states: States, rings: Rings | None) -> Tensor:
        """Run convolution and recurrence over all tokens of a step, and update the states.

        Args:
            channels: (T, conv_dim), decode rows first.
            gates: (T, *shape) for each of the recurrence's `gates`.
            batch: the requests of the step.
            states, rings: state tensors and rings of this layer, from a `StatePool`.

        Returns y (T, *output_shape).
        """
        if batch.decodes is None:
            return self._prefill(channels, gates, batch, states, rings)
        if batch.prefill_plan is None:
            return self.decode(channels, gates, batch.decodes, states, rings)
        n = batch.metadata.num_decode_tokens
        first, rest = tuple(gate[:n] for gate in gates), tuple(gate[n:] for gate in gates)
        decoded = self.decode(channels[:n], first, batch.decodes, states, rings)
        return torch.cat((decoded, self._prefill(channels[n:], rest, batch, states, rings)))

    def decode(
        self, channels: Tensor, gates: Tensors, rows: MambaMetadata, states: States, rings: Rings | None
    ) -> Tensor:
        """Run `mix` for decode rows only; can be captured in a graph.

        rows: the decode rows, from `MambaMetadata.decodes()` or `MambaMetadata.piecewise_decodes`. Returns y
        (T, *output_shape), a new tensor, unspecified for tokens that belong to no row.
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
            channels, self.conv_weight, self.conv_bias, rings.request_conv, rows.query_start_loc, rows.max_query_len,
            row, plan.conv_offset, row, spec.conv_activation,
        )  # fmt: skip
        return spec.replay(self.params, channels, gates, state, rings.entries, rows)

    def prefill_into(
        self, y: Tensor, channels: Tensor, gates: Tensors, batch: MixerBatch, states: States, rings: Rings | None
    ) -> Tensor:
        """Run `mix` for the prefill rows only, write their outputs into `y`, and return `y`.

        Call it after `decode` of the rows `MambaMetadata.piecewise_decodes`. Launches nothing without prefills.
        """
        if batch.prefill_plan is not None:
            n = batch.metadata.num_decode_tokens
            rest = tuple(gate[n:] for gate in gates)
            y[n:].copy_(self._prefill(channels[n:], rest, batch, states, rings))
        return y

    def _prefill(
        self, channels: Tensor, gates: Tensors, batch: MixerBatch, states: States, rings: Rings | None
    ) -> Tensor:
        (conv, state), plan, chunks, spec = (states, batch.prefill_plan, batch.metadata.prefill_chunks, self.spec)
        assert plan is not None
        request_conv, write = (None, None) if rings is None else (rings.request_conv, batch.request_conv_write)
        conv_read, read = (plan.conv_read, plan.ssm_read) if isinstance(plan, SlotPlan) else (plan.slot, plan.slot)
        channels = causal_conv1d_varlen(
            channels, self.conv_weight, self.conv_bias, conv, request_conv, chunks.query_start_loc, conv_read,
            chunks.chunk_start_loc, chunks.chunk_row, chunks.chunk_write, write, spec.conv_activation,
        )  # fmt: skip
        return spec.scan(self.params, channels, gates, state, chunks, batch.metadata.chunk_size, read)
