"""State tensors of all recurrent layers; after a step, copies states, or adds later inputs (ring entries) to them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops import copy_states
from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan
from bateleur.mamba.recurrence import FoldBatch, Recurrence, Tensors
from bateleur.mamba.spec import StatePolicy, at_least
from bateleur.metadata.native.lazy_zeros import lazy_zeros


class Rings(NamedTuple):
    """Tensors of a layer besides its saved states, state policy FOLD, by request row. Contents of row 0 are undefined.

    request_conv: conv windows. entries: rings, that is ring buffers of the inputs after a request's saved state.
    """

    request_conv: Tensor
    """(rows, W - 1 + K, conv_dim) conv windows of running requests."""
    entries: Tensors
    """(rows, L, *shape) for each tensor of the recurrence's `ring_entry`."""

    def tensors(self) -> Tensors:
        """Return all tensors: request conv windows, then ring entries."""
        return (self.request_conv, *self.entries)


class StatePool:
    """Conv windows, states and (state policy FOLD) rings of all recurrent layers, which share slot and row numbers.

    State slot 0 is null: reading it gives a zero state, dropped writes go to it, and its contents are undefined.
    Tensors never move. Layers with equal recurrences share one tensor, so one operator call copies or folds all of
    them.

    Args:
        specs: recurrence of each layer, all with one policy.
        num_slots: number of state slots, including the null slot.
        device: device of the tensors.
        num_rows: number of rings under FOLD, one per running request, including the null row.
        ring_capacity: entries of a ring, as in `CacheLayout`.

    Raises:
        ValueError: no specs, specs with different policies, fewer than two slots, and under FOLD fewer than two rows or
            a ring capacity below 1 + 2 * drafts.
    """

    def __init__(
        self, specs: Sequence[Recurrence], num_slots: int, device: torch.device | str, *, num_rows: int = 0,
        ring_capacity: int = 16,
    ) -> None:  # fmt: skip
        if not specs:
            raise ValueError("specs is empty; a pool needs at least one layer")
        if len(policies := {spec.policy.value for spec in specs}) > 1:
            raise ValueError(f"specs have the policies {sorted(policies)}; all layers of a pool share one")
        at_least("num_slots", num_slots, 2)
        folds = specs[0].policy is StatePolicy.FOLD
        if folds:
            at_least("num_rows", num_rows, 2)
            at_least("ring_capacity", ring_capacity, max(1 + 2 * spec.num_speculative_tokens for spec in specs))
        self.specs = tuple(specs)
        self.num_slots = num_slots
        kinds: dict[Recurrence, list[int]] = {}
        for index, spec in enumerate(specs):
            kinds.setdefault(spec, []).append(index)
        self.groups = tuple(kinds.values())
        """Layer indices, from 0, of each group of layers that share a tensor."""
        self._kinds = tuple(kinds)
        self._pages: list[tuple[Tensor, Tensor | None]] = []
        self._rings: list[Rings] = []

        def zeros(group: Sequence[int], rows: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return lazy_zeros((len(group), rows, *shape), dtype=dtype, device=device)

        for spec, group in kinds.items():
            state = zeros(group, num_slots, spec.state_shape, spec.ssm_dtype) if spec.state_shape else None
            self._pages.append((zeros(group, num_slots, spec.conv_shape, spec.conv_dtype), state))
            if folds:
                windows = zeros(group, num_rows, spec.request_conv_shape, spec.conv_dtype)
                ring = (zeros(group, num_rows, (ring_capacity, *each.shape), each.dtype) for each in spec.ring_entry)
                self._rings.append(Rings(windows, tuple(ring)))
        self._place = {index: (kind, at) for kind, group in enumerate(self.groups) for at, index in enumerate(group)}

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Return a layer's conv states (num_slots, W - 1 + K, conv_dim) and SSM states (num_slots, *state_shape).

        W: taps of the convolution. K: drafts for SLOTS, 0 for FOLD. A pure convolution has no SSM state (None).
        """
        kind, at = self._place[index]
        conv, state = self._pages[kind]
        return conv[at], None if state is None else state[at]

    def rings(self, index: int) -> Rings | None:
        """Return the rings (inputs after the saved states) of layer `index`; None for the state policy SLOTS."""
        if not self._rings:
            return None
        kind, at = self._place[index]
        request_conv, entries = self._rings[kind]
        return Rings(request_conv[at], tuple(each[at] for each in entries))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers: state slots, request conv windows and rings, including null slots and null rows."""
        stacks = [*self._pages, *(rings.tensors() for rings in self._rings)]
        return sum(tensor.nbytes for stack in stacks for tensor in stack if tensor is not None)

    def admit(self, rows: Tensor, slots: Tensor) -> None:
        """Start requests, with the rings `rows`, from the states in `slots`, (n,) int64 each; slot 0 is a zero state.

        Copies the conv windows of the slots to the request conv windows, which a step of a single token reads. Does
        nothing for the state policy SLOTS.
        """
        for (conv, _), rings in zip(self._pages, self._rings, strict=False):
            windows = conv.index_select(1, slots).masked_fill_((slots == 0)[:, None, None], 0)
            rings.request_conv[:, :, : windows.shape[2]].index_copy_(1, rows, windows)

    def copy(self, plan: CopyPlan) -> None:
        """Copy states to the slots of their block boundaries in all layers; `plan` is from `plan_copy`."""
        for conv, state in self._pages:
            copy_states(conv, state, plan.conv_src, plan.conv_bias, plan.ssm_src, plan.dst)

    def fold(self, plan: FoldPlan, replay: ReplayPlan, request_row: Tensor, params: Sequence[Tensors]) -> None:
        """Add ring entries to saved states in all layers.

        Args:
            plan: entries to add, from `plan_fold`. replay: saved states and rings before the step, from `plan_replay`.
            request_row: (R,) request rows of the step.
            params: for each of `self.groups` (layers with equal recurrences), stacked parameters (layers, *shape).
        """
        at = FoldBatch(request_row, replay.ring_start, plan.count, replay.slot, plan.dst, plan.page_offset)
        stacks = zip(self._kinds, params, self._pages, self._rings, strict=True)
        for spec, of_group, (conv, state), (request_conv, entries) in stacks:
            spec.fold(of_group, conv, state, request_conv, entries, at)
